"""The phi3 family: q, k and v in one tensor, gate and up in another, long-rope factors, a window.

Owns: what `general.architecture` = "phi3" means: Phi-3, Phi-3.5 and Phi-4. The long factors serve a
context longer than the original one. A sliding window shorter than the context holds in every
layer, as in the models' own code. Refuses experts and every tensor it does not know.
"""

from __future__ import annotations

from dataclasses import replace

from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import HALVES, Decoder, Gated, Layer, write_decoder
from ds4_owner.recipes.extents import read_extents, read_long_rope
from ds4_owner.recipes.parameters import Parameters


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a phi3 file. Raises UnsupportedModel."""
    extents = read_extents(parameters, tensors, layer_tensors=6)
    rope = read_long_rope(parameters, context_tokens, extents.rope_dim, HALVES)
    window = parameters.count("attention.sliding_window", 0, low=0)
    if window >= context_tokens:
        window = 0
    layers = [
        Layer(
            replace(extents.attention(i, rope), fused=True, window=window),
            Gated(width, fused=True),
        )
        for i, width in enumerate(parameters.counts("feed_forward_length", extents.layers))
    ]
    write_decoder(program, vocabulary, Decoder(extents.width, extents.epsilon, layers))
