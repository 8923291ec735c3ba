"""Reads what most families say in the same keys: extents of layers and heads, rotation, experts.

Owns: key names and defaults, which follow llama.cpp, the program that writes and reads these files.
Refuses values that contradict each other, as UnsupportedModel naming the key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds4_common.contract.ops import RouteScore
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import Attention, Experts, Gated, Rope
from ds4_owner.recipes.parameters import Parameters, refuse

# expert_gating_func -> score
_SCORES = {
    1: RouteScore.SOFTMAX,
    2: RouteScore.SIGMOID,
    3: RouteScore.LOGITS,
    4: RouteScore.SQRT_SOFTPLUS,
}


@dataclass(frozen=True, slots=True)
class Extents:
    """Sizes of a transformer; heads and kv_heads per layer."""

    width: int
    heads: Sequence[int]
    kv_heads: Sequence[int]
    key_dim: int
    value_dim: int
    rope_dim: int
    epsilon: float
    scale: float  # of the attention scores

    @property
    def layers(self) -> int:
        return len(self.heads)

    def attention(self, layer: int, rope: Rope) -> Attention:
        """The plain attention of a layer, for a family to refine."""
        heads, kv_heads = self.heads[layer], self.kv_heads[layer]
        return Attention(heads, kv_heads, self.key_dim, self.value_dim, self.scale, rope)


def read_extents(
    parameters: Parameters, tensors: int, *, layer_tensors: int, layers: int | None = None
) -> Extents:
    """`layer_tensors` bounds the layer count: a layer has that many tensors, or half of them where
    a file keeps several in one. `layers` is how many count where the file's own number includes
    others."""
    width = parameters.count("embedding_length")
    in_file = parameters.count("block_count", high=max(1, 2 * tensors // layer_tensors))
    count = in_file if layers is None else min(layers, in_file)
    heads = parameters.counts("attention.head_count", in_file)[:count]
    kv_heads = heads
    if parameters.has("attention.head_count_kv"):
        kv_heads = parameters.counts("attention.head_count_kv", in_file)[:count]
    for i, (q, kv) in enumerate(zip(heads, kv_heads, strict=True)):
        if q % kv:
            raise refuse(
                parameters.key("attention.head_count_kv"), kv, f"a divisor of layer {i}'s {q} heads"
            )
    if not parameters.has("attention.key_length") and width % heads[0]:
        raise refuse(
            parameters.key("attention.head_count"), heads[0], f"a divisor of the width {width}"
        )
    key_dim = parameters.count("attention.key_length", max(1, width // heads[0]))
    value_dim = parameters.count("attention.value_length", max(1, width // heads[0]))
    key = "rope.dimension_count"
    rope_dim = parameters.count(key, key_dim, low=2, high=max(2, key_dim))
    if rope_dim % 2 or rope_dim > key_dim:  # all of a head's where the file does not say
        key = key if parameters.has(key) else "attention.key_length"
        raise refuse(parameters.key(key), rope_dim, f"an even number up to {max(2, key_dim)}")
    scale = parameters.number_or_none("attention.scale", 0.0, low=1e-6)
    return Extents(
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        rope_dim=rope_dim,
        epsilon=parameters.number("attention.layer_norm_rms_epsilon", high=1.0),
        scale=scale or 1.0 / math.sqrt(key_dim),
    )


def read_ahead(parameters: Parameters, program: TextProgram, counted: int) -> int:
    """How many of `counted` layers only predict further tokens. A file may hold none of their
    tensors; where it holds a layer, that must be such a one."""
    name = "nextn_predict_layers"
    ahead = parameters.count(name, 0, low=0, high=counted - 1)
    for i in range(counted - ahead, counted):
        stem = f"blk.{i}"
        if program.has(f"{stem}.attn_norm.weight") and not program.has(
            f"{stem}.nextn.eh_proj.weight"
        ):
            expected = f"the layers that only predict, with {stem}.nextn.eh_proj.weight"
            raise refuse(parameters.key(name), ahead, expected)
    return ahead


def read_rope(
    parameters: Parameters,
    context_tokens: int,
    dim: int,
    style: int,
    *,
    base_key: str = "rope.freq_base",
    base: float = 10000.0,
    factors: str = "rope_freqs.weight",
    kinds: Sequence[str] = ("none", "linear", "yarn"),
) -> Rope:
    """Rotation of `dim` dims. A scaling type that is absent with a factor present means linear; a
    type of `kinds` beyond the three means none here, and that the family does the rest."""
    attributes = {"base": parameters.number(base_key, base, low=1.0001)}
    attributes["attn_factor"] = parameters.number(
        "rope.scaling.attn_factor", 1.0, low=1e-6, high=1e6
    )
    kind = parameters.text("rope.scaling.type", "linear")
    if kind not in kinds:
        raise refuse(parameters.key("rope.scaling.type"), kind, f"one of {', '.join(kinds)}")
    legacy = parameters.number_or_none("rope.scale_linear", 0.0, low=1e-6)
    factor = parameters.number_or_none("rope.scaling.factor", legacy, low=1e-6) or 1.0
    if kind in ("linear", "yarn"):
        attributes["freq_scale"] = 1.0 / factor
    if kind == "yarn":
        if factor < 1.0:
            raise refuse(parameters.key("rope.scaling.factor"), factor, "at least 1 with YaRN")
        attributes |= _yarn(parameters, context_tokens)
    return Rope(dim, style, attributes, factors)


def read_long_rope(parameters: Parameters, context_tokens: int, dim: int, style: int) -> Rope:
    """Rotation whose frequencies have divisors: others where the context is longer than the
    original one."""
    kinds = ("none", "linear", "longrope")
    rope = read_rope(parameters, context_tokens, dim, style, kinds=kinds)
    original = parameters.count("rope.scaling.original_context_length", context_tokens)
    return replace(
        rope,
        attributes={**rope.attributes, "original_context": original},
        factors="rope_factors_short.weight",
        long_factors="rope_factors_long.weight",
    )


def read_window_rope(parameters: Parameters, rope: Rope) -> Rope:
    """`rope` for layers that slide: the file may have another base for them."""
    base = parameters.number("rope.freq_base_swa", rope.attributes["base"], low=1.0001)
    return replace(rope, attributes={**rope.attributes, "base": base})


def _yarn(parameters: Parameters, context_tokens: int) -> dict[str, float]:
    return {
        "original_context": parameters.count(
            "rope.scaling.original_context_length", context_tokens
        ),
        "ext_factor": parameters.number("rope.scaling.yarn_ext_factor", 1.0, low=1e-6, high=1.0),
        "beta_fast": parameters.number("rope.scaling.yarn_beta_fast", 32.0, low=1e-3),
        "beta_slow": parameters.number("rope.scaling.yarn_beta_slow", 1.0, low=1e-3),
    }


def read_windows(parameters: Parameters, layers: int, window: int, pattern: int) -> list[int]:
    """The sliding window of each layer, 0 where there is none. Of `pattern` layers all but the last
    slide, unless the file says for each layer (true: it slides) or gives another number."""
    key = "attention.sliding_window_pattern"
    flags = parameters.flags(key, layers)
    if flags is None:
        every = parameters.count(key, pattern)
        flags = [i % every < every - 1 for i in range(layers)]
    return [window if slides else 0 for slides in flags]


def read_experts(
    parameters: Parameters,
    *,
    score: RouteScore = RouteScore.SOFTMAX,
    normalize: bool,
    width: int | None = None,
    shared: Gated | None = None,
) -> Experts:
    """The routed experts. `score` and `normalize` are what the family means where its file is
    silent; `width` is that of an expert where the file has no key for it."""
    count = parameters.count("expert_count", high=4096)
    used = parameters.count("expert_used_count", high=min(count, 256))
    kind = parameters.count("expert_gating_func", 0, low=0, high=max(_SCORES))
    groups = parameters.count("expert_group_count", 1, low=0) or 1
    if count % groups:
        raise refuse(parameters.key("expert_group_count"), groups, f"a divisor of {count} experts")
    groups_used = parameters.count("expert_group_used_count", groups, low=0, high=groups) or groups
    if used > count // groups * groups_used:
        most = count // groups * groups_used
        raise refuse(parameters.key("expert_used_count"), used, f"at most {most}, of its groups")
    return Experts(
        count=count,
        used=used,
        width=parameters.count("expert_feed_forward_length", width),
        score=_SCORES[kind] if kind else score,
        normalize=parameters.flag("expert_weights_norm", normalize),
        scale=parameters.number_or_none("expert_weights_scale", 0.0, low=1e-6) or 1.0,
        groups=groups,
        groups_used=groups_used,
        shared=shared,
    )
