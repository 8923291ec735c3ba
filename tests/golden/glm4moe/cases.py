"""Tiny glm4moe models: a dense layer, then sigmoid-routed experts; heads rotated in part; a layer
that only predicts further tokens and takes no part."""

from __future__ import annotations

from golden.tiny import EPSILON, Case, Shapes, Tensors, attention, experts, gated, renamed, trunk

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER, COMMON, COUNT, USED = 32, 3, 4, 2, 16, 16, 48, 8, 3


def _shapes(norms: bool) -> Shapes:
    shapes = {
        name.replace("ffn_norm", "post_attention_norm"): shape
        for name, shape in trunk(WIDTH, LAYERS + 1).items()
    }
    for i in range(LAYERS + 1):
        shapes |= attention(i, WIDTH, HEADS, KV_HEADS, DIM, biases="qkv", norms=norms)
        if i == 0:
            shapes |= gated(i, WIDTH, COMMON)
            continue
        shapes |= experts(i, WIDTH, INNER, COUNT) | gated(i, WIDTH, INNER, "_shexp")
        shapes[f"blk.{i}.exp_probs_b.bias"] = (COUNT,)
    last = f"blk.{LAYERS}.nextn"
    return shapes | {
        f"{last}.eh_proj.weight": (WIDTH, 2 * WIDTH),
        f"{last}.enorm.weight": (WIDTH,),
        f"{last}.hnorm.weight": (WIDTH,),
    }


def _state(case: Case, found: Tensors) -> Tensors:
    del case
    kept = {name: v for name, v in found.items() if not name.startswith(f"blk.{LAYERS}.")}
    names = {
        "post_attention_norm": "post_attention_layernorm",
        "exp_probs_b": "mlp.gate.e_score_correction_bias!",
    }
    return renamed(kept, names)


CASES = tuple(
    Case(
        name,
        "glm4moe",
        {
            "block_count": LAYERS + 1,
            "nextn_predict_layers": 1,
            "embedding_length": WIDTH,
            "feed_forward_length": COMMON,
            "expert_feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": DIM,
            "attention.value_length": DIM,
            "attention.layer_norm_rms_epsilon": EPSILON,
            "rope.dimension_count": DIM // 2,
            "rope.freq_base": 1e6,
            "expert_count": COUNT,
            "expert_used_count": USED,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
        _shapes(norms),
        "Glm4Moe",
        {
            "hidden_size": WIDTH,
            "intermediate_size": COMMON,
            "moe_intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "attention_bias": True,
            "use_qk_norm": norms,
            "n_routed_experts": COUNT,
            "num_experts_per_tok": USED,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
            },
        },
        _state,
    )
    for name, norms in (("plain", False), ("normed_heads", True))
)
