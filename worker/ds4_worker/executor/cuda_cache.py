"""The KV cache of a CUDA executor: which pages there are, and what lies where in a page.

Owns: histories and planes as native/exec_open.c has them, byte for byte, by arithmetic alone.
"""

from __future__ import annotations

import msgspec

from ds4_common.contract import image as im
from ds4_common.errors import ExecutorFailure, UnsupportedModel
from ds4_worker.cuda.kernels import KV_TYPES
from ds4_worker.executor.api import ExecutorConfig, WindowPages

MOST_HISTORIES = 4  # native/exec.h
KV_BLOCK = 32  # dims that share a scale in q8_0
_CODE_BYTES = (2, 4, 2, 1)
_Q8_0 = 3  # native/kv.h
_ALIGN = 256


class CacheLayout(msgspec.Struct, frozen=True):
    """Histories as native/exec_open.c makes them: the first keeps all positions, each further one
    the last `tokens` only."""

    histories: tuple[WindowPages, ...]
    bases: tuple[int, ...]  # where each history's pages begin in block "cache"
    planes: tuple[tuple[int, int], ...]  # history of each plane, and where it begins in a page
    n_bytes: int


class Arena:
    """Grows a block by aligned pieces."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def take(self, n_bytes: int) -> int:
        """The piece's offset."""
        offset = self.n_bytes
        self.n_bytes += -(-n_bytes // _ALIGN) * _ALIGN
        return offset


def kv_type(name: str) -> int:
    """The number of a cache type. Raises ExecutorFailure."""
    if name not in KV_TYPES:
        raise ExecutorFailure(f"executor config kv_dtype: got {name!r}, expected {list(KV_TYPES)}")
    return KV_TYPES.index(name)


def tile_bytes(kv_type: int, width: int, page_tokens: int) -> int:
    """Of one head's vectors in a page."""
    scales = width // KV_BLOCK * 2 if kv_type == _Q8_0 else 0
    return page_tokens * (width * _CODE_BYTES[kv_type] + scales)


def cache_layout(image: im.Image, config: ExecutorConfig, kv_type: int) -> CacheLayout:
    """Plane after plane in the pages of its history. Raises ExecutorFailure for more lengths of
    windows than the engine counts pages for."""
    windows, strides = [0], [0]
    planes = []
    for number, plane in enumerate(image.planes):
        window = plane.window if plane.window < config.context_tokens else 0
        if window not in windows:
            windows.append(window)
            strides.append(0)
        history = windows.index(window)
        planes.append((history, strides[history]))
        n_bytes = _plane_bytes(number, plane, image.page_tokens, kv_type)
        strides[history] += -(-n_bytes // 64) * 64
    if len(windows) > MOST_HISTORIES:
        raise ExecutorFailure(
            f"windows: got {len(windows) - 1} lengths, expected at most {MOST_HISTORIES - 1}"
        )
    arena, histories, bases = Arena(), [], []
    for window, stride in zip(windows, strides, strict=True):
        histories.append(_history(image.page_tokens, config, window, stride))
        bases.append(arena.take(stride * histories[-1].pages))
    return CacheLayout(tuple(histories), tuple(bases), tuple(planes), arena.n_bytes)


def _history(page_tokens: int, config: ExecutorConfig, window: int, stride: int) -> WindowPages:
    """Pages of a window: what all banks can hold at once, and as many again for windows that are
    kept for prompts to come."""
    most = -(-config.context_tokens // page_tokens)
    pages = config.pages or most * config.banks
    if window:
        most = min(most, (window + config.batch_tokens + page_tokens - 3) // page_tokens + 1)
        pages = min(pages, 2 * config.banks * most)
    return WindowPages(window, pages, most, stride)


def _plane_bytes(number: int, plane: im.Plane, page_tokens: int, kv_type: int) -> int:
    """Of a plane in one page: native/exec_open.c."""
    if plane.kind == im.PLANE_STATE:
        return plane.kv_heads * plane.dim * 4
    if plane.kind in (im.PLANE_ROWS, im.PLANE_TILES):
        return page_tokens // plane.ratio * plane.dim * 2
    for what, dims in (("keys", plane.dim), ("values", plane.value_dim)):
        if kv_type == _Q8_0 and dims % KV_BLOCK:
            raise UnsupportedModel(
                f"KV cache in q8_0: {what} of cache plane {number} have {dims} dims, expected a"
                f" multiple of {KV_BLOCK}; use f16, bf16 or f32"
            )
    tiles = tile_bytes(kv_type, -(-plane.value_dim // 8) * 8, page_tokens)
    if plane.kind == im.PLANE_KV:  # of a latent, values are keys
        tiles += tile_bytes(kv_type, plane.dim, page_tokens)
    return plane.kv_heads * tiles
