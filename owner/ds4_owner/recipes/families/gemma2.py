"""The gemma2 family: norms before and after each half of a layer, GELU, capped scores and logits.

Owns: what `general.architecture` = "gemma2" means. Every other layer slides, the first one does.
Norm weights are used as the file stores them, which is with the 1 added.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ds4_common.contract.ops import GatedUnit
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import HALVES, Decoder, Gated, Layer, write_decoder
from ds4_owner.recipes.extents import read_extents, read_rope, read_window_rope, read_windows
from ds4_owner.recipes.parameters import Parameters

_WIDE_QUERIES = 46  # layers of the 27B model, whose scores are scaled by width / heads


def recipe(
    parameters: Parameters,
    program: TextProgram,
    vocabulary: int,
    context_tokens: int,
    tensors: int,
) -> None:
    """Writes the program of a gemma2 file. Raises UnsupportedModel."""
    extents = read_extents(parameters, tensors, layer_tensors=11)
    rope = read_rope(parameters, context_tokens, extents.rope_dim, HALVES)
    local = read_window_rope(parameters, rope)
    window = parameters.count("attention.sliding_window", 4096)
    scale = extents.scale
    if extents.layers == _WIDE_QUERIES:
        scale = 1.0 / math.sqrt(extents.width // extents.heads[0])
    cap = parameters.number_or_none("attn_logit_softcapping", 50.0, low=1e-3)
    windows = read_windows(parameters, extents.layers, window, pattern=2)
    layers = [
        Layer(
            replace(
                extents.attention(i, local if windows[i] else rope),
                scale=scale,
                window=windows[i],
                soft_cap=cap,
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
        logit_cap=parameters.number_or_none("final_logit_softcapping", 30.0, low=1e-3),
    )
    write_decoder(program, vocabulary, decoder)
