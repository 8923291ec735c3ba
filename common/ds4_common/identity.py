"""Who a model is: content fingerprint, file state, full hash.

Owns: `fnv1a-p16m-v1` (the published sampled fingerprint: a mix-up detector, not tamper-proof),
standard FNV-1a for `--repack-hash`, and the 128-bit hash of a range; the state of a file is in
shard_stat.py. Refuses nothing by itself: callers compare and raise IdentityError.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Protocol

import xxhash

from ds4_common.native import lib
from ds4_common.shard_stat import ShardStat as ShardStat

FINGERPRINT_ALGORITHM = "fnv1a-p16m-v1"
_FINGERPRINT_BASIS = 1469598103934665603  # the standard basis without its last digit, as published
_FNV_BASIS = 14695981039346656037
_EDGE_BYTES = 4 << 20
_SAMPLE_STRIDE = 16 << 20
_SAMPLE_BYTES = 4096


class LogicalBytes(Protocol):
    """What is fingerprinted: a LogicalModel, or anything that reads like one."""

    @property
    def n_bytes(self) -> int: ...

    def read_into(self, offset: int, buffer: memoryview) -> None: ...


@functools.cache
def _fnv() -> Callable[..., int]:
    function = lib.load().ds4_fnv1a64
    function.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_uint64
    return function


def fnv1a64(data: bytes | bytearray | memoryview, basis: int = _FNV_BASIS) -> int:
    """FNV-1a over `data`; pass the result back as `basis` to go on. A view must be writable."""
    if isinstance(data, bytes):
        return _fnv()(basis, data, len(data))
    view = memoryview(data).cast("B")
    if not view.nbytes:
        return basis
    return _fnv()(basis, ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes)


def fingerprint(model: LogicalBytes) -> str:
    """`fnv1a-p16m-v1` of the logical bytes, as 16 hex digits."""
    size = model.n_bytes
    state = fnv1a64(size.to_bytes(8, "little"), _FINGERPRINT_BASIS)
    scratch = bytearray(min(size, _EDGE_BYTES))
    for offset, n_bytes in _sampled(size):
        view = memoryview(scratch)[:n_bytes]
        model.read_into(offset, view)
        state = fnv1a64(view, state)
    return f"{state:016x}"


def _sampled(size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of every piece that the fingerprint looks at, in order."""
    if size <= 2 * _EDGE_BYTES:
        return [(o, min(_EDGE_BYTES, size - o)) for o in range(0, size, _EDGE_BYTES)]
    last = size - _EDGE_BYTES
    samples = range(_SAMPLE_STRIDE, last - _SAMPLE_BYTES + 1, _SAMPLE_STRIDE)
    return [(0, _EDGE_BYTES), *((o, _SAMPLE_BYTES) for o in samples), (last, _EDGE_BYTES)]


class RangeHasher:
    """XXH3-128 over a range as it streams by."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._state.update(data)

    def hexdigest(self) -> str:
        """32 hex digits."""
        return self._state.hexdigest()
