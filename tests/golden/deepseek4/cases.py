"""Tiny deepseek4 models: layers of every ratio, an index that has to choose, hash-routed layers.

`transformers` and llama.cpp leave out what the models' own code does with small floats: it rounds
the rows of the cache to e4m3 and what the index compares to e2m1. So the golden logits are those
without rounding, and the tests take the `round_floats` ops out where they compare with them; what
those ops do is proven against tables of the formats in tests/worker/test_executor_rows.py.
llama.cpp knows no other ratios than 0, 4 and 128, and needs an index in some layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ds4_common.gguf import GgmlType
from golden.tiny import EPSILON, VOCABULARY, Case, Shapes, Tensors, experts, gated, renamed

HEADS, DIM, TURNED, COUNT, USED = 4, 32, 8, 8, 3
QUERY_RANK, GROUPS, OUTPUT_RANK, WINDOW, STREAMS = 32, 2, 16, 10, 4
INDEX_HEADS, INDEX_DIM, CHOSEN = 16, 64, 3  # many heads: scores of 0, which tie, are rare
MIXED = STREAMS * (2 + STREAMS)

# The types that files of this family come in, by part of a tensor's name.
REAL_TYPES = {
    "token_embd": GgmlType.F16, "output.weight": GgmlType.Q8_0, "_fn.weight": GgmlType.F16,
    "attn_q_": GgmlType.Q8_0, "attn_kv.": GgmlType.Q8_0, "attn_output_": GgmlType.Q8_0,
    "compressor_kv": GgmlType.F16, "compressor_gate": GgmlType.F16, "_ape": GgmlType.F16,
    "indexer.": GgmlType.F16, "ffn_gate_inp": GgmlType.F16, "_shexp": GgmlType.Q8_0,
    "ffn_gate_exps": GgmlType.IQ2_XXS, "ffn_up_exps": GgmlType.IQ2_XXS,
    "ffn_down_exps": GgmlType.Q2_K,
}  # fmt: skip


@dataclass(frozen=True)
class Layers:
    """What each layer compresses, how many are hash-routed, the width of streams and experts."""

    ratios: tuple[int, ...]
    hashed: int
    width: int = 32
    inner: int = 32


def _compressor(stem: str, ratio: int, dim: int, width: int) -> Shapes:
    wide = dim * (2 if ratio == 4 else 1)
    return {
        f"{stem}_compressor_kv.weight": (wide, width),
        f"{stem}_compressor_gate.weight": (wide, width),
        f"{stem}_compressor_ape.weight": (ratio, wide),
        f"{stem}_compressor_norm.weight": (dim,),
    }


def _layer(i: int, layers: Layers) -> Shapes:
    stem, ratio, width, inner = f"blk.{i}", layers.ratios[i], layers.width, layers.inner
    shapes: Shapes = {
        f"{stem}.attn_norm.weight": (width,),
        f"{stem}.ffn_norm.weight": (width,),
        f"{stem}.attn_q_a.weight": (QUERY_RANK, width),
        f"{stem}.attn_q_a_norm.weight": (QUERY_RANK,),
        f"{stem}.attn_q_b.weight": (HEADS * DIM, QUERY_RANK),
        f"{stem}.attn_kv.weight": (DIM, width),
        f"{stem}.attn_kv_a_norm.weight": (DIM,),
        f"{stem}.attn_sinks.weight": (HEADS,),
        f"{stem}.attn_output_a.weight": (GROUPS * OUTPUT_RANK, HEADS * DIM // GROUPS),
        f"{stem}.attn_output_b.weight": (width, GROUPS * OUTPUT_RANK),
    }
    for name in ("attn", "ffn"):
        shapes[f"{stem}.hc_{name}_fn.weight"] = (MIXED, STREAMS * width)
        shapes[f"{stem}.hc_{name}_scale.weight"] = (3,)
        shapes[f"{stem}.hc_{name}_base.weight"] = (MIXED,)
    if ratio:
        shapes |= _compressor(f"{stem}.attn", ratio, DIM, width)
    if ratio == 4:
        shapes |= _compressor(f"{stem}.indexer", ratio, INDEX_DIM, width)
        shapes[f"{stem}.indexer.attn_q_b.weight"] = (INDEX_HEADS * INDEX_DIM, QUERY_RANK)
        shapes[f"{stem}.indexer.proj.weight"] = (INDEX_HEADS, width)
    shapes |= experts(i, width, inner, COUNT) | gated(i, width, inner, "_shexp")
    if i >= layers.hashed:
        shapes[f"{stem}.exp_probs_b.bias"] = (COUNT,)
    return shapes


def _shapes(layers: Layers) -> Shapes:
    width = layers.width
    shapes: Shapes = {
        "token_embd.weight": (VOCABULARY, width),
        "output_norm.weight": (width,),
        "output.weight": (VOCABULARY, width),
        "output_hc_fn.weight": (STREAMS, STREAMS * width),
        "output_hc_scale.weight": (1,),
        "output_hc_base.weight": (STREAMS,),
    }
    for i in range(len(layers.ratios)):
        shapes |= _layer(i, layers)
    return shapes


def _given(layers: Layers) -> Tensors:
    """Scales that matter, and which experts a token meets."""
    rng = np.random.default_rng(4)
    given: Tensors = {"output_hc_scale.weight": np.array([1.5], np.float32)}
    for i in range(len(layers.ratios)):
        for name in ("attn", "ffn"):
            scale = rng.uniform(0.5, 2.0, 3).astype(np.float32)
            given[f"blk.{i}.hc_{name}_scale.weight"] = scale
        if i < layers.hashed:
            table = [rng.permutation(COUNT)[:USED] for _ in range(VOCABULARY)]
            given[f"blk.{i}.ffn_gate_tid2eid.weight"] = np.array(table, np.int32)
    return given


_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_norm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv": "self_attn.kv_proj",
    "attn_kv_a_norm": "self_attn.kv_norm",
    "attn_sinks": "self_attn.sinks!",
    "attn_output_a": "self_attn.o_a_proj",
    "attn_output_b": "self_attn.o_b_proj",
    "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj",
    "indexer.proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias!",
    "ffn_gate_tid2eid": "mlp.gate.tid2eid!",
} | {
    f"{ours}_compressor_{part}": f"self_attn.compressor{theirs}.{name}"
    for ours, theirs in (("attn", ""), ("indexer", ".indexer"))
    for part, name in (
        ("kv", "kv_proj"), ("gate", "gate_proj"), ("ape", "position_bias!"), ("norm", "kv_norm"),
    )
} | {
    f"{ours}_{part}": f"{theirs}{part}!"
    for ours, theirs in (
        ("hc_attn", "attn_hc."), ("hc_ffn", "ffn_hc."), ("output_hc", "model.hc_head.hc_"),
    )
    for part in ("fn", "scale", "base")
}  # fmt: skip


def _state(case: Case, found: Tensors) -> Tensors:
    del case
    return renamed(found, _NAMES)


def _metadata(layers: Layers) -> dict[str, Any]:
    return {
        "block_count": len(layers.ratios),
        "embedding_length": layers.width,
        "vocab_size": VOCABULARY,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
        "attention.q_lora_rank": QUERY_RANK,
        "attention.output_lora_rank": OUTPUT_RANK,
        "attention.output_group_count": GROUPS,
        "attention.sliding_window": WINDOW,
        "attention.compress_ratios": list(layers.ratios),
        "attention.compress_rope_freq_base": 160000.0,
        "attention.layer_norm_rms_epsilon": EPSILON,
        "attention.indexer.head_count": INDEX_HEADS,
        "attention.indexer.key_length": INDEX_DIM,
        "attention.indexer.top_k": CHOSEN,
        "rope.dimension_count": TURNED,
        "rope.freq_base": 10000.0,
        "expert_count": COUNT,
        "expert_used_count": USED,
        "expert_feed_forward_length": layers.inner,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "expert_group_count": 0,
        "expert_group_used_count": 0,
        "hash_layer_count": layers.hashed,
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "swiglu_clamp_exp": [0.5] * len(layers.ratios),
    }


_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention"}


def _config(layers: Layers, rope: dict[str, Any]) -> dict[str, Any]:
    ratios = layers.ratios
    plain = next((ratio for ratio in ratios if ratio not in _KINDS), 128)
    partial = {"partial_rotary_factor": TURNED / DIM}
    return {
        "hidden_size": layers.width,
        "moe_intermediate_size": layers.inner,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": HEADS,
        "head_dim": DIM,
        "q_lora_rank": QUERY_RANK,
        "o_groups": GROUPS,
        "o_lora_rank": OUTPUT_RANK,
        "sliding_window": WINDOW,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": CHOSEN,
        "n_routed_experts": COUNT,
        "num_experts_per_tok": USED,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 0.5,
        "layer_types": [_KINDS.get(r, "heavily_compressed_attention") for r in ratios],
        "compress_rates": {
            "compressed_sparse_attention": 4, "heavily_compressed_attention": plain,
        },
        "mlp_layer_types": ["hash_moe" if i < layers.hashed else "moe" for i in range(len(ratios))],
        "partial_rotary_factor": TURNED / DIM,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, **partial},
            "compress": {"rope_type": "default", "rope_theta": 160000.0, **partial, **rope},
        },
    }  # fmt: skip


_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
    "attention_factor": 1.0,
}
_YARN_KEYS: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 512,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}


def _case(
    name: str, layers: Layers, rope: dict[str, Any], keys: dict[str, Any], **more: Any
) -> Case:
    return Case(
        name, "deepseek4", _metadata(layers) | keys, _shapes(layers), "DeepseekV4",
        _config(layers, rope), _state, tensors=_given(layers), rounded=True, **more,
    )  # fmt: skip


CASES = (
    _case("windows", Layers((0, 0), 0), {}, {}, peer=False),
    _case("index", Layers((4, 0, 4), 1), {}, {}),
    _case("short_ratios", Layers((0, 4, 8, 4), 2), _YARN, _YARN_KEYS, peer=False),
    _case(
        "long", Layers((0, 4, 128), 1), _YARN, _YARN_KEYS,
        context=320, length=300, rows=(0, 130, 255, 299),
    ),
)  # fmt: skip

# As wide as blocks of two bits have to be; `write_gguf` gives it REAL_TYPES.
REAL = _case(
    "real", Layers((0, 4, 8), 1, width=1024, inner=256), _YARN, _YARN_KEYS, context=320, length=200
)
