"""Tiny qwen2 models: biases on q, k and v, rotated halves."""

from __future__ import annotations

from typing import Any

from golden.tiny import EPSILON, Case, Shapes, attention, gated, llama_state, trunk

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER = 32, 2, 4, 2, 8, 48


def _case(name: str, rope: dict[str, Any], metadata: dict[str, Any], *, tied: bool = False) -> Case:
    shapes: Shapes = trunk(WIDTH, LAYERS, tied=tied)
    for i in range(LAYERS):
        shapes |= attention(i, WIDTH, HEADS, KV_HEADS, DIM, biases="qkv") | gated(i, WIDTH, INNER)
    return Case(
        name,
        "qwen2",
        {
            "block_count": LAYERS,
            "embedding_length": WIDTH,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": EPSILON,
            **metadata,
        },
        shapes,
        "Qwen2",
        {
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "tie_word_embeddings": tied,
            "rope_parameters": rope,
        },
        llama_state,
    )


CASES = (
    _case(
        "plain",
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope.freq_base": 1e6},
    ),
    _case(
        "tied_yarn",
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {
            "rope.freq_base": 1e4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
        tied=True,
    ),
)
