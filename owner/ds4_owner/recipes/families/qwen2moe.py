"""The qwen2moe family: qwen2's attention, routed experts, and a shared one behind a gate.

Owns: what `general.architecture` = "qwen2moe" means. The weights of a token's experts are not
normalized to a sum of 1 unless the file says so.
"""

from __future__ import annotations

from dataclasses import replace

from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import HALVES, Decoder, Gated, Layer, write_decoder
from ds4_owner.recipes.extents import read_experts, read_extents, read_rope
from ds4_owner.recipes.parameters import Parameters


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a qwen2moe file. Raises UnsupportedModel."""
    extents = read_extents(parameters, tensors, layer_tensors=13)
    rope = read_rope(parameters, context_tokens, extents.rope_dim, HALVES)
    layers = []
    for i, width in enumerate(parameters.counts("feed_forward_length", extents.layers)):
        own = max(1, width // parameters.count("expert_used_count"))
        common = parameters.count("expert_shared_feed_forward_length", width)
        experts = read_experts(parameters, normalize=False, width=own)
        shared = Gated(common, suffix="_shexp")
        layers.append(
            Layer(extents.attention(i, rope), replace(experts, shared=shared, shared_gate=True))
        )
    write_decoder(program, vocabulary, Decoder(extents.width, extents.epsilon, layers))
