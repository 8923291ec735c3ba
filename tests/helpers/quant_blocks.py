"""Weight tensors for kernel tests: plausible ones, and blocks of random bytes.

Owns: making bytes, and running a kernel on a rectangle through ctypes. No assertions.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

from ds4_common.allocation import Artifact, ArtifactKind, Layout
from ds4_common.quants import (
    QuantType,
    block_bytes,
    layout_bytes,
    pack,
    pack_planes,
    tensor_bytes,
)
from ds4_common.quants.native import Isa, MatmulFn, Weight, library
from ds4_owner.artifacts import build_artifact
from ds4_owner.plan import REPLACES_RAW

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

FLOAT_TYPES = (QuantType.F32, QuantType.F16, QuantType.BF16)
LEGACY_TYPES = (QuantType.Q4_0, QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1, QuantType.Q8_0)
CODE_BOOK_TYPES = (QuantType.IQ4_NL, QuantType.MXFP4, QuantType.NVFP4, QuantType.Q1_0)
BLOCK32_TYPES = (*LEGACY_TYPES, *CODE_BOOK_TYPES)  # activations in blocks of 32
SUPER_TYPES = (
    QuantType.Q2_K,
    QuantType.Q3_K,
    QuantType.Q4_K,
    QuantType.Q5_K,
    QuantType.Q6_K,
    QuantType.IQ1_S,
    QuantType.IQ1_M,
    QuantType.IQ2_XXS,
    QuantType.IQ2_XS,
    QuantType.IQ2_S,
    QuantType.IQ3_XXS,
    QuantType.IQ3_S,
    QuantType.IQ4_XS,
    QuantType.TQ1_0,
    QuantType.TQ2_0,
)
X8_TYPES = (*LEGACY_TYPES, *SUPER_TYPES[:5])  # Q2_K .. Q6_K of the K types
ALIGNED_TYPES = {
    QuantType.IQ2_XXS: ArtifactKind.IQ2_XXS_ALIGNED,
    QuantType.IQ2_XS: ArtifactKind.IQ2_XS_ALIGNED,
    QuantType.Q2_K: ArtifactKind.Q2_K_ALIGNED,
}
PLANES_TYPES = (QuantType.IQ2_XXS, QuantType.IQ2_XS)
# Where the half-precision scales lie in a block.
HALVES = {
    QuantType.Q4_0: (0,),
    QuantType.Q4_1: (0, 2),
    QuantType.Q5_0: (0,),
    QuantType.Q5_1: (0, 2),
    QuantType.Q8_0: (0,),
    QuantType.Q2_K: (80, 82),
    QuantType.Q3_K: (108,),
    QuantType.Q4_K: (0, 2),
    QuantType.Q5_K: (0, 2),
    QuantType.Q6_K: (208,),
    QuantType.IQ1_S: (0,),
    QuantType.IQ1_M: (),  # a nibble in each of four words
    QuantType.IQ2_XXS: (0,),
    QuantType.IQ2_XS: (0,),
    QuantType.IQ2_S: (0,),
    QuantType.IQ3_XXS: (0,),
    QuantType.IQ3_S: (0,),
    QuantType.IQ4_NL: (0,),
    QuantType.IQ4_XS: (0,),
    QuantType.TQ1_0: (52,),
    QuantType.TQ2_0: (64,),
    QuantType.MXFP4: (),  # a power of two
    QuantType.NVFP4: (),  # four E4M3 numbers
    QuantType.Q1_0: (0,),
}


def random_blocks(rng: np.random.Generator, quant: QuantType, rows: int, cols: int) -> U8:
    """Any bytes at all, as [rows, row bytes]: infinite, NaN and denormal scales included."""
    raw = rng.integers(0, 256, tensor_bytes(quant, rows, cols), dtype=np.uint8)
    return raw.reshape(rows, -1)


def plausible_blocks(rng: np.random.Generator, quant: QuantType, rows: int, cols: int) -> U8:
    """Random quants under scales of ordinary size, as [rows, row bytes]."""
    if quant in FLOAT_TYPES:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        if quant == QuantType.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if quant == QuantType.F16 else np.float32).view(np.uint8)
    raw = random_blocks(rng, quant, rows, cols).reshape(-1, block_bytes(quant))
    for at in HALVES[quant]:
        scale = (rng.uniform(-1, 1, len(raw)) * 0.02).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if quant == QuantType.IQ1_M:
        halves = (rng.uniform(-1, 1, len(raw)) * 0.02).astype(np.float16).view(np.uint16)
        for word in range(4):
            high = raw[:, 49 + 2 * word]
            high[:] = (high & 15) | (((halves >> (4 * word)) & 15) << 4).astype(np.uint8)
    elif quant == QuantType.MXFP4:
        raw[:, 0] = rng.integers(115, 122, len(raw))
    elif quant == QuantType.NVFP4:
        raw[:, :4] = rng.integers(0, 32, (len(raw), 4))
    return raw.reshape(rows, -1)


def expected_floats(quant: QuantType, raw: U8) -> F32:
    """[rows, cols] weights by the `gguf` package; by its layout for Q1_0, which has no decoder."""
    if quant == QuantType.Q1_0:
        blocks = raw.reshape(-1, 18)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
        return (scale * signs).reshape(len(raw), -1)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(quant)))
    return np.ascontiguousarray(values, np.float32)


def packed(quant: QuantType, raw: U8, cols: int) -> U8:
    """The X8 form of a raw tensor."""
    out = np.empty(raw.size, np.uint8)
    pack(quant, raw.reshape(-1).data, out.data, len(raw), cols)
    return out


def aligned(quant: QuantType, raw: U8, cols: int, experts: int = 1) -> tuple[Layout, U8]:
    """The published artifact of a raw tensor, whose rows are those of its experts."""
    kind, source = ALIGNED_TYPES[quant], raw.reshape(-1).data.cast("B")

    def read(offset: int, view: memoryview) -> None:
        view[:] = source[offset : offset + len(view)]

    layout = REPLACES_RAW[kind]
    out = np.empty(library().ds4_layout_bytes(quant, layout, len(raw), cols), np.uint8)
    record = Artifact(kind, cols, len(raw) // experts, experts, "experts")
    build_artifact(record, 0, read, out.data)
    return layout, out


def planes(quant: QuantType, raw: U8, cols: int) -> U8:
    """The planes of a raw IQ2_XXS or IQ2_XS tensor."""
    out = np.empty(layout_bytes(quant, Layout.IQ2_PLANES, len(raw), cols), np.uint8)
    pack_planes(quant, raw.reshape(-1).data, out.data, len(raw), cols)
    return out


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel bound to one tensor, or to `rows` rows from `first` on of one of `all` rows."""

    quant: QuantType
    layout: Layout
    isa: Isa
    data: U8
    rows: int
    cols: int
    first: int = 0
    all: int = 0

    def quantize(self, x: F32) -> U8:
        """Activation columns [n, bytes] of x [n, cols]."""
        form = library().ds4_act_format(self.quant)
        size = library().ds4_act_bytes(form, self.cols)
        # 64-byte aligned and filled with rubbish: whatever counts must be written.
        backing = np.full(len(x) * size + 64, 0xA5, np.uint8)
        start = -backing.ctypes.data % 64
        out = backing[start : start + len(x) * size].reshape(len(x), size)
        x = np.ascontiguousarray(x, np.float32)
        for c in range(len(x)):
            library().ds4_act_quantize(
                form, x[c].ctypes.data, self.cols, out[c].ctypes.data, self.isa
            )
        return out

    def run(self, x: F32, splits: tuple[int, ...] = ()) -> F32:
        """y [n, rows] of x [n, cols], computed in row ranges cut at `splits`."""
        address = library().ds4_matmul_kernel(self.quant, self.layout, self.isa)
        assert address, f"no kernel for {self.quant!r} {self.layout!r} {self.isa!r}"
        acts = self.quantize(x)
        weight = Weight(
            self.data.ctypes.data, self.quant, self.layout, self.rows, self.cols, self.first,
            self.all,
        )  # fmt: skip
        ldy = self.rows + 3
        y = np.full((len(x), ldy), np.float32(-77.0))
        edges = [0, *splits, self.rows]
        for row0, row1 in itertools.pairwise(edges):
            MatmulFn(address)(
                ctypes.byref(weight), row0, row1, acts.ctypes.data, acts.strides[0], len(x),
                y.ctypes.data, ldy,
            )  # fmt: skip
            assert (y[:, row1:] == -77.0).all(), "kernel wrote outside its rectangle"
        return y[:, : self.rows].copy()


def bits(values: F32) -> npt.NDArray[np.uint32]:
    """Bit patterns, every NaN as the same one."""
    out = np.ascontiguousarray(values, np.float32).view(np.uint32).copy()
    out[np.isnan(values)] = 0x7FC00000
    return out
