"""Tiny gpt-oss models: sinks, windows, biases everywhere, experts with a shifted gated unit.

llama.cpp rounds YaRN's corners, which the models' own code does not: that case has no peer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from golden.tiny import EPSILON, VOCABULARY, Case, Shapes, Tensors, attention, experts, renamed

WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER, COUNT, USED, WINDOW = 32, 3, 4, 2, 16, 24, 6, 3, 9


def _shapes() -> Shapes:
    shapes: Shapes = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (VOCABULARY, WIDTH),
    }
    for i in range(LAYERS):
        shapes |= attention(i, WIDTH, HEADS, KV_HEADS, DIM, biases="qkvo")
        shapes |= experts(i, WIDTH, INNER, COUNT)
        shapes |= {
            f"blk.{i}.attn_norm.weight": (WIDTH,),
            f"blk.{i}.post_attention_norm.weight": (WIDTH,),
            f"blk.{i}.attn_sinks.weight": (HEADS,),
            f"blk.{i}.ffn_gate_inp.bias": (COUNT,),
            f"blk.{i}.ffn_gate_exps.bias": (COUNT, INNER),
            f"blk.{i}.ffn_up_exps.bias": (COUNT, INNER),
            f"blk.{i}.ffn_down_exps.bias": (COUNT, WIDTH),
        }
    return shapes


def _state(case: Case, found: Tensors) -> Tensors:
    """There gate and up alternate, matrices are (in, out), and biases are parameters by name."""
    del case
    state: Tensors = {}
    for i in range(LAYERS):
        stem, prefix = f"blk.{i}.ffn", f"model.layers.{i}.mlp.experts"
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up = (found.pop(f"{stem}_{part}_exps.{kind}") for part in ("gate", "up"))
            both = np.stack([gate, up], 2).reshape(COUNT, 2 * INNER, *gate.shape[2:])
            down = found.pop(f"{stem}_down_exps.{kind}")
            for name, value in (("gate_up_proj", both), ("down_proj", down)):
                if kind == "weight":
                    value = np.ascontiguousarray(value.swapaxes(1, 2))
                state[f"{prefix}.{name}{suffix}"] = value
    names = {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks!",
        "ffn_gate_inp": "mlp.router",
    }
    return state | renamed(found, names)


def _case(name: str, rope: dict[str, Any], metadata: dict[str, Any], *, peer: bool) -> Case:
    return Case(
        name,
        "gpt-oss",
        {
            "block_count": LAYERS,
            "embedding_length": WIDTH,
            "feed_forward_length": INNER,
            "expert_feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": DIM,
            "attention.value_length": DIM,
            "attention.sliding_window": WINDOW,
            "attention.layer_norm_rms_epsilon": EPSILON,
            "expert_count": COUNT,
            "expert_used_count": USED,
            **metadata,
        },
        _shapes(),
        "GptOss",
        {
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "sliding_window": WINDOW,
            "num_local_experts": COUNT,
            "num_experts_per_tok": USED,
            "rope_parameters": rope,
        },
        _state,
        peer=peer,
    )


CASES = (
    _case(
        "plain",
        {"rope_type": "default", "rope_theta": 150000.0},
        {"rope.freq_base": 150000.0},
        peer=True,
    ),
    _case(
        "yarn",
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 256,
        },
        {
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 256,
        },
        peer=False,
    ),
)
