"""A launch, and what every device takes: sizes of grids and blocks, the same for all targets.

Owns the limits, the fold of a grid that would be too long, and the question whether a launch is
possible. Dynamic shared memory differs by device, whose driver refuses what it does not have.
"""

from __future__ import annotations

from typing import NamedTuple

Size = tuple[int, int, int]


class Launch(NamedTuple):
    grid: Size
    block: Size
    shared_bytes: int = 0  # dynamic; more than 48 KiB must be asked for (allow_dynamic_shared)


GRID_LIMITS: Size = ((1 << 31) - 1, 65535, 65535)
BLOCK_LIMITS: Size = (1024, 1024, 64)
BLOCK_THREADS = 1024


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def folded(n: int) -> tuple[int, int]:
    """Blocks in y and z for `n` of them, which may be more than y takes. The number of a block is
    ds4_block_row of weight_params.h; fewer than z blocks are too many, and numbered n or more."""
    z = ceil_div(n, GRID_LIMITS[1])
    return ceil_div(n, z), z


def excess(launch: Launch) -> str:
    """What no device would launch; "" when nothing."""
    for what, sizes, limits in (
        ("grid", launch.grid, GRID_LIMITS),
        ("block", launch.block, BLOCK_LIMITS),
    ):
        if not all(0 < size <= limit for size, limit in zip(sizes, limits, strict=True)):
            return f"a {what} of {sizes}, expected 1 to {limits}"
    x, y, z = launch.block
    if x * y * z > BLOCK_THREADS:
        return f"blocks of {x * y * z} threads, expected at most {BLOCK_THREADS}"
    return ""
