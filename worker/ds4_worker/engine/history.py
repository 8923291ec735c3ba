"""The tokens of one sequence, and what followed when its end occurred in it before.

Owns: the ctypes face of native/history.h and the memory of one index. Knows nothing of models: the
draft that it finds is a guess, whose worth the caller learns.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from array import array
from collections.abc import Callable, Iterable

from ds4_common.native import lib

MOST_MATCH = 64  # native/history.h DS4_HISTORY_MATCH


@functools.cache
def _functions() -> tuple[ctypes.CDLL, Callable[..., int]]:
    library = lib.load()
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    library.ds4_history_bytes.argtypes = [u32]
    library.ds4_history_bytes.restype = ctypes.c_uint64
    library.ds4_history_init.argtypes, library.ds4_history_init.restype = [pointer, u32], None
    propose = library.ds4_history_propose
    propose.argtypes, propose.restype = [pointer, pointer, u32, pointer, u32, pointer], u32
    return library, propose


class History:
    """Holds at most `capacity` tokens; those beyond it are dropped. Its memory is touched as it
    fills, and given back with the object."""

    __slots__ = ("_address", "_draft", "_draft_address", "_matched", "_memory", "_propose")

    def __init__(self, capacity: int, most_drafts: int) -> None:
        library, self._propose = _functions()
        self._memory = mmap.mmap(-1, library.ds4_history_bytes(capacity))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        library.ds4_history_init(self._address, capacity)
        self._draft = array("i", bytes(4 * most_drafts))
        self._draft_address = self._draft.buffer_info()[0]
        self._matched = ctypes.c_uint32()

    def propose(self, new: Iterable[int], wanted: int) -> tuple[list[int], int]:
        """Takes the tokens that have come, then drafts the next `wanted`, or none; and how many
        tokens before them had occurred before."""
        tokens = array("i", new)
        address, count = tokens.buffer_info()
        found = self._propose(
            self._address,
            address,
            count,
            self._draft_address,
            min(wanted, len(self._draft)),
            ctypes.addressof(self._matched),
        )
        return self._draft[:found].tolist(), self._matched.value
