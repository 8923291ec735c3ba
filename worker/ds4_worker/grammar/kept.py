"""Compiled grammars that are kept: an agent sends the same few again and again.

The library does not tell what a grammar holds, and that grows while it is used: automata are built
as masks need them, and shared by all copies. A grammar of one line may come to hundreds of
megabytes. So what bounds them is how much the heap of this process has grown since there was none;
what else has grown it counts, too, once, and costs no more than compiling again. Owns: that
measure, which grammars are kept, and the figures for /metrics. Least recently used ones go first,
and the newest never. Where the C library cannot tell its heap (only glibc 2.33 or newer can), their
number and texts are all that bounds them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

MOST = 64
MOST_CHARS = 1 << 20
MOST_BYTES = 256 << 20
_T = TypeVar("_T")


class GrammarStats:
    """What happened to grammars since this worker started."""

    def __init__(self) -> None:
        self.compiled = 0
        self.kept = 0
        self.evicted = 0
        self.heap_bytes = 0  # that the heap has grown by, when it was last looked at


@cache
def _mallinfo2() -> Callable[[], Any] | None:
    """The C library's function, if it has it."""
    import ctypes

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    fields = [(name, ctypes.c_size_t) for name in names.split()]
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = type("mallinfo2", (ctypes.Structure,), {"_fields_": fields})
    return found


def heap_bytes() -> int:
    """Bytes that are allocated from the C library; 0 where it does not tell. Takes up to a
    millisecond in a heap with many holes."""
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return 0
    found = mallinfo2()
    return int(found.uordblks) + int(found.hblkhd)


class Kept(Generic[_T]):
    """Grammars by their text. For one thread at a time; `in` from any."""

    def __init__(self, stats: GrammarStats, heap: Callable[[], int] = heap_bytes) -> None:
        self.stats = stats
        self._heap = heap
        self._kept: OrderedDict[str, _T] = OrderedDict()
        self._built: dict[str, int] = {}  # bytes that compiling took, of each
        self._chars = 0
        self._base = heap()  # without any of them

    def __contains__(self, source: str) -> bool:
        return source in self._kept

    def get(self, source: str, compile_it: Callable[[str], _T]) -> _T:
        """A grammar, compiled where it is not kept."""
        found = self._kept.get(source)
        if found is None:
            before = self._heap()
            found = self._kept[source] = compile_it(source)
            self._built[source] = max(0, self._heap() - before)
            self._chars += len(source)
            self.stats.compiled += 1
        self._kept.move_to_end(source)
        self._let_go()
        return found

    def _let_go(self) -> None:
        while (much := self._too_much()) and len(self._kept) > 1:
            dropped = next(iter(self._kept))
            del self._kept[dropped]  # nothing else refers to it when the heap is looked at again
            del self._built[dropped]
            self._chars -= len(dropped)
            self.stats.evicted += 1
        if much:  # and all are gone but the newest: what is left is none of theirs
            self._base += self.stats.heap_bytes - sum(self._built.values())
        self.stats.kept = len(self._kept)

    def _too_much(self) -> bool:
        now = self._heap()
        self._base = min(self._base, now - sum(self._built.values()))
        self.stats.heap_bytes = now - self._base
        return (
            len(self._kept) > MOST or self._chars > MOST_CHARS or self.stats.heap_bytes > MOST_BYTES
        )
