"""Launches of products with few columns: how warps share rows, and how far ahead they read.

Owns the cut of matvec.h, floats.cu and value_heads.cu: rows of a warp, stages of its ring in shared
memory, and that memory's size; and which layouts of weights there are. The heads of these files say
what they compute.
"""

from __future__ import annotations

from ds4_common.quants import QuantType, block_bytes, block_weights
from ds4_worker.cuda.limits import Launch, ceil_div, folded
from ds4_worker.cuda.parameters import Matvec

_GRID_BYTES = {16: 2048, 17: 4096, 22: 8192, 19: 16384, 29: 16384, 18: 1024, 21: 2048}
_WITH_MINIMUM = frozenset((3, 7, 10, 12, 13, 40))  # two FMAs per block, or a scale per sixteen
FLOAT_TYPES = (0, 1, 30)
ARTIFACT_LAYOUTS = {4: 16, 5: 8, 6: 10, 8: 17}  # layout -> ggml type
VALUE_HEADS = 7  # the layout of Q8_0 value heads: matvec_experts alone, with a matrix per head


_MOST_STAGES, _SHARED_GOAL = 4, 48 << 10  # so that four blocks fit a multiprocessor
_BLOCKS_GOAL = 256  # about two for each multiprocessor of the largest device
# Bytes of a block in the runs of an artifact's line (matvec.h), and the rows that share a line.
_RUNS = {4: ((64, 2), 1), 5: ((32, 2), 1), 6: ((144, 8, 32), 2), 8: ((64, 2, 8), 1)}


def _ring_bytes(ggml_type: int, layout: int) -> int:
    """Of one chunk of a warp's rows in shared memory."""
    if ggml_type in FLOAT_TYPES:
        return 4 * (_run_room(1024) + 32)
    blocks = _chunk_steps(ggml_type) * 1024 // block_weights(QuantType(ggml_type))
    runs, line_rows = _RUNS.get(layout, ((block_bytes(QuantType(ggml_type)),), 1))
    return 4 // line_rows * sum(_run_room(blocks * n_bytes) for n_bytes in runs)


def _run_room(n_bytes: int) -> int:
    return ceil_div(n_bytes, 16) * 16 + 16


def _chunk_steps(ggml_type: int) -> int:
    weights, n_bytes = block_weights(QuantType(ggml_type)), block_bytes(QuantType(ggml_type))
    return 2 if n_bytes * 1024 // weights <= (600 if weights == 256 else 300) else 1


def matvec_shared_bytes(ggml_type: int, layout: int, columns: int, stages: int) -> int:
    """Dynamic shared memory of the matvec kernels for at most `columns` (1 to 8) per block."""
    if layout == VALUE_HEADS:
        return 0
    ring = stages * _ring_bytes(ggml_type, layout)
    if ggml_type in FLOAT_TYPES:
        return 4 * ring
    small = block_weights(QuantType(ggml_type)) != 256
    terms = (32 if small else 4) * _chunk_steps(ggml_type)
    terms = terms * (2 if ggml_type in _WITH_MINIMUM else 1) + 1
    return _GRID_BYTES.get(ggml_type, 0) + 4 * (ring + ceil_div(4 * columns * terms * 8, 16) * 16)


def _cut(p: Matvec, ggml_type: int, layout: int, columns: int, matrices: int) -> tuple[int, int]:
    """Decides how warps share the rows and how far they read ahead, and writes it down in `p`:
    (blocks of rows, shared bytes)."""
    least = 2 if layout == 6 else 1  # of a pair
    rows = [p.rows, *(more for more in p.more_rows if more)]

    def blocks() -> int:
        return sum(ceil_div(n, 4 * p.warp_rows) for n in rows)

    p.warp_rows = 4
    while p.warp_rows > least and blocks() * matrices < _BLOCKS_GOAL:
        p.warp_rows //= 2
    sizes = {
        stages: matvec_shared_bytes(ggml_type, layout, columns, stages)
        for stages in range(2, _MOST_STAGES + 1)
    }
    p.stages = max((stages for stages, size in sizes.items() if size <= _SHARED_GOAL), default=2)
    return blocks(), sizes[p.stages]


def matvec_launch(p: Matvec, ggml_type: int, layout: int = 0) -> Launch:
    """Sets `warp_rows` and `stages`."""
    blocks, shared = _cut(p, ggml_type, layout, min(p.columns, 8), 1)
    return Launch((ceil_div(p.columns, 8), *folded(blocks)), (128, 1, 1), shared)


def matvec_experts_launch(p: Matvec, ggml_type: int, layout: int = 0) -> Launch:
    """Sets `warp_rows` and `stages`."""
    pairs = p.columns * p.used
    blocks, shared = _cut(p, ggml_type, layout, 1, pairs)
    if layout == VALUE_HEADS:
        blocks = ceil_div(p.rows, 128)
    return Launch((blocks, *folded(pairs)), (128, 1, 1), shared)
