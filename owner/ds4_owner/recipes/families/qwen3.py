"""The qwen3 family: rotated halves, and q and k normed per head before they are rotated.

Owns: what `general.architecture` = "qwen3" means. Refuses every tensor it does not know, such as
the classification heads of rerankers.
"""

from __future__ import annotations

from dataclasses import replace

from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import HALVES, Decoder, Gated, Layer, write_decoder
from ds4_owner.recipes.extents import read_extents, read_rope
from ds4_owner.recipes.parameters import Parameters


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a qwen3 file. Raises UnsupportedModel."""
    extents = read_extents(parameters, tensors, layer_tensors=11)
    rope = read_rope(parameters, context_tokens, extents.rope_dim, HALVES)
    layers = [
        Layer(replace(extents.attention(i, rope), head_norms=True), Gated(width))
        for i, width in enumerate(parameters.counts("feed_forward_length", extents.layers))
    ]
    write_decoder(program, vocabulary, Decoder(extents.width, extents.epsilon, layers))
