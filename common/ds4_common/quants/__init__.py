"""Python face of the quant kernels: sizes, CPU layouts, packing, dequantization.

Owns: bounds checks in front of native/matmul.h, and the choice of a CPU layout per tensor. Refuses
unknown ggml types (UnsupportedModel) and buffers of the wrong size (ValueError). Per-element work
is C; nothing here imports numpy.
"""

from __future__ import annotations

import ctypes
from array import array

from ds4_common.allocation import Layout
from ds4_common.errors import UnsupportedModel
from ds4_common.native.buffers import Buffer, pinned
from ds4_common.quants.measured import ALIGNED_TO_RAW, PACKED_TO_RAW
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
    "tensor_bytes",
    "unpack",
]

PACKED_ROWS = 8  # that the X8 layout interleaves
# The published artifacts that hold whole tensors and that CPU kernels read.
ALIGNED_LAYOUTS = {
    QuantType.IQ2_XXS: Layout.IQ2_XXS_ALIGNED,
    QuantType.IQ2_XS: Layout.IQ2_XS_ALIGNED,
    QuantType.Q2_K: Layout.Q2_K_ALIGNED,
}
_LEGACY = frozenset(
    {QuantType.Q4_0, QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1, QuantType.Q8_0}
)


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


def cpu_layout(ggml_type: int, rows: int, cols: int) -> Layout:
    """The layout in which the kernels of this CPU run the tensor fastest: X8 where it measured
    faster (measured.py) and the shape allows it, else RAW. A type not measured with AMX goes by
    its figure with AVX512, whose kernels run there up to a dozen columns. Where nothing is measured
    - NEON has vector kernels for just these types - X8 for the types in blocks of 32. Every
    instruction set can run every layout."""
    quant, isa = _known(ggml_type), best_isa()
    ratios = PACKED_TO_RAW.get(isa.name)
    if isa == Isa.AMX:
        ratios = PACKED_TO_RAW.get(Isa.AVX512.name, {}) | (ratios or {})
    faster = quant in _LEGACY if ratios is None else ratios.get(quant.name, 0.0) > 1.0
    if faster and library().ds4_pack_possible(quant, rows, cols):
        return Layout.X8
    return Layout.RAW


def aligned_is_fastest(ggml_type: int) -> bool:
    """Whether the kernels of this CPU run experts of that type faster from the published aligned
    artifact than from raw blocks and than packed (measured.py). False where nothing is measured:
    who wants to share artifacts with a GPU asks for them (`--cpu-layout aligned`)."""
    name, isa = _known(ggml_type).name, best_isa().name
    aligned = ALIGNED_TO_RAW.get(isa, {}).get(name, 0.0)
    return aligned > max(1.0, PACKED_TO_RAW.get(isa, {}).get(name, 0.0))


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
