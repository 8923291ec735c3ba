"""Tiny qwen3moe models: normed heads, and experts whose weights sum to 1. One has scales of its
matrices' results, as conversions to NVFP4 do, and scales of their inputs, which nobody applies.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from golden.tiny import EPSILON, Case, Tensors, attention, experts, llama_state, trunk

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER, COUNT, USED = 32, 2, 4, 2, 16, 16, 8, 3

SHAPES = trunk(WIDTH, LAYERS)
for layer in range(LAYERS):
    SHAPES |= attention(layer, WIDTH, HEADS, KV_HEADS, DIM, norms=True)
    SHAPES |= experts(layer, WIDTH, INNER, COUNT)

PLAIN = Case(
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
)


def _scales() -> Tensors:
    """One for each matrix of the layers, or for each of its experts."""
    rng, found = np.random.default_rng(11), {}
    for name, shape in SHAPES.items():
        if len(shape) < 2 or "_inp" in name or not name.startswith("blk."):
            continue
        stem, count = name.removesuffix(".weight"), shape[0] if len(shape) == 3 else 1
        for ending in ("scale", "input_scale"):
            found[f"{stem}.{ending}"] = rng.uniform(0.4, 1.8, count).astype(np.float32)
    return found


def _scaled_state(case: Case, found: Tensors) -> Tensors:
    whole = {name: value for name, value in found.items() if not name.endswith("scale")}
    for name, scale in found.items():
        if name.endswith(".scale"):
            stem = name.removesuffix(".scale")
            shape = (-1,) + (1,) * (whole[f"{stem}.weight"].ndim - 1)
            whole[f"{stem}.weight"] = whole[f"{stem}.weight"].astype(float) * scale.reshape(shape)
    return llama_state(case, whole)


CASES = (PLAIN, replace(PLAIN, name="scaled", state=_scaled_state, tensors=_scales()))
