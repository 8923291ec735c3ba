"""Python face of the quant kernels: sizes, CPU layouts, packing, dequantization.

Owns: bounds checks in front of native/matmul.h, and the choice of a CPU layout per tensor. Refuses
unknown ggml types (UnsupportedModel) and buffers of the wrong size (ValueError). Per-element work
is C; nothing here imports numpy.
"""

from __future__ import annotations

import ctypes
import math
from array import array

from ds4_common.allocation import Layout
from ds4_common.errors import UnsupportedModel
from ds4_common.native.buffers import Buffer, pinned
from ds4_common.quants.measured import ALIGNED_TO_RAW, PACKED_TO_RAW, PLANES_TO_RAW
from ds4_common.quants.native import Isa, QuantType, Weight, best_isa, library

__all__ = [
    "ALIGNED_LAYOUTS",
    "PACKED_ROWS",
    "Isa",
    "QuantType",
    "aligned_is_fastest",
    "block_bytes",
    "block_weights",
    "cpu_layout",
    "dequantize_rows",
    "layout_bytes",
    "pack",
    "pack_planes",
    "tensor_bytes",
    "unpack",
    "unpack_planes",
]

PACKED_ROWS = 8  # that the X8 layout interleaves
# The published artifacts that hold whole tensors and that CPU kernels read.
ALIGNED_LAYOUTS = {
    QuantType.IQ2_XXS: Layout.IQ2_XXS_ALIGNED,
    QuantType.IQ2_XS: Layout.IQ2_XS_ALIGNED,
    QuantType.Q2_K: Layout.Q2_K_ALIGNED,
}
# Instruction sets that leave what they have no kernel for to those of another.
_BELOW = {Isa.AVXVNNI: Isa.AVX2, Isa.AMX: Isa.AVX512, Isa.I8MM: Isa.NEON}
_ARM = frozenset({Isa.NEON, Isa.I8MM})


def _known(ggml_type: int) -> QuantType:
    try:
        return QuantType(ggml_type)
    except ValueError:
        known = ", ".join(t.name for t in QuantType)
        raise UnsupportedModel(
            f"ggml type {ggml_type}: no CPU kernel; expected one of {known}; "
            "requantize the model to one of these"
        ) from None


def block_bytes(ggml_type: int) -> int:
    """Bytes of one block."""
    return int(library().ds4_block_bytes(_known(ggml_type)))


def block_weights(ggml_type: int) -> int:
    """Weights of one block."""
    return int(library().ds4_block_weights(_known(ggml_type)))


