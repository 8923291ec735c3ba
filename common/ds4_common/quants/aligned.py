"""The inverse of the aligned artifacts that replace raw tensors (docs/layouts.md), in numpy.

Owns: kinds 4, 6 and 8 back to GGUF blocks, byte for byte. For readers of weights and for tests, not
for a path that a token waits on: each call copies the tensor. Refuses sizes that disagree with the
dims and padding that is not zero (ValueError). Imported on demand, because numpy is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds4_common.allocation import Layout

Bytes = npt.NDArray[np.uint8]
_BLOCK_WEIGHTS = 256  # of all three types


def unpack(layout: Layout, data: memoryview, dims: Sequence[int]) -> memoryview:
    """Read-only GGUF blocks of a tensor that lies in an aligned layout; `dims` in GGUF order."""
    artifact = np.frombuffer(data, np.uint8)
    n_blocks = math.prod(dims) // _BLOCK_WEIGHTS
    match layout:
        case Layout.IQ2_XXS_ALIGNED:
            blocks = unpack_iq2_xxs(artifact, n_blocks)
        case Layout.IQ2_XS_ALIGNED:
            blocks = unpack_iq2_xs(artifact, n_blocks)
        case Layout.Q2_K_ALIGNED:
            blocks = unpack_q2_k(artifact, dims[0], dims[1], math.prod(dims[2:]))
        case _:
            raise ValueError(f"layout {layout!r} does not hold the whole raw tensor")
    return memoryview(blocks.tobytes())


def sections(data: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Cuts an artifact into its sections, each padded to 64 bytes with zeros."""
    found, at = [], 0
    for size in sizes:
        end = at + size
        found.append(data[at:end])
        at = -(-end // 64) * 64
        if data[end:at].any():
            raise ValueError(f"artifact: bytes {end} to {at} are padding and not zero")
    if at != len(data):
        raise ValueError(f"artifact of {len(data)} bytes; its sections {list(sizes)} need {at}")
    return found


def unpack_iq2_xxs(data: Bytes, n_blocks: int) -> Bytes:
    """[n_blocks, 66]"""
    d, codes = sections(data, (2 * n_blocks, 64 * n_blocks))
    return np.hstack([d.reshape(n_blocks, 2), codes.reshape(n_blocks, 64)])


def unpack_iq2_xs(data: Bytes, n_blocks: int) -> Bytes:
    """[n_blocks, 74]"""
    d, scales, codes = sections(data, (2 * n_blocks, 8 * n_blocks, 64 * n_blocks))
    parts = d.reshape(n_blocks, 2), codes.reshape(n_blocks, 64), scales.reshape(n_blocks, 8)
    return np.hstack(parts)


def unpack_q2_k(data: Bytes, in_dim: int, out_dim: int, experts: int) -> Bytes:
    """[experts * out_dim * in_dim / 256, 84], in the order of the raw tensor"""
    per_row = in_dim // _BLOCK_WEIGHTS
    rows = experts * out_dim // 2  # pairs of rows
    pairs = rows * per_row
    dm2, sc4, qs2 = sections(data, (8 * pairs, 32 * pairs, 128 * pairs))
    # Axes: pair of rows, block in the row, then u32 words with the parity where the layout has it.
    dm = dm2.reshape(rows, per_row, 2, 4).transpose(0, 2, 1, 3)
    scales = sc4.reshape(rows, per_row, 2, 2, 2, 4).transpose(0, 3, 1, 2, 4, 5)
    codes = qs2.reshape(rows, per_row, 16, 2, 4).transpose(0, 3, 1, 2, 4)
    n_blocks = 2 * pairs
    return np.hstack(
        [scales.reshape(n_blocks, 16), codes.reshape(n_blocks, 64), dm.reshape(n_blocks, 4)]
    )
