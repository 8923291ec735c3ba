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
        "Q4_0": 1.33,
        "Q4_1": 1.45,
        "Q5_0": 1.36,
        "Q5_1": 1.41,
        "Q8_0": 1.19,
        "Q2_K": 1.29,
        "Q3_K": 1.16,
        "Q4_K": 1.35,
        "Q5_K": 1.23,
        "Q6_K": 1.09,
    },
    "AVX512": {
        "Q4_0": 1.19,
        "Q4_1": 1.29,
        "Q5_0": 1.26,
        "Q5_1": 1.33,
        "Q8_0": 1.21,
        "Q2_K": 1.72,
        "Q3_K": 1.72,
        "Q4_K": 1.74,
        "Q5_K": 1.69,
        "Q6_K": 1.28,
    },
    "AVXVNNI": {
        "Q4_0": 1.45,
        "Q4_1": 1.51,
        "Q5_0": 1.47,
        "Q5_1": 1.55,
        "Q8_0": 1.40,
        "Q2_K": 1.41,
        "Q3_K": 1.33,
        "Q4_K": 1.42,
        "Q5_K": 1.28,
        "Q6_K": 1.13,
    },
}

ALIGNED_TO_RAW: dict[str, dict[str, float]] = {
    "AVX2": {
        "Q2_K": 0.94,
        "IQ2_XXS": 1.00,
        "IQ2_XS": 1.00,
    },
    "AVX512": {
        "Q2_K": 1.18,
        "IQ2_XXS": 0.98,
        "IQ2_XS": 0.99,
    },
    "AVXVNNI": {
        "Q2_K": 0.94,
        "IQ2_XXS": 1.00,
        "IQ2_XS": 1.02,
    },
}

PLANES_TO_RAW: dict[str, dict[str, float]] = {
    "AVX2": {
        "IQ2_XXS": 1.25,
        "IQ2_XS": 1.16,
    },
    "AVX512": {
        "IQ2_XXS": 1.06,
        "IQ2_XS": 1.08,
    },
    "AVXVNNI": {
        "IQ2_XXS": 1.19,
        "IQ2_XS": 1.11,
    },
}
