"""Tiny llama models as data: the cases, their weights, and the GGUF file of each.

Owns: how a case's weights follow from its seed, and the Hugging Face to GGUF renaming, including
the permutation of q and k that turns rotated halves into adjacent pairs. `make.py` runs the same
weights through `transformers`; the tests run the GGUF file through our recipe and the reference
executor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Weights = dict[str, npt.NDArray[np.float32]]

VOCABULARY = 64
N_TOKENS = 48
ROWS = (0, 1, 23, 47)  # positions whose logits are kept
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """`rope`: Hugging Face's `rope_parameters`."""

    name: str
    width: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    feed_forward: int = 48
    context: int = 64
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )


def _rope(kind: str, theta: float = 10000.0, **rest: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **rest}


CASES = (
    Case("grouped"),
    Case("tied", tied=True),
    Case("biases", attention_bias=True, mlp_bias=True),
    Case("one_kv_head", kv_heads=1),
    Case("full_heads", kv_heads=4),
    Case("wide_heads", head_dim=24),
    Case("odd_sizes", width=30, heads=3, kv_heads=3, head_dim=10, feed_forward=34),
    Case("large_base", rope=_rope("default", 500000.0)),
    Case("linear", rope=_rope("linear", factor=4.0)),
    Case("yarn", rope=_rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    Case(
        "yarn_tuned",
        head_dim=16,
        rope=_rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=8,
            beta_fast=4.0,
            beta_slow=0.5,
            attention_factor=1.25,
        ),
    ),
    Case(
        "rope_freqs",
        head_dim=16,
        rope=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
)


def tokens(case: Case) -> list[int]:
    rng = np.random.default_rng([len(case.name), 1])
    return [int(t) for t in rng.integers(0, VOCABULARY, N_TOKENS)]


def weights(case: Case) -> Weights:
    """Under their Hugging Face names, uniform in +-sqrt(3 / inputs)."""
    rng = np.random.default_rng(CASES.index(case))

    def matrix(rows: int, cols: int) -> npt.NDArray[np.float32]:
        return ((rng.random((rows, cols)) * 2 - 1) * math.sqrt(3 / cols)).astype(np.float32)

    def vector(n: int, middle: float) -> npt.NDArray[np.float32]:
        return (middle + (rng.random(n) - 0.5) * 0.4).astype(np.float32)

    q, kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    found = {"model.embed_tokens.weight": matrix(VOCABULARY, case.width) * np.float32(4)}
    for i in range(case.layers):
        for name, rows, cols, bias in (
            ("self_attn.q_proj", q, case.width, case.attention_bias),
            ("self_attn.k_proj", kv, case.width, case.attention_bias),
            ("self_attn.v_proj", kv, case.width, case.attention_bias),
            ("self_attn.o_proj", case.width, q, case.attention_bias),
            ("mlp.gate_proj", case.feed_forward, case.width, case.mlp_bias),
            ("mlp.up_proj", case.feed_forward, case.width, case.mlp_bias),
            ("mlp.down_proj", case.width, case.feed_forward, case.mlp_bias),
        ):
            found[f"model.layers.{i}.{name}.weight"] = matrix(rows, cols)
            if bias:
                found[f"model.layers.{i}.{name}.bias"] = vector(rows, 0.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{name}.weight"] = vector(case.width, 1.0)
    found["model.norm.weight"] = vector(case.width, 1.0)
    if not case.tied:
        found["lm_head.weight"] = matrix(VOCABULARY, case.width)
    return found


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(case: Case, path: Path) -> Path:
    """The case as a GGUF file of float32 tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(case.layers)
    writer.add_context_length(case.context)
    writer.add_embedding_length(case.width)
    writer.add_feed_forward_length(case.feed_forward)
    writer.add_head_count(case.heads)
    writer.add_head_count_kv(case.kv_heads)
    writer.add_key_length(case.head_dim)
    writer.add_value_length(case.head_dim)
    writer.add_rope_dimension_count(case.head_dim)
    writer.add_layer_norm_rms_eps(EPSILON)
    _add_rope(writer, case)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(VOCABULARY - 1)
    for name, value in weights(case).items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith("q_proj"):
            value = _pairs(value, case.heads)
        elif stem.endswith("k_proj"):
            value = _pairs(value, case.kv_heads)
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            stem = f"blk.{layer}.{_NAMES[rest]}"
        else:
            stem = _NAMES[stem]
        writer.add_tensor(f"{stem}.{kind}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pairs(value: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorders each head's rows from (first halves, second halves) to adjacent pairs."""
    halves = value.reshape(heads, 2, -1, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)


def _add_rope(writer: gguf.GGUFWriter, case: Case) -> None:
    rope = case.rope
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(case))
    elif kind != "default":
        factor = rope["factor"]
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if "attention_factor" in rope:  # GGUF keeps it relative to YaRN's own magnitude
                own = 1 + 0.1 * math.log(factor)
                writer.add_rope_scaling_attn_factors(rope["attention_factor"] / own)
            for beta in ("beta_fast", "beta_slow"):
                if beta in rope:
                    writer.add_float32(f"llama.rope.scaling.yarn_{beta}", rope[beta])


def _llama3_factors(case: Case) -> npt.NDArray[np.float32]:
    """Divisors of each pair's frequency, as converters to GGUF compute them."""
    rope = case.rope
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(case.head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / case.head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
