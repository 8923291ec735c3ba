"""The gpt-oss family: sinks and windows in the attention, experts with biases and a shifted unit.

Owns: what `general.architecture` = "gpt-oss" means. Every other layer slides, the first one does.
YaRN's corners are not rounded to whole pairs here, as in the models' own code. The router's softmax
is over the chosen experts only.
"""

from __future__ import annotations

from dataclasses import replace

from ds4_common.contract.ops import GatedUnit, RouteScore
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import HALVES, Decoder, Layer, write_decoder
from ds4_owner.recipes.extents import (
    read_experts,
    read_extents,
    read_rope,
    read_window_rope,
    read_windows,
)
from ds4_owner.recipes.parameters import Parameters


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a gpt-oss file. Raises UnsupportedModel."""
    extents = read_extents(parameters, tensors, layer_tensors=19)
    rope = read_rope(parameters, context_tokens, extents.rope_dim, HALVES)
    rope = replace(rope, attributes={**rope.attributes, "truncate": 0})
    local = read_window_rope(parameters, rope)
    window = parameters.count("attention.sliding_window")
    windows = read_windows(parameters, extents.layers, window, pattern=2)
    experts = replace(
        read_experts(parameters, score=RouteScore.LOGITS, normalize=False),
        unit={"act": GatedUnit.SHIFTED, "limit": 7.0, "alpha": 1.702},
    )
    layers = [
        Layer(
            replace(
                extents.attention(i, local if windows[i] else rope), window=windows[i], sinks=True
            ),
            experts,
        )
        for i in range(extents.layers)
    ]
    decoder = Decoder(extents.width, extents.epsilon, layers, ffn_norm="post_attention_norm")
    write_decoder(program, vocabulary, decoder)
