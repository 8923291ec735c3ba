"""A tiny mixture of experts wide enough for the layouts that an owner makes for devices."""

from __future__ import annotations

import dataclasses

from ds4_common.gguf import GgmlType as T
from golden import tiny
from golden.qwen3moe.cases import CASES as QWEN3MOE

# Matrices of a layer: q, k, v, o, router, gate, up, down.
TWO_BIT = (T.F16, T.F16, T.F16, T.F16, T.F32, T.IQ2_XXS, T.IQ2_XXS, T.Q2_K)


def wide_experts() -> tiny.Case:
    """Experts of the widths for which an owner builds aligned artifacts when nobody computes."""
    case, width, inner = QWEN3MOE[0], 1024, 256
    changed = {32: width, 16: inner}
    shapes = {}
    for name, shape in case.shapes.items():
        if "_exps" in name:
            shapes[name] = tuple(changed.get(n, n) for n in shape)
        elif "attn_output" in name:
            shapes[name] = (width, shape[1])
        else:  # heads keep their size
            shapes[name] = (*shape[:-1], changed[32] if shape[-1] == 32 else shape[-1])
    sizes = {"embedding_length": width, "expert_feed_forward_length": inner}
    return dataclasses.replace(case, shapes=shapes, metadata=dict(case.metadata) | sizes)