def tensor_bytes(ggml_type: int, rows: int, cols: int) -> int:
    """Bytes of rows x cols weights as raw blocks, and in the X8 layout.

    Raises ValueError when cols is not a positive multiple of the block.
    """
    weights = block_weights(ggml_type)
    if rows < 0 or cols <= 0 or cols % weights:
        raise ValueError(
            f"{QuantType(ggml_type).name} {rows} x {cols}: "
            f"expected rows >= 0 and cols a positive multiple of {weights}"
        )
    return rows * (cols // weights) * block_bytes(ggml_type)


def layout_bytes(ggml_type: int, layout: Layout, rows: int, cols: int) -> int:
    """Bytes of rows x cols weights in that layout; experts count as one tall matrix.

    Raises ValueError when weights of that type or shape cannot lie so for the CPU kernels.
    """
    quant = _known(ggml_type)
    n_bytes = int(library().ds4_layout_bytes(quant, layout, rows, cols))
    if not n_bytes:
        granule = library().ds4_row_granule(quant, layout)
        raise ValueError(
            f"{quant.name} {rows} x {cols} in layout {layout!r}: no such CPU layout; expected "
            f"rows a multiple of {granule} and cols of {block_weights(quant)}"
        )
    return n_bytes


def _measured(
    table: dict[str, dict[str, float]], quant: QuantType, isa: Isa | None = None
) -> float:
    """How much faster than raw blocks on this CPU; 0 where nothing was measured."""
    return table.get((best_isa() if isa is None else isa).name, {}).get(quant.name, 0.0)


def _packed_gain(quant: QuantType) -> float:
    """The same of X8. A type without a figure has that with the instruction set below; on ARM,
    where there may be none, packing gains: the same bytes, from which kernels there take half
    the instructions with few columns and no more with many (tests/common/test_neon.py)."""
    isa = best_isa()
    found = _measured(PACKED_TO_RAW, quant)
    if not found and isa in _BELOW:
        found = _measured(PACKED_TO_RAW, quant, _BELOW[isa])
    packable = library().ds4_pack_possible(quant, PACKED_ROWS, block_weights(quant))
    return math.inf if not found and isa in _ARM and packable else found


def _planes_gain(quant: QuantType) -> float:
    """How much faster planes are than raw blocks, less what they are larger: out of the cache the
    tables are measured, from memory every byte counts."""
    measured, cols = _measured(PLANES_TO_RAW, quant), block_weights(quant)
    if not measured:
        return 0.0
    raw_bytes = tensor_bytes(quant, 1, cols)
    return measured * raw_bytes / layout_bytes(quant, Layout.IQ2_PLANES, 1, cols)


def cpu_layout(ggml_type: int, rows: int, cols: int) -> Layout:
    """The layout in which the kernels of this CPU run the tensor fastest: X8 or planes where they
    measured faster than raw blocks (measured.py) and the shape allows it, else RAW. Planes must
    gain more than the memory that they cost. Where nothing is measured: on ARM X8 (`_packed_gain`),
    with scalar kernels, which put raw blocks together first, RAW. Every instruction set can run
    every layout."""
    quant = _known(ggml_type)
    packed, planes = _packed_gain(quant), _planes_gain(quant)
    if planes > max(1.0, packed) and library().ds4_layout_bytes(
        quant, Layout.IQ2_PLANES, rows, cols
    ):
        return Layout.IQ2_PLANES
    if packed > 1.0 and library().ds4_pack_possible(quant, rows, cols):
        return Layout.X8
    return Layout.RAW


def aligned_is_fastest(ggml_type: int) -> bool:
    """Whether the kernels of this CPU run experts of that type faster from the published aligned
    artifact than from raw blocks, packed or as planes (measured.py). False where nothing is
    measured: who wants the artifacts asks for them (`--cpu-layout aligned`, or raw)."""
    quant = _known(ggml_type)
    others = _packed_gain(quant), _planes_gain(quant)
    return _measured(ALIGNED_TO_RAW, quant) > max(1.0, *others)


def _planes(
    function: str, ggml_type: int, source: Buffer, target: bytearray | memoryview, rows: int,
    cols: int,
) -> None:  # fmt: skip
    quant = _known(ggml_type)
    raw, planes = (
        tensor_bytes(quant, rows, cols),
        layout_bytes(quant, Layout.IQ2_PLANES, rows, cols),
    )
    expected = (raw, planes) if function == "ds4_planes_pack" else (planes, raw)
    if (memoryview(source).nbytes, memoryview(target).nbytes) != expected:
        raise ValueError(
            f"{quant.name} {rows} x {cols}: got {memoryview(source).nbytes} and "
            f"{memoryview(target).nbytes} bytes, expected {expected[0]} and {expected[1]}"
        )
    with pinned(source) as start, pinned(target, writable=True) as end:
        getattr(library(), function)(quant, start, end, rows, cols)


def pack_planes(
    ggml_type: int, raw: Buffer, planes: bytearray | memoryview, rows: int, cols: int
) -> None:
    """Writes rows of raw GGUF blocks in the planes layout; rows follow each other in both.

    Raises ValueError for a type or shape without that layout and for buffers of other sizes.
    """
    _planes("ds4_planes_pack", ggml_type, raw, planes, rows, cols)


def unpack_planes(
    ggml_type: int, planes: Buffer, raw: bytearray | memoryview, rows: int, cols: int
) -> None:
    """Inverse of `pack_planes`."""
    _planes("ds4_planes_unpack", ggml_type, planes, raw, rows, cols)


def _check_rows(
    quant: QuantType, rows: int, cols: int, raw: Buffer, packed: Buffer, row0: int, row1: int
) -> None:
    """Raw bytes of [row0, row1) on one side, a whole packed tensor of rows x cols on the other."""
    if not library().ds4_pack_possible(quant, rows, cols):
        raise ValueError(f"{quant.name} {rows} x {cols} has no X8 layout; see cpu_layout")
    if not 0 <= row0 < row1 <= rows or row0 % 8 or row1 % 8:
        raise ValueError(
            f"rows [{row0}, {row1}) of {rows}: expected a non-empty range of multiples of 8"
        )
    sizes = memoryview(raw).nbytes, memoryview(packed).nbytes
    expected = tensor_bytes(quant, row1 - row0, cols), tensor_bytes(quant, rows, cols)
    if sizes != expected:
        raise ValueError(
            f"{quant.name} rows [{row0}, {row1}) of {rows} x {cols}: "
            f"got {sizes[0]} raw and {sizes[1]} packed bytes, expected {expected[0]} and "
            f"{expected[1]}"
        )


def pack(
    ggml_type: int,
    raw: Buffer,
    packed: bytearray | memoryview,
    rows: int,
    cols: int,
    row0: int = 0,
    row1: int | None = None,
) -> None:
    """Writes rows [row0, row1) into a packed X8 tensor of rows x cols.

    `raw` holds the GGUF bytes of exactly those rows, `packed` is the whole tensor (writable).
    Ranges may be packed in any order and by several threads at once.
    """
    quant, end = _known(ggml_type), rows if row1 is None else row1
    _check_rows(quant, rows, cols, raw, packed, row0, end)
    with pinned(raw) as source, pinned(packed, writable=True) as target:
        library().ds4_pack_rows(quant, source, target, row0, end, cols)


def unpack(
    ggml_type: int,
    packed: Buffer,
    raw: bytearray | memoryview,
    rows: int,
    cols: int,
    row0: int = 0,
    row1: int | None = None,
) -> None:
    """Inverse of `pack`: the GGUF bytes of rows [row0, row1) into `raw`."""
    quant, end = _known(ggml_type), rows if row1 is None else row1
    _check_rows(quant, rows, cols, raw, packed, row0, end)
    with pinned(packed) as source, pinned(raw, writable=True) as target:
        library().ds4_unpack_rows(quant, source, target, row0, end, cols)


def dequantize_rows(
    ggml_type: int,
    layout: Layout,
    data: Buffer,
    rows: int,
    cols: int,
    row0: int = 0,
    row1: int | None = None,
) -> array[float]:
    """Rows [row0, row1) of a whole tensor as (row1 - row0) * cols float32, row by row."""
    quant, end = _known(ggml_type), rows if row1 is None else row1
    if not 0 <= row0 <= end <= rows:
        raise ValueError(f"rows [{row0}, {end}): expected a range within {rows} rows")
    got = memoryview(data).nbytes
    expected = layout_bytes(quant, layout, rows, cols) if rows else 0
    if got != expected:
        raise ValueError(
            f"{quant.name} {rows} x {cols}: got {got} bytes, expected {expected} for the tensor"
        )
    out = array("f", bytes(4 * (end - row0) * cols))
    with pinned(data) as address:
        weight = Weight(address, quant, layout, rows, cols)
        base = out.buffer_info()[0]
        for row in range(row0, end):
            library().ds4_dequant_row(ctypes.byref(weight), row, base + 4 * (row - row0) * cols)
    return out
