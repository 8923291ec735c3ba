"""A tiny llama with routed experts, as Mixtral is: the chosen experts' weights sum to 1."""

from __future__ import annotations

from golden.tiny import EPSILON, Case, Tensors, attention, experts, halves, renamed, trunk

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER, COUNT, USED = 32, 2, 4, 2, 8, 24, 6, 2


def _state(case: Case, found: Tensors) -> Tensors:
    del case
    for i in range(LAYERS):
        for name, heads in (("q", HEADS), ("k", KV_HEADS)):
            key = f"blk.{i}.attn_{name}.weight"
            found[key] = halves(found[key], heads)
    return renamed(found)


SHAPES = trunk(WIDTH, LAYERS)
for layer in range(LAYERS):
    SHAPES |= attention(layer, WIDTH, HEADS, KV_HEADS, DIM)
    SHAPES |= experts(layer, WIDTH, INNER, COUNT)

CASES = (
    Case(
        "mixtral",
        "llama",
        {
            "block_count": LAYERS,
            "embedding_length": WIDTH,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": EPSILON,
            "rope.dimension_count": DIM,
            "rope.freq_base": 1e6,
            "expert_count": COUNT,
            "expert_used_count": USED,
        },
        SHAPES,
        "Mixtral",
        {
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "num_local_experts": COUNT,
            "num_experts_per_tok": USED,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        _state,
    ),
)
