"""A model of experts whose weights take every aligned layout that device memory has by default."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ds4_common.gguf import GgmlType
from golden import tiny
from golden.qwen2moe.cases import CASES

_WIDER = {32: 1024, 16: 256, 40: 2048, 6: 4}  # widths of the golden case, and its experts
_SIZES = {
    "block_count": 1, "embedding_length": 1024, "feed_forward_length": 2048,
    "expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 2048,
    "expert_count": 4, "expert_used_count": 2,
}  # fmt: skip
_TYPES = {
    "ffn_gate_exps": GgmlType.IQ2_XXS,
    "ffn_up_exps": GgmlType.IQ2_XS,
    "ffn_down_exps": GgmlType.Q2_K,
    "_shexp.weight": GgmlType.Q8_0,
}


def write_experts(path: Path) -> Path:
    """One layer, four experts, two of them used; 20 MB."""
    case = CASES[0]
    shapes = {
        name: _shape(name, shape)
        for name, shape in case.shapes.items()
        if not name.startswith("blk.1.")
    }
    metadata = dict(case.metadata) | _SIZES
    wide = dataclasses.replace(case, shapes=shapes, metadata=metadata, context=96)
    return tiny.write_gguf(wide, path, _TYPES)


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    wide = tuple(_WIDER.get(n, n) for n in shape)
    return (512, *wide[1:]) if ".attn_k." in name or ".attn_v." in name else wide
