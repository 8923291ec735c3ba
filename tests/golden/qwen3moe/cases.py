"""A tiny qwen3moe: normed heads, and experts whose weights sum to 1."""

from __future__ import annotations

from golden.tiny import EPSILON, Case, attention, experts, llama_state, trunk

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER, COUNT, USED = 32, 2, 4, 2, 16, 16, 8, 3

SHAPES = trunk(WIDTH, LAYERS)
for layer in range(LAYERS):
    SHAPES |= attention(layer, WIDTH, HEADS, KV_HEADS, DIM, norms=True)
    SHAPES |= experts(layer, WIDTH, INNER, COUNT)

CASES = (
    Case(
        "plain",
        "qwen3moe",
        {
            "block_count": LAYERS,
            "embedding_length": WIDTH,
            "feed_forward_length": 48,
            "expert_feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": DIM,
            "attention.value_length": DIM,
            "attention.layer_norm_rms_epsilon": EPSILON,
            "rope.freq_base": 1e6,
            "expert_count": COUNT,
            "expert_used_count": USED,
        },
        SHAPES,
        "Qwen3Moe",
        {
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "moe_intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "num_experts": COUNT,
            "num_experts_per_tok": USED,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        llama_state,
    ),
)
