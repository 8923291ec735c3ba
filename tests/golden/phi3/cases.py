"""Tiny phi3 models: tensors that hold several matrices, long-rope factors, a sliding window.

llama.cpp does not slide phi3's window, so the case with one has no peer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from golden.tiny import EPSILON, Array, Case, Shapes, llama_state, renamed, trunk
from golden.tiny import Tensors as State

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER = 32, 2, 4, 2, 8, 48
QKV = (HEADS + 2 * KV_HEADS) * DIM


def _shapes() -> Shapes:
    shapes = trunk(WIDTH, LAYERS)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_qkv.weight": (QKV, WIDTH),
            f"blk.{i}.attn_output.weight": (WIDTH, HEADS * DIM),
            f"blk.{i}.ffn_up.weight": (2 * INNER, WIDTH),
            f"blk.{i}.ffn_down.weight": (WIDTH, INNER),
        }
    return shapes


def _state(case: Case, found: State) -> State:
    del case
    kept = {name: value for name, value in found.items() if not name.startswith("rope_factors")}
    return renamed(kept, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})


def _case(
    name: str,
    context: int = 64,
    rope: dict[str, Any] | None = None,
    tensors: dict[str, Array] | None = None,
    window: int = 0,
    metadata: dict[str, Any] | None = None,
) -> Case:
    default = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    return Case(
        name,
        "phi3",
        {
            "block_count": LAYERS,
            "embedding_length": WIDTH,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": EPSILON,
            "rope.dimension_count": DIM,
            "rope.freq_base": 10000.0,
            **(metadata or {}),
            **({"attention.sliding_window": window} if window else {}),
        },
        _shapes(),
        "Phi3",
        {
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "sliding_window": window or None,
            "rope_parameters": rope or default,
            **(
                {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
                if rope
                else {}
            ),
        },
        _state if (rope or not tensors) else llama_state,
        context=context,
        peer=not window,
        tensors=tensors or {},
    )


SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.2, 2.0, 4.0, 9.0]
_FACTORS = {
    "rope_factors_short.weight": np.array(SHORT, np.float32),
    "rope_factors_long.weight": np.array(LONG, np.float32),
}


def _long(name: str, context: int, original: int) -> Case:
    """A context longer than the original one uses the long factors."""
    return _case(
        name,
        context,
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": original,
        },
        _FACTORS,
        metadata={
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": _magnitude(context / original, original),
        },
    )


def _magnitude(scale: float, original: int) -> float:
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


CASES = (
    _case("plain"),
    _case("window", window=10),
    _long("long", 64, 32),
    _long("short", 256, 256),
)
