"""The gemma3 family: gemma2's norms and GELU, normed heads, another rotation where layers slide.

Owns: what `general.architecture` = "gemma3" means, its text half. Of six layers five slide; those
rotate with a base of their own and without scaling. Norm weights are used as the file stores them,
which is with the 1 added.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ds4_common.contract.ops import GatedUnit
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import HALVES, Decoder, Gated, Layer, Rope, write_decoder
from ds4_owner.recipes.extents import read_extents, read_rope, read_windows
from ds4_owner.recipes.parameters import Parameters

_WIDE_QUERIES = 62  # layers of the 27B model, whose scores are scaled by width / heads


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a gemma3 file. Raises UnsupportedModel."""
    extents = read_extents(parameters, tensors, layer_tensors=13)
    rope = read_rope(parameters, context_tokens, extents.rope_dim, HALVES)
    local_base = parameters.number("rope.freq_base_swa", 10000.0, low=1.0001)
    local = Rope(extents.rope_dim, HALVES, {"base": local_base})
    window = parameters.count("attention.sliding_window", 0, low=0)
    windows = read_windows(parameters, extents.layers, window, pattern=6)
    scale = extents.scale
    if extents.layers == _WIDE_QUERIES:
        scale = 1.0 / math.sqrt(extents.width // extents.heads[0])
    layers = [
        Layer(
            replace(
                extents.attention(i, local if windows[i] else rope),
                scale=scale,
                window=windows[i],
                head_norms=True,
            ),
            Gated(width, act=GatedUnit.GELU),
        )
        for i, width in enumerate(parameters.counts("feed_forward_length", extents.layers))
    ]
    decoder = Decoder(
        extents.width,
        extents.epsilon,
        layers,
        embedding_scale=math.sqrt(extents.width),
        post_norms=("post_attention_norm", "post_ffw_norm"),
        logit_cap=parameters.number_or_none("final_logit_softcapping", 0.0, low=1e-3),
    )
    write_decoder(program, vocabulary, decoder)
