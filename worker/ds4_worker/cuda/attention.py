"""Launches of attention: tiles of rows, parts of positions, and the memory for the states of parts.

Owns how attend.h and attend_rows.cu cut their work; the heads of these files say what they compute.
"""

from __future__ import annotations

from ds4_worker.cuda.limits import Launch, ceil_div
from ds4_worker.cuda.parameters import Attend, AttendRows

MOST_SPLITS = 32  # blocks that share the parts of a tile
ROW_PART = 64  # rows of a part of attend_rows
ATTEND_ROWS = 16  # of a tile


def part_tokens(page_tokens: int) -> int:
    """Positions of one part of an attention: ds4_part_tokens of native/attention.h."""
    return page_tokens * (256 // page_tokens if page_tokens < 256 else 1)


def attend_tile(group: int, tokens: int) -> tuple[int, int]:
    """(tile_tokens, tile_heads) for query heads per kv head and tokens that follow each other in
    a bank: 1 when decoding."""
    heads = min(group, ATTEND_ROWS)
    return max(1, min(tokens, ATTEND_ROWS // heads)), heads


def attend_shared_bytes(p: Attend, whole: bool) -> int:
    width = ceil_div(p.cache.value_dim, 8) * 8 if whole else 0
    return int(4 * ATTEND_ROWS * (p.cache.dim + p.part_tokens + 4 + width))


def attend_part_bytes(p: Attend) -> int:
    """Bytes at `parts`: the states of all parts of all rows."""
    state = 2 + ceil_div(p.cache.value_dim, 8) * 8
    return int(4 * p.tokens * p.heads * p.most_parts * state)


def _blocks(p: Attend) -> tuple[int, int]:
    group = p.heads // p.cache.kv_heads
    return p.cache.kv_heads * ceil_div(group, p.tile_heads), ceil_div(p.tokens, p.tile_tokens)


def attend_whole_launch(p: Attend) -> Launch:
    return Launch((*_blocks(p), 1), (256, 1, 1), attend_shared_bytes(p, whole=True))


def attend_parts_launch(p: Attend) -> Launch:
    """Each of at most 32 blocks per tile goes over every 32nd part."""
    splits = min(p.most_parts, MOST_SPLITS)
    return Launch((*_blocks(p), splits), (256, 1, 1), attend_shared_bytes(p, whole=False))


def attend_fold_launch(p: Attend) -> Launch:
    return Launch((p.heads, p.tokens, 1), (128, 1, 1))


# ---- over rows ---------------------------------------------------------------------------------


def attend_rows_launch(p: AttendRows) -> Launch:
    shared = 4 * ATTEND_ROWS * (2 * p.recent.dim + ROW_PART + 4)
    return Launch((ceil_div(p.heads, ATTEND_ROWS), p.tokens, 1), (256, 1, 1), shared)


def attend_rows_parts_launch(p: AttendRows) -> Launch:
    """As `attend_parts_launch`."""
    splits = min(p.most_parts, MOST_SPLITS)
    shared = 4 * ATTEND_ROWS * (p.recent.dim + ROW_PART + 4)
    return Launch((ceil_div(p.heads, ATTEND_ROWS), p.tokens, splits), (256, 1, 1), shared)


def attend_rows_fold_launch(p: AttendRows) -> Launch:
    return Launch((p.heads, p.tokens, 1), (128, 1, 1))
