"""Kernels over memory that ends where nothing is mapped: one byte too many ends the process.

Owns: `python -m helpers.edges [TYPE ...]`, which runs every kernel of those types (without: of all)
with weights, activation columns and results each between two such pages, compares the bits with
the scalar kernel, and prints how many products it made. `SHORT`: the weights lack their last byte.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np

from ds4_common.allocation import Layout
from ds4_common.quants import QuantType, block_weights
from ds4_common.quants.native import Isa, MatmulFn, Weight, library
from helpers.quant_blocks import (
    ALIGNED_TYPES,
    BLOCK32_TYPES,
    F32,
    FLOAT_TYPES,
    PLANES_TYPES,
    SUPER_TYPES,
    U8,
    X8_TYPES,
    Kernel,
    aligned,
    bits,
    packed,
    planes,
    plausible_blocks,
)

PAGE = mmap.PAGESIZE
SHAPES = ((16, 1), (8, 3), (18, 5), (5, 1), (33, 2), (1, 1), (40, 2))  # rows, blocks of a row
COLUMNS = (1, 2, 3, 4, 5, 8, 17)
ACT_ALIGN = 64


class Guarded:
    """A copy of some bytes that ends where its last page does, or at most `align` - 1 before."""

    def __init__(self, data: U8, align: int = 1) -> None:
        pages = -(-data.size // PAGE) * PAGE
        self._memory = mmap.mmap(-1, pages + 2 * PAGE)
        whole = np.frombuffer(self._memory, np.uint8)
        end = PAGE + pages
        start = (end - data.size) // align * align
        self.bytes = whole[start : start + data.size]
        self.bytes[:] = data
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for page in (0, end):
            if protect(whole.ctypes.data + page, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data


def _forms(quant: QuantType, raw: U8, cols: int) -> list[tuple[Layout, U8]]:
    forms = [(Layout.RAW, raw.reshape(-1))]
    if quant in X8_TYPES and len(raw) % 8 == 0:
        forms.append((Layout.X8, packed(quant, raw, cols)))
    if quant in ALIGNED_TYPES and (quant != QuantType.Q2_K or len(raw) % 2 == 0):
        forms.append(aligned(quant, raw, cols))
    if quant in PLANES_TYPES:
        forms.append((Layout.IQ2_PLANES, planes(quant, raw, cols)))
    return forms


def _product(kernel: Kernel, weights: Guarded, acts: U8) -> F32:
    columns, out = len(acts), Guarded(np.zeros(4 * len(acts) * kernel.rows, np.uint8), 4)
    held = Guarded(acts.reshape(-1), ACT_ALIGN)
    weight = Weight(weights.address, kernel.quant, kernel.layout, kernel.rows, kernel.cols, 0, 0)
    MatmulFn(library().ds4_matmul_kernel(kernel.quant, kernel.layout, kernel.isa))(
        ctypes.byref(weight), 0, kernel.rows, held.address, acts.strides[0], columns,
        out.address, kernel.rows,
    )  # fmt: skip
    return out.bytes.view(np.float32).copy()


def _run_type(quant: QuantType, rng: np.random.Generator, missing: int) -> int:
    made, isas = 0, [isa for isa in Isa if library().ds4_isa_runs(isa)]
    for rows, blocks in SHAPES:
        cols = blocks * (37 if quant in FLOAT_TYPES else block_weights(quant))
        raw = plausible_blocks(rng, quant, rows, cols)
        forms = _forms(quant, raw, cols)
        held = [(layout, Guarded(data[: data.size - missing])) for layout, data in forms]
        for n in COLUMNS:
            x = rng.standard_normal((n, cols)).astype(np.float32)
            products = [
                bits(_product(kernel, weights, kernel.quantize(x)))
                for layout, weights in held
                for isa in isas
                for kernel in [Kernel(quant, layout, isa, weights.bytes, rows, cols)]
            ]
            made += len(products)
            if any((product != products[0]).any() for product in products):
                raise SystemExit(f"{quant.name} {rows} x {cols}, {n} columns: other bits")
    return made


def main(arguments: list[str]) -> None:
    missing = int("SHORT" in arguments)
    types = [QuantType[name] for name in arguments if name != "SHORT"]
    rng = np.random.default_rng(11)
    every = (*FLOAT_TYPES, *BLOCK32_TYPES, *SUPER_TYPES)
    print("products", sum(_run_type(quant, rng, missing) for quant in types or every))


if __name__ == "__main__":
    main(sys.argv[1:])
