"""The glm4moe family: partly rotated heads, dense layers first, then sigmoid-routed experts.

Owns: what `general.architecture` = "glm4moe" means: GLM-4.5 and 4.6. Norms of heads are used where
the file has them. Layers that only predict further tokens are known and left out.
"""

from __future__ import annotations

from dataclasses import replace

from ds4_common.contract.ops import RouteScore
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import HALVES, Decoder, Gated, Layer, Part, write_decoder
from ds4_owner.recipes.extents import read_ahead, read_experts, read_extents, read_rope
from ds4_owner.recipes.parameters import Parameters


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a glm4moe file. Raises UnsupportedModel."""
    counted = parameters.count("block_count", high=max(1, tensors))
    ahead = read_ahead(parameters, program, counted)
    extents = read_extents(parameters, tensors, layer_tensors=12, layers=counted - ahead)
    rope = read_rope(parameters, context_tokens, extents.rope_dim, HALVES)
    normed = any(
        program.has(f"blk.{i}.attn_{part}_norm.weight")
        for i in range(extents.layers)
        for part in "qk"
    )
    dense = parameters.count("leading_dense_block_count", 0, low=0)
    experts = replace(
        read_experts(parameters, score=RouteScore.SIGMOID, normalize=False), group_top=2
    )
    if experts.groups == 1:
        experts = replace(experts, group_top=1)
    common = parameters.count("expert_shared_count", 0, low=0, high=64) * experts.width
    if common:
        experts = replace(experts, shared=Gated(common, suffix="_shexp"))
    layers = []
    for i in range(extents.layers):
        part: Part = experts
        if i < dense:
            part = Gated(parameters.count("feed_forward_length"))
        layers.append(Layer(replace(extents.attention(i, rope), head_norms=normed), part))
    for i in range(extents.layers, counted):
        program.leave_out(f"blk.{i}.")
    decoder = Decoder(extents.width, extents.epsilon, layers, ffn_norm="post_attention_norm")
    write_decoder(program, vocabulary, decoder)
