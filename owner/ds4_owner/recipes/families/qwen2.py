"""The qwen2 family: llama's graph with rotated halves and biases on q, k and v.

Owns: what `general.architecture` = "qwen2" means: Qwen2 and Qwen2.5, and models distilled into
them. Refuses every tensor it does not know.
"""

from __future__ import annotations

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
    """Writes the program of a qwen2 file. Raises UnsupportedModel."""
    extents = read_extents(parameters, tensors, layer_tensors=9)
    rope = read_rope(parameters, context_tokens, extents.rope_dim, HALVES)
    layers = [
        Layer(extents.attention(i, rope), Gated(width))
        for i, width in enumerate(parameters.counts("feed_forward_length", extents.layers))
    ]
    write_decoder(program, vocabulary, Decoder(extents.width, extents.epsilon, layers))
