"""The qwen3moe family: qwen3's attention with normed heads, and routed experts.

Owns: what `general.architecture` = "qwen3moe" means. The weights of a token's experts sum to 1.
"""

from __future__ import annotations

from dataclasses import replace

from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import HALVES, Decoder, Layer, write_decoder
from ds4_owner.recipes.extents import read_experts, read_extents, read_rope
from ds4_owner.recipes.parameters import Parameters


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a qwen3moe file. Raises UnsupportedModel."""
    extents = read_extents(parameters, tensors, layer_tensors=12)
    rope = read_rope(parameters, context_tokens, extents.rope_dim, HALVES)
    used = parameters.count("expert_used_count")
    layers = [
        Layer(
            replace(extents.attention(i, rope), head_norms=True),
            read_experts(parameters, normalize=True, width=max(1, width // used)),
        )
        for i, width in enumerate(parameters.counts("feed_forward_length", extents.layers))
    ]
    write_decoder(program, vocabulary, Decoder(extents.width, extents.epsilon, layers))
