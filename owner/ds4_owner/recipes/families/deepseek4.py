"""The deepseek4 family: streams that exchange, attention over compressed rows, hash-routed layers.

Owns: what `general.architecture` = "deepseek4" means: DeepSeek V4 Flash. Layers differ by their
entry of compress_ratios: 0 sees a window only; 4 compresses overlapping windows and has an index;
any other number compresses windows of that many tokens, all of which are seen. Layers that only
predict further tokens are known and left out.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ds4_common.contract.ops import GatedUnit, RouteScore
from ds4_owner.recipes.builder import PAGE_TOKENS, TextProgram
from ds4_owner.recipes.compressed import Compressed, Index
from ds4_owner.recipes.decoder import ADJACENT, Experts, Gated, Layer, Rope
from ds4_owner.recipes.extents import read_experts
from ds4_owner.recipes.parameters import Parameters, refuse
from ds4_owner.recipes.streams import Streams, write_streams

# These models are published with a program that writes prompts, and files of them lack a template.
CHAT_TEMPLATE = "dsml.jinja"
CHAT_MARKS = (
    "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "\uff5cDSML\uff5c", "<think>", "</think>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip

_INDEXED = 4  # the ratio whose windows overlap and have an index
_MOST_RATIO = 1024  # tokens of the longest page
_LAYER_TENSORS = 22  # that a layer has at least


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a deepseek4 file. Raises UnsupportedModel."""
    counted = parameters.count("block_count", high=max(1, tensors // _LAYER_TENSORS))
    ahead = parameters.count("nextn_predict_layers", 0, low=0, high=counted - 1)
    if not program.has(f"blk.{counted - ahead}.nextn.eh_proj.weight"):
        ahead = 0  # a file of the main layers only
    count = counted - ahead
    ratios = parameters.ratios("attention.compress_ratios", count, high=_MOST_RATIO)
    program.page(_page_tokens(parameters, ratios))
    hashed = parameters.count("hash_layer_count", 0, low=0)
    limits = [
        parameters.numbers("swiglu_clamp_exp", count, 1e6),
        _shared_limits(parameters, count),
    ]
    layers = [
        Layer(
            _attention(parameters, context_tokens, ratio),
            _experts(parameters, limits[0][i], limits[1][i], vocabulary if i < hashed else 0),
        )
        for i, ratio in enumerate(ratios)
    ]
    for i in range(counted):
        program.leave_out(f"blk.{i}." if i >= count else f"blk.{i}.exp_probs_b_vl.")  # of images
    decoder = Streams(
        width=parameters.count("embedding_length"),
        count=parameters.count("hyper_connection.count", high=16),
        epsilon=parameters.number("attention.layer_norm_rms_epsilon", high=1.0),
        mixing=parameters.number("hyper_connection.epsilon", high=1.0),
        iterations=parameters.count("hyper_connection.sinkhorn_iterations", high=1000),
        layers=layers,
    )
    write_streams(program, vocabulary, decoder)


def _page_tokens(parameters: Parameters, ratios: list[int]) -> int:
    """Whole windows of every ratio, and eight rows of an index at least."""
    tokens = math.lcm(PAGE_TOKENS, *(ratio for ratio in ratios if ratio))
    if tokens > _MOST_RATIO:
        key = parameters.key("attention.compress_ratios")
        raise refuse(key, sorted(set(ratios)), f"ratios that divide a page of {_MOST_RATIO} tokens")
    return tokens


def _attention(parameters: Parameters, context_tokens: int, ratio: int) -> Compressed:
    heads = parameters.count("attention.head_count")
    dim = parameters.count("attention.key_length", high=4096)
    groups = parameters.count("attention.output_group_count")
    for name, got, wanted in (
        ("attention.head_count_kv", parameters.count("attention.head_count_kv", 1), 1),
        ("attention.value_length", parameters.count("attention.value_length", dim), dim),
        ("attention.output_group_count", math.gcd(groups, heads), groups),
    ):
        if got != wanted:
            raise refuse(parameters.key(name), got, f"{wanted}, for {heads} heads of {dim}")
    rope_dim = parameters.count("rope.dimension_count", low=2, high=dim)
    if rope_dim % 2 or rope_dim == dim:
        raise refuse(parameters.key("rope.dimension_count"), rope_dim, f"even, less than {dim}")
    index = None
    if ratio == _INDEXED:
        index = Index(
            heads=parameters.count("attention.indexer.head_count", high=4096),
            dim=parameters.count("attention.indexer.key_length", low=rope_dim, high=4096),
            chosen=parameters.count("attention.indexer.top_k", high=4096),
        )
        if index.dim & (index.dim - 1):
            key = parameters.key("attention.indexer.key_length")
            raise refuse(key, index.dim, "a power of two")
    return Compressed(
        heads=heads,
        dim=dim,
        query_rank=parameters.count("attention.q_lora_rank"),
        output_groups=groups,
        output_rank=parameters.count("attention.output_lora_rank"),
        window=parameters.count("attention.sliding_window"),
        rope=_rope(parameters, context_tokens, rope_dim, compressed=ratio > 0),
        ratio=ratio,
        index=index,
    )


def _rope(parameters: Parameters, context_tokens: int, dim: int, *, compressed: bool) -> Rope:
    """Layers with a window only rotate as they are trained first; the others by a base of their
    own, stretched by YaRN, without its magnitude."""
    if not compressed:
        return Rope(dim, ADJACENT, {"base": parameters.number("rope.freq_base", low=1.0001)})
    base = parameters.number("attention.compress_rope_freq_base", low=1.0001)
    kind = parameters.text("rope.scaling.type", "yarn")
    if kind not in ("none", "yarn"):
        raise refuse(parameters.key("rope.scaling.type"), kind, "none or yarn")
    factor = parameters.number("rope.scaling.factor", 1.0, low=1.0, high=1e6)
    attributes: dict[str, float] = {"base": base}
    if kind == "yarn" and factor > 1.0:
        attributes |= {
            "freq_scale": 1.0 / factor,
            "ext_factor": 1.0,
            "attn_factor": 1.0 / (1.0 + 0.1 * math.log(factor)),
            "original_context": parameters.count(
                "rope.scaling.original_context_length", context_tokens
            ),
            "beta_fast": parameters.number("rope.scaling.yarn_beta_fast", 32.0, low=1e-3),
            "beta_slow": parameters.number("rope.scaling.yarn_beta_slow", 1.0, low=1e-3),
        }
    return Rope(dim, ADJACENT, attributes)


def _shared_limits(parameters: Parameters, count: int) -> list[float]:
    has_own = parameters.has("swiglu_clamp_shexp")
    return parameters.numbers(f"swiglu_clamp_{'shexp' if has_own else 'exp'}", count, 1e6)


def _experts(parameters: Parameters, limit: float, shared_limit: float, listed: int) -> Experts:
    """`listed`: tokens of the table that names their experts, 0 where the router chooses."""
    experts = read_experts(parameters, score=RouteScore.SQRT_SOFTPLUS, normalize=True)
    common = parameters.count("expert_shared_count", 0, low=0, high=64) * experts.width
    shared = Gated(common, suffix="_shexp", limit=shared_limit) if common else None
    unit = {"act": GatedUnit.SILU, "limit": limit}
    return replace(experts, unit=unit, shared=shared, listed=listed)
