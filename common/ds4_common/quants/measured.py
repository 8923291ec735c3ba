"""How much faster than raw blocks a type runs in other layouts, by instruction set:
packed (X8), the published aligned artifacts, and planes.

Written by `ds4-bench layouts --out` this file; not by hand. Read by `ds4_common.quants`.
"""

PACKED_TO_RAW: dict[str, dict[str, float]] = {
    "AMX": {
        "Q4_0": 1.71,
        "Q4_1": 1.67,
        "Q5_0": 1.90,
        "Q5_1": 2.00,
        "Q8_0": 1.68,
        "Q2_K": 2.05,
        "Q3_K": 2.04,
        "Q4_K": 1.69,
        "Q5_K": 1.52,
    },
    "AVX2": {
        "Q4_0": 1.37,
        "Q4_1": 1.50,
        "Q5_0": 1.35,
        "Q5_1": 1.50,
        "Q8_0": 1.13,
        "Q2_K": 1.35,
        "Q3_K": 1.30,
        "Q4_K": 1.32,
        "Q5_K": 1.36,
        "Q6_K": 1.19,
    },
    "AVX512": {
        "Q4_0": 1.71,
        "Q4_1": 1.63,
        "Q5_0": 1.61,
        "Q5_1": 1.60,
        "Q8_0": 1.54,
        "Q2_K": 1.85,
        "Q3_K": 1.83,
        "Q4_K": 1.86,
        "Q5_K": 1.80,
        "Q6_K": 1.33,
    },
}

ALIGNED_TO_RAW: dict[str, dict[str, float]] = {
    "AVX2": {
        "Q2_K": 1.01,
        "IQ2_XXS": 1.07,
        "IQ2_XS": 1.10,
    },
    "AVX512": {
        "Q2_K": 1.07,
        "IQ2_XXS": 1.03,
        "IQ2_XS": 1.02,
    },
}

PLANES_TO_RAW: dict[str, dict[str, float]] = {
    "AVX2": {
        "IQ2_XXS": 1.14,
        "IQ2_XS": 1.23,
    },
    "AVX512": {
        "IQ2_XXS": 1.09,
        "IQ2_XS": 1.07,
    },
}
