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
        "Q4_0": 1.36,
        "Q4_1": 1.44,
        "Q5_0": 1.31,
        "Q5_1": 1.43,
        "Q8_0": 1.19,
        "Q2_K": 1.24,
        "Q3_K": 1.13,
        "Q4_K": 1.34,
        "Q5_K": 1.22,
        "Q6_K": 1.07,
    },
    "AVX512": {
        "Q4_0": 1.51,
        "Q4_1": 1.36,
        "Q5_0": 1.55,
        "Q5_1": 1.58,
        "Q8_0": 1.29,
        "Q2_K": 1.61,
        "Q3_K": 1.57,
        "Q4_K": 1.69,
        "Q5_K": 1.59,
        "Q6_K": 1.18,
    },
    "AVXVNNI": {
        "Q4_0": 1.32,
        "Q4_1": 1.51,
        "Q5_0": 1.39,
        "Q5_1": 1.39,
        "Q8_0": 1.25,
        "Q2_K": 1.38,
        "Q3_K": 1.32,
        "Q4_K": 1.40,
        "Q5_K": 1.28,
        "Q6_K": 1.15,
    },
}

ALIGNED_TO_RAW: dict[str, dict[str, float]] = {
    "AVX2": {
        "Q2_K": 0.94,
        "IQ2_XXS": 1.01,
        "IQ2_XS": 1.02,
    },
    "AVX512": {
        "Q2_K": 1.18,
        "IQ2_XXS": 0.96,
        "IQ2_XS": 0.99,
    },
    "AVXVNNI": {
        "Q2_K": 0.94,
        "IQ2_XXS": 1.00,
        "IQ2_XS": 1.00,
    },
}

PLANES_TO_RAW: dict[str, dict[str, float]] = {
    "AVX2": {
        "IQ2_XXS": 1.26,
        "IQ2_XS": 1.16,
    },
    "AVX512": {
        "IQ2_XXS": 1.05,
        "IQ2_XS": 1.06,
    },
    "AVXVNNI": {
        "IQ2_XXS": 1.18,
        "IQ2_XS": 1.10,
    },
}
