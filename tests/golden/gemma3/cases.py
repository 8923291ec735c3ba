"""Tiny gemma3 models: normed heads, and a base of their own for the layers that slide."""

from __future__ import annotations

from typing import Any

from golden.gemma2.cases import DIM, HEADS, INNER, KV_HEADS, WIDTH, gemma_shapes, gemma_state
from golden.tiny import EPSILON, Case

LAYERS, WINDOW = 7, 8


def _case(name: str, rope: dict[str, Any], metadata: dict[str, Any]) -> Case:
    return Case(
        name,
        "gemma3",
        {
            "block_count": LAYERS,
            "embedding_length": WIDTH,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": DIM,
            "attention.value_length": DIM,
            "attention.layer_norm_rms_epsilon": EPSILON,
            "attention.sliding_window": WINDOW,
            "rope.freq_base": 1e6,
            **metadata,
        },
        gemma_shapes(True, LAYERS),
        "Gemma3Text",
        {
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "query_pre_attn_scalar": DIM,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, **rope},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        gemma_state,
    )


CASES = (
    _case("plain", {"rope_type": "default"}, {}),
    _case(
        "linear",
        {"rope_type": "linear", "factor": 8.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
)
