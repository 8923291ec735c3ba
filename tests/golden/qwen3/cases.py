"""Tiny qwen3 models: normed heads of a size of their own, rotated halves."""

from __future__ import annotations

from golden.tiny import EPSILON, Case, Shapes, attention, gated, llama_state, trunk

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER = 32, 2, 4, 2, 16, 48


def _shapes(tied: bool) -> Shapes:
    shapes = trunk(WIDTH, LAYERS, tied=tied)
    for i in range(LAYERS):
        shapes |= attention(i, WIDTH, HEADS, KV_HEADS, DIM, norms=True) | gated(i, WIDTH, INNER)
    return shapes


CASES = tuple(
    Case(
        name,
        "qwen3",
        {
            "block_count": LAYERS,
            "embedding_length": WIDTH,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": DIM,
            "attention.value_length": DIM,
            "attention.layer_norm_rms_epsilon": EPSILON,
            "rope.freq_base": 1e6,
        },
        _shapes(tied),
        "Qwen3",
        {
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "tie_word_embeddings": tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        llama_state,
    )
    for name, tied in (("plain", False), ("tied", True))
)
