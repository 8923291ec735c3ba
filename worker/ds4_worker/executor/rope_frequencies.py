"""Frequencies of rotary positions: those of native/exec_open.c, for executors without that engine.

Owns: linear and YaRN scaling with factors folded in (contract/ops.py, rope). Double precision and
the C library's functions, so the bits are the CPU's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds4_common.contract import image as im


def frequencies(rope: im.Rope, factors: Sequence[float] | None) -> tuple[list[float], float]:
    """Of each pair: the angle of a position is position * frequency; and the magnitude of cosine
    and sine."""
    magnitude, low, high = rope.attn_factor, 0.0, 0.0
    yarn = rope.ext_factor > 0.0
    if yarn:
        low, high = _ramp_end(rope, rope.beta_fast), _ramp_end(rope, rope.beta_slow)
        if rope.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(0.0, low), min(rope.rope_dim - 1.0, high)
        magnitude *= 1.0 + 0.1 * math.log(1.0 / rope.freq_scale)
    found = []
    for i in range(rope.rope_dim // 2):
        frequency = math.pow(rope.base, -2.0 * i / rope.rope_dim)
        frequency /= factors[i] if factors is not None else 1.0
        ramp = min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
        mix = rope.ext_factor * (1.0 - ramp) if yarn else 0.0
        found.append(frequency * (rope.freq_scale * (1.0 - mix) + mix))
    return found, magnitude


def factors_of(rope: im.Rope, context_tokens: int) -> int:
    """The weight that holds the factors for a context of that length; NONE for no factors."""
    if rope.long_factors != im.NONE and context_tokens > rope.original_context:
        return rope.long_factors
    return rope.factors


def _ramp_end(rope: im.Rope, beta: float) -> float:
    turns = rope.original_context / (2.0 * math.pi * beta)
    return rope.rope_dim * math.log(turns) / (2.0 * math.log(rope.base))
