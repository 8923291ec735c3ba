"""Rates of the CPU matmul kernels, beside the read bandwidth measured in the same run.

Owns: one row per (type, layout): weights streamed with one column from the L3 cache and from DRAM
(GB/s of weight bytes), and arithmetic with many columns (GOP/s, two operations per weight and
column). Threads split rows as the executor does. Best of several rounds: other programs only ever
make a round slower. `ds4-bench kernels` prints the table.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ds4_common.allocation import Layout
from ds4_common.quants import QuantType, layout_bytes, tensor_bytes
from ds4_common.quants.native import Isa, MatmulFn, Weight, best_isa, library
from ds4_worker.bench.machine import read_bandwidth

COLS = 4096
L3_BYTES = 8 << 20
DRAM_BYTES = 256 << 20
GEMM_COLUMNS = 64
GEMM_BYTES = 2 << 20
ROUND_SECONDS = 0.15
_ORDINARY = bytes(byte & 0x3F | 0x04 for byte in range(256))


@dataclass(frozen=True, slots=True)
class Row:
    """Rates of one kernel. The read bandwidth of the same run stands beside them."""

    type: str
    layout: str
    l3_gb_per_s: float
    dram_gb_per_s: float
    gemm_gop_per_s: float
    read_gb_per_s: float


@contextmanager
def _memory(n_bytes: int, pattern: bytes | None = None) -> Iterator[int]:
    """Address of anonymous memory in large pages where the system gives them, filled."""
    area = mmap.mmap(-1, n_bytes + (2 << 20))
    area.madvise(mmap.MADV_HUGEPAGE)
    if pattern:
        for offset in range(0, n_bytes, len(pattern)):
            area[offset : offset + len(pattern)] = pattern
    hold = ctypes.c_char.from_buffer(area)
    try:
        yield -(-ctypes.addressof(hold) // 64) * 64
    finally:
        del hold
        area.close()


def random_pattern(quant: QuantType) -> bytes:
    """About 1 MiB of random blocks, in which every byte may end a half-precision number of ordinary
    size: sums that overflow, or products so small that a CPU slows down, would be timed instead."""
    size = tensor_bytes(quant, 1, COLS)
    pattern = bytearray(os.urandom((1 << 20) // size * size).translate(_ORDINARY))
    if quant == QuantType.MXFP4:
        pattern[::17] = b"\x78" * (len(pattern) // 17)  # the power of two before each block
    return bytes(pattern)


@contextmanager
def activations(quant: QuantType, columns: int, isa: Isa) -> Iterator[tuple[int, int]]:
    """Address of quantized columns and the bytes of one."""
    form = library().ds4_act_format(quant)
    size = library().ds4_act_bytes(form, COLS)
    values = array("f", (random.gauss(0, 1) for _ in range(COLS)))
    with _memory(columns * size) as address:
        for column in range(columns):
            library().ds4_act_quantize(
                form, values.buffer_info()[0], COLS, address + column * size, isa
            )
        yield address, size


@dataclass(frozen=True, slots=True)
class _Case:
    kernel: Callable[..., None]
    weight: Weight
    acts: int
    act_bytes: int
    columns: int
    out: int


def _seconds_per_pass(case: _Case, threads: int, passes: int) -> float:
    """Wall time of one pass over the matrix, from `passes` passes by each of `threads` threads."""
    start_line = threading.Barrier(threads)
    spans: list[tuple[float, float]] = []
    rows = case.weight.rows
    edges = [rows * i // threads // 16 * 16 for i in range(threads)] + [rows]

    def work(row0: int, row1: int) -> None:
        start_line.wait()
        start = time.perf_counter()
        for _ in range(passes):
            case.kernel(
                ctypes.byref(case.weight), row0, row1, case.acts, case.act_bytes, case.columns,
                case.out, rows,
            )  # fmt: skip
        spans.append((start, time.perf_counter()))

    workers = [threading.Thread(target=work, args=edges[i : i + 2]) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return (max(end for _, end in spans) - min(start for start, _ in spans)) / passes


def _best(case: _Case, threads: int, rounds: int) -> float:
    first = _seconds_per_pass(case, threads, 1)
    passes = max(1, int(ROUND_SECONDS / first))
    return min(_seconds_per_pass(case, threads, passes) for _ in range(rounds))


def _rate(
    quant: QuantType,
    layout: Layout,
    n_bytes: int,
    columns: int,
    threads: int,
    rounds: int,
    isa: Isa,
) -> tuple[float, int]:
    """Best seconds per pass over about `n_bytes` of weights, and the weight bytes of a pass."""
    row_bytes = tensor_bytes(quant, 1, COLS)
    rows = n_bytes // row_bytes // 16 * 16
    address = library().ds4_matmul_kernel(quant, layout, isa)
    with (
        _memory(layout_bytes(quant, layout, rows, COLS), random_pattern(quant)) as data,
        activations(quant, columns, isa) as (acts, act_bytes),
        _memory(4 * rows * columns) as out,
    ):
        weight = Weight(data, quant, layout, rows, COLS)
        case = _Case(MatmulFn(address), weight, acts, act_bytes, columns, out)
        return _best(case, threads, rounds), layout_bytes(quant, layout, rows, COLS)


def cpu_rate(quant: QuantType, layout: Layout, columns: int, isa: Isa, rounds: int) -> float:
    """Best weights per second of this thread's CPU time, out of the cache: what others do to the
    machine counts little."""
    row_bytes = tensor_bytes(quant, 1, COLS)
    rows = GEMM_BYTES // row_bytes // 32 * 32
    kernel = MatmulFn(library().ds4_matmul_kernel(quant, layout, isa))
    with (
        _memory(layout_bytes(quant, layout, rows, COLS), random_pattern(quant)) as data,
        activations(quant, columns, isa) as (acts, act_bytes),
        _memory(4 * rows * columns) as out,
    ):
        weight = Weight(data, quant, layout, rows, COLS)
        best = math.inf
        for _ in range(rounds + 1):
            start = time.thread_time()
            kernel(ctypes.byref(weight), 0, rows, acts, act_bytes, columns, out, rows)
            best = min(best, time.thread_time() - start)
        return rows * COLS / best


def measure(quant: QuantType, layout: Layout, threads: int, rounds: int, isa: Isa) -> Row:
    """All rates of one kernel, and the read bandwidth at that moment."""
    l3_seconds, l3 = _rate(quant, layout, L3_BYTES, 1, threads, rounds, isa)
    reading = read_bandwidth(threads)
    dram_seconds, dram = _rate(quant, layout, DRAM_BYTES, 1, threads, rounds, isa)
    gemm_seconds, _ = _rate(quant, layout, GEMM_BYTES, GEMM_COLUMNS, threads, rounds, isa)
    rows = GEMM_BYTES // tensor_bytes(quant, 1, COLS) // 16 * 16
    operations = 2 * GEMM_COLUMNS * rows * COLS
    return Row(
        quant.name,
        layout.name,
        l3 / l3_seconds / 1e9,
        dram / dram_seconds / 1e9,
        operations / gemm_seconds / 1e9,
        reading / 1e9,
    )


def run(
    threads: int | None = None, rounds: int = 5, types: list[QuantType] | None = None
) -> list[Row]:
    """Measures every type in each layout it has, with this machine's best instruction set.

    `threads` defaults to the CPUs this process may use.
    """
    count = threads or len(os.sched_getaffinity(0))
    isa = best_isa()
    cases = [
        (quant, layout)
        for quant in types or list(QuantType)
        for layout in Layout
        if library().ds4_matmul_kernel(quant, layout, isa)
    ]
    return [measure(quant, layout, count, rounds, isa) for quant, layout in cases]
