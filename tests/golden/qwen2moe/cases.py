"""Tiny qwen2moe models: routed experts, and a shared one behind a gate of its own."""

from __future__ import annotations

from golden.tiny import EPSILON, Case, Tensors, attention, experts, gated, renamed, trunk

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER, COMMON, COUNT, USED = 32, 2, 4, 2, 8, 16, 40, 6, 3


def _state(case: Case, found: Tensors) -> Tensors:
    del case
    names = {
        f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")
    }
    names["ffn_gate_inp_shexp"] = "mlp.shared_expert_gate"
    for name in [name for name in found if name.endswith("gate_inp_shexp.weight")]:
        found[name] = found[name].reshape(1, -1)
    return renamed(found, names)


SHAPES = trunk(WIDTH, LAYERS)
for layer in range(LAYERS):
    SHAPES |= attention(layer, WIDTH, HEADS, KV_HEADS, DIM, biases="qkv")
    SHAPES |= experts(layer, WIDTH, INNER, COUNT) | gated(layer, WIDTH, COMMON, "_shexp")
    SHAPES[f"blk.{layer}.ffn_gate_inp_shexp.weight"] = (WIDTH,)

CASES = (
    Case(
        "plain",
        "qwen2moe",
        {
            "block_count": LAYERS,
            "embedding_length": WIDTH,
            "feed_forward_length": COMMON,
            "expert_feed_forward_length": INNER,
            "expert_shared_feed_forward_length": COMMON,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": EPSILON,
            "rope.freq_base": 1e6,
            "expert_count": COUNT,
            "expert_used_count": USED,
        },
        SHAPES,
        "Qwen2Moe",
        {
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "moe_intermediate_size": INNER,
            "shared_expert_intermediate_size": COMMON,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "num_experts": COUNT,
            "num_experts_per_tok": USED,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        _state,
    ),
)
