"""The inverse of the additive byte-moving artifacts in numpy, written from docs/layouts.md.

Owns: artifact bytes -> raw GGUF blocks, so that repack then unpack = identity can be tested; the
kinds that replace their tensor are in `ds4_common.quants.aligned`. Kind 7 keeps only the value rows
and gives those back; kinds 1 to 3 compute and have no inverse.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4_common.quants.aligned import sections

Bytes = npt.NDArray[np.uint8]


def unpack_q8_0(data: Bytes, n_blocks: int) -> Bytes:
    """[n_blocks, 34]"""
    d, codes = sections(data, (2 * n_blocks, 32 * n_blocks))
    return np.hstack([d.reshape(n_blocks, 2), codes.reshape(n_blocks, 32)])


def unpack_mla_values(data: Bytes, in_dim: int, heads: int) -> Bytes:
    """[heads, 128, in_dim / 32, 34]: the Q8_0 blocks of the value rows"""
    per_row = in_dim // 32
    cut = 2 * heads * per_row * 128
    scales = data[:cut].reshape(heads, per_row, 128, 2).transpose(0, 2, 1, 3)
    codes = data[cut:].reshape(heads, per_row, 32, 128).transpose(0, 3, 1, 2)
    return np.concatenate([scales, codes], axis=3)
