"""Tiny gemma2 models: four norms a layer, GELU, capped scores and logits, sliding layers."""

from __future__ import annotations

import numpy as np

from golden.tiny import EPSILON, Case, Shapes, Tensors, attention, gated, renamed, trunk

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER, WINDOW = 32, 3, 4, 2, 12, 48, 9


def gemma_shapes(head_norms: bool, layers: int) -> Shapes:
    shapes = trunk(WIDTH, layers, tied=True)
    for i in range(layers):
        shapes |= attention(i, WIDTH, HEADS, KV_HEADS, DIM, norms=head_norms)
        shapes |= gated(i, WIDTH, INNER)
        shapes |= {f"blk.{i}.post_{part}_norm.weight": (WIDTH,) for part in ("attention", "ffw")}
    return shapes


def gemma_state(case: Case, found: Tensors) -> Tensors:
    """Norm weights lose the 1 that a GGUF file has added."""
    del case
    plain = {k: v - np.float32(1) if "norm" in k else v for k, v in found.items()}
    return renamed(
        plain,
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    )


def _case(name: str, score_cap: float, logit_cap: float) -> Case:
    return Case(
        name,
        "gemma2",
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
            "attn_logit_softcapping": score_cap,
            "final_logit_softcapping": logit_cap,
        },
        gemma_shapes(False, LAYERS),
        "Gemma2",
        {
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "query_pre_attn_scalar": DIM,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": score_cap,
            "final_logit_softcapping": logit_cap,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        gemma_state,
    )


CASES = (_case("plain", 50.0, 30.0), _case("low_caps", 2.0, 1.5))
