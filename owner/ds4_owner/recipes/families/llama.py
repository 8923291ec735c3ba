"""The llama family: RMS norm, rotary attention with grouped heads, gated SiLU feed-forward.

Owns: what `general.architecture` = "llama" means: also Mistral, and Mixtral's experts. Covers
grouped and multi-query heads, tied or separate output, biases, any head size, per-layer head and
feed-forward counts, rope scaling none, linear, YaRN and long-rope, `rope_freqs`, routed experts.
Refuses every tensor it does not know.
"""

from __future__ import annotations

from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import ADJACENT, Decoder, Gated, Layer, write_decoder
from ds4_owner.recipes.extents import read_experts, read_extents, read_long_rope, read_rope
from ds4_owner.recipes.parameters import Parameters


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a llama file. Raises UnsupportedModel."""
    extents = read_extents(parameters, tensors, layer_tensors=9)
    place = (parameters, context_tokens, extents.rope_dim, ADJACENT)
    if parameters.text("rope.scaling.type", "") == "longrope":
        rope = read_long_rope(*place)
    else:
        rope = read_rope(*place, kinds=("none", "linear", "yarn", "longrope"))
    routed = parameters.count("expert_count", 0, low=0) > 0
    layers = [
        Layer(
            extents.attention(i, rope),
            read_experts(parameters, normalize=True, width=width) if routed else Gated(width),
        )
        for i, width in enumerate(parameters.counts("feed_forward_length", extents.layers))
    ]
    write_decoder(program, vocabulary, Decoder(extents.width, extents.epsilon, layers))
