"""The deepseek2 family: latent attention, dense layers first, then routed and shared experts.

Owns: what `general.architecture` = "deepseek2" means: DeepSeek V2, V2-Lite, V2.5, V3, R1 and Kimi
K2, in both forms that files have: attn_k_b and attn_v_b (the cache holds the latent), or one
attn_kv_b (the cache holds expanded keys and values). Layers that only predict further tokens are
known and left out.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ds4_common.contract.ops import RouteScore
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import ADJACENT, Decoder, Experts, Gated, Layer, Part, write_decoder
from ds4_owner.recipes.extents import read_ahead, read_experts, read_extents, read_rope
from ds4_owner.recipes.latent import Latent
from ds4_owner.recipes.parameters import Parameters


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a deepseek2 file. Raises UnsupportedModel."""
    counted = parameters.count("block_count", high=max(1, tensors))
    ahead = read_ahead(parameters, program, counted)
    extents = read_extents(parameters, tensors, layer_tensors=9, layers=counted - ahead)
    attention = _attention(parameters, context_tokens, extents.rope_dim)
    dense = parameters.count("leading_dense_block_count", 0, low=0)
    layers = []
    for i in range(extents.layers):
        part: Part = Gated(parameters.counts("feed_forward_length", counted)[i])
        if i >= dense:
            biased = program.has(f"blk.{i}.exp_probs_b.bias")
            part = _experts(parameters, RouteScore.SIGMOID if biased else RouteScore.SOFTMAX)
        if attention.absorbed:
            program.leave_out(f"blk.{i}.attn_kv_b.")  # the same numbers once more
        layers.append(Layer(replace(attention, heads=extents.heads[i]), part))
    for i in range(extents.layers, counted):
        program.leave_out(f"blk.{i}.")
    write_decoder(program, vocabulary, Decoder(extents.width, extents.epsilon, layers))


def _attention(parameters: Parameters, context_tokens: int, rope_dim: int) -> Latent:
    """YaRN's magnitude goes into the scale of the scores where the file has its multiplier."""
    absorbed = parameters.has("attention.key_length_mla")
    ending = "_mla" if absorbed else ""
    key_dim = parameters.count(f"attention.key_length{ending}", low=rope_dim + 1)
    rope = read_rope(parameters, context_tokens, rope_dim, ADJACENT)
    scale = 1.0 / math.sqrt(key_dim)
    multiplier = parameters.number("rope.scaling.yarn_log_multiplier", 0.0, high=10.0)
    if multiplier and "ext_factor" in rope.attributes:
        logarithm = -math.log(rope.attributes["freq_scale"])
        scale *= (1.0 + multiplier * logarithm) ** 2
        own = rope.attributes["attn_factor"] / (1.0 + 0.1 * logarithm)
        rope = replace(rope, attributes={**rope.attributes, "attn_factor": own})
    return Latent(
        heads=1,
        query_rank=parameters.count("attention.q_lora_rank", 0, low=0),
        rank=parameters.count("attention.kv_lora_rank"),
        plain_dim=key_dim - rope_dim,
        value_dim=parameters.count(f"attention.value_length{ending}"),
        scale=scale,
        rope=rope,
        absorbed=absorbed,
    )


def _experts(parameters: Parameters, score: RouteScore) -> Experts:
    """`score` is what a file means that does not say: with a bias of the choice, a sigmoid. A group
    counts as its two best experts under sigmoid scores, as its best under softmax."""
    experts = read_experts(parameters, score=score, normalize=False)
    if experts.score == RouteScore.SIGMOID and experts.groups > 1:
        experts = replace(experts, group_top=2)
    common = parameters.count("expert_shared_count", 0, low=0, high=64) * experts.width
    return replace(experts, shared=Gated(common, suffix="_shexp") if common else None)
