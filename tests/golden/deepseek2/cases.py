"""Tiny deepseek2 models: latent attention in both forms, softmax and sigmoid routers with groups.

llama.cpp counts a group as its two best experts also where V2 counts the best one only, and scales
a short query differently in models that it takes for V2-Lite; those cases have no peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from golden.tiny import EPSILON, Case, Shapes, Tensors, experts, gated, renamed, trunk

WIDTH, LAYERS, HEADS, INNER, COMMON, COUNT, USED = 32, 3, 4, 16, 48, 8, 3
QUERY_RANK, RANK, PLAIN, TURNED, VALUE = 24, 20, 12, 8, 10
KEY = PLAIN + TURNED


@dataclass(frozen=True)
class Form:
    """`absorbed`: the file has attn_k_b and attn_v_b. `query_rank` 0: queries have no latent."""

    absorbed: bool
    query_rank: int
    sigmoid: bool

    def shapes(self) -> Shapes:
        shapes = trunk(WIDTH, LAYERS)
        for i in range(LAYERS):
            stem = f"blk.{i}.attn"
            if self.query_rank:
                shapes[f"{stem}_q_a.weight"] = (self.query_rank, WIDTH)
                shapes[f"{stem}_q_a_norm.weight"] = (self.query_rank,)
                shapes[f"{stem}_q_b.weight"] = (HEADS * KEY, self.query_rank)
            else:
                shapes[f"{stem}_q.weight"] = (HEADS * KEY, WIDTH)
            shapes[f"{stem}_kv_a_mqa.weight"] = (RANK + TURNED, WIDTH)
            shapes[f"{stem}_kv_a_norm.weight"] = (RANK,)
            if self.absorbed:
                shapes[f"{stem}_k_b.weight"] = (HEADS, RANK, PLAIN)
                shapes[f"{stem}_v_b.weight"] = (HEADS, VALUE, RANK)
            else:
                shapes[f"{stem}_kv_b.weight"] = (HEADS * (PLAIN + VALUE), RANK)
            shapes[f"{stem}_output.weight"] = (WIDTH, HEADS * VALUE)
            if i == 0:
                shapes |= gated(i, WIDTH, COMMON)
                continue
            shapes |= experts(i, WIDTH, INNER, COUNT) | gated(i, WIDTH, 2 * INNER, "_shexp")
            if self.sigmoid:
                shapes[f"blk.{i}.exp_probs_b.bias"] = (COUNT,)
        return shapes


def _state(case: Case, found: Tensors) -> Tensors:
    """There one matrix holds each head's keys, then its values."""
    del case
    for i in range(LAYERS):
        if f"blk.{i}.attn_k_b.weight" in found:
            k = found.pop(f"blk.{i}.attn_k_b.weight").swapaxes(1, 2)
            v = found.pop(f"blk.{i}.attn_v_b.weight")
            both = np.concatenate([k, v], 1).reshape(-1, RANK)
            found[f"blk.{i}.attn_kv_b.weight"] = np.ascontiguousarray(both)
    names = {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "exp_probs_b": "mlp.gate.e_score_correction_bias!",
    }
    return renamed(found, names)


def _metadata(form: Form) -> dict[str, Any]:
    sizes: dict[str, Any] = {"attention.head_count_kv": HEADS}
    sizes |= {"attention.key_length": KEY, "attention.value_length": VALUE}
    if form.absorbed:
        sizes = {
            "attention.head_count_kv": 1,
            "attention.key_length": RANK + TURNED,
            "attention.value_length": RANK,
            "attention.key_length_mla": KEY,
            "attention.value_length_mla": VALUE,
        }
    if form.query_rank:
        sizes["attention.q_lora_rank"] = form.query_rank
    return sizes | {
        "block_count": LAYERS,
        "embedding_length": WIDTH,
        "feed_forward_length": COMMON,
        "expert_feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.kv_lora_rank": RANK,
        "attention.layer_norm_rms_epsilon": EPSILON,
        "rope.dimension_count": TURNED,
        "rope.freq_base": 10000.0,
        "expert_count": COUNT,
        "expert_used_count": USED,
        "expert_shared_count": 2,
        "leading_dense_block_count": 1,
    }


def _config(form: Form) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "intermediate_size": COMMON,
        "moe_intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": form.query_rank or None,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": PLAIN,
        "qk_rope_head_dim": TURNED,
        "v_head_dim": VALUE,
        "head_dim": TURNED,
        "n_routed_experts": COUNT,
        "num_experts_per_tok": USED,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _v2(
    name: str, form: Form, config: dict[str, Any], keys: dict[str, Any], peer: bool = True
) -> Case:
    return Case(
        name, "deepseek2", _metadata(form) | _SCALE_V2 | keys, form.shapes(), "DeepseekV2",
        _config(form) | {"routed_scaling_factor": 1.5, "norm_topk_prob": False} | config,
        _state, peer=peer,
    )  # fmt: skip


def _v3(
    name: str, absorbed: bool, groups: int, config: dict[str, Any], keys: dict[str, Any]
) -> Case:
    form = Form(absorbed, QUERY_RANK, sigmoid=True)
    routing = {
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_group_count": groups,
        "expert_group_used_count": max(1, groups // 2),
    }
    theirs = {"n_group": groups, "topk_group": max(1, groups // 2), "norm_topk_prob": True}
    return Case(
        name, "deepseek2", _metadata(form) | routing | keys, form.shapes(), "DeepseekV3",
        _config(form) | theirs | {"routed_scaling_factor": 2.5, "rope_interleave": True} | config,
        _state,
    )  # fmt: skip


_PLAIN_V2: dict[str, Any] = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
_SCALE_V2 = {"expert_weights_scale": 1.5}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
_YARN_KEYS: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 16,
}

CASES = (
    _v2("expanded", Form(False, QUERY_RANK, sigmoid=False), _PLAIN_V2, {}),
    _v2("absorbed", Form(True, QUERY_RANK, sigmoid=False), _PLAIN_V2, {}),
    _v2("plain_queries", Form(True, 0, sigmoid=False), _PLAIN_V2, {}, peer=False),
    _v2(
        "groups",
        Form(True, QUERY_RANK, sigmoid=False),
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        {"expert_group_count": 4, "expert_group_used_count": 2},
        peer=False,
    ),
    _v2(
        "yarn",
        Form(True, QUERY_RANK, sigmoid=False),
        _PLAIN_V2 | {"rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        _YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 0.0707},
    ),
    _v3("sigmoid", True, 1, {}, {}),
    _v3("sigmoid_groups", False, 2, {}, {}),
    _v3(
        "sigmoid_yarn",
        True,
        2,
        {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        _YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 0.1},
    ),
)
