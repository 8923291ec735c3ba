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
        "Q4_0": 1.38,
        "Q4_1": 1.45,
        "Q5_0": 1.45,
        "Q5_1": 1.50,
        "Q8_0": 1.19,
        "Q2_K": 1.29,
        "Q3_K": 1.19,
        "Q4_K": 1.39,
        "Q5_K": 1.29,
        "Q6_K": 1.10,
    },
    "AVX512": {
        "Q4_0": 1.39,
        "Q4_1": 1.37,
        "Q5_0": 1.51,
        "Q5_1": 1.50,
        "Q8_0": 1.35,
        "Q2_K": 1.65,
        "Q3_K": 1.56,
        "Q4_K": 1.54,
        "Q5_K": 1.51,
        "Q6_K": 1.09,
    },
}

ALIGNED_TO_RAW: dict[str, dict[str, float]] = {
    "AVX2": {
        "Q2_K": 0.93,
        "IQ2_XXS": 1.01,
        "IQ2_XS": 1.01,
    },
    "AVX512": {
        "Q2_K": 1.17,
        "IQ2_XXS": 0.98,
        "IQ2_XS": 1.00,
    },
}

PLANES_TO_RAW: dict[str, dict[str, float]] = {
    "AVX2": {
        "IQ2_XXS": 1.19,
        "IQ2_XS": 1.12,
    },
    "AVX512": {
        "IQ2_XXS": 1.03,
        "IQ2_XS": 1.06,
    },
}
