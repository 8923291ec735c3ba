"""Taking back the end of a sequence whose state runs along: the rules of native/exec_rewind.c.

Owns: what the last slice of each bank was. As long as the pages hold what that slice left, the next
one may begin inside it: the state before the slice is kept, and what its tokens added, so those
that stay are added once more. Pure; the kept floats are the executor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ds4_worker.executor.api import Slice

REWIND = 64  # native/exec.h DS4_REWIND: most tokens of a slice that can be taken back
PageAt = Callable[[int, int], int]  # the physical page of (bank, position)


class Noted(NamedTuple):
    """Of a slice: how many tokens before it are added once more, and whether its own are kept."""

    again: int
    keeps: bool


class _Last(NamedTuple):
    start: int
    tokens: int  # 0: it cannot be taken back
    pages: tuple[int, int]  # of its first and its last token


class Rewinds:
    def __init__(self, banks: int, page_tokens: int, page_at: PageAt) -> None:
        self._page_tokens, self._page_at = page_tokens, page_at
        self._most = min(REWIND, page_tokens)  # they lie in two pages at most
        self._last = [_Last(0, 0, (-1, -1))] * banks

    def possible(self, piece: Slice) -> bool:
        """Whether a slice begins inside the last one of its bank, and its pages are as that left
        them."""
        last, bank = self._last[piece.bank], piece.bank
        if not last.start < piece.start < last.start + last.tokens:
            return False
        crossed = piece.start // self._page_tokens != last.start // self._page_tokens
        return (
            self._page_at(bank, last.start) == last.pages[0]
            and self._page_at(bank, piece.start) == last.pages[crossed]
        )

    def forget(self, page: int, writer: int = -1) -> None:
        """Somebody writes the page: what other banks left in it is gone."""
        for bank, last in enumerate(self._last):
            if bank != writer and page in last.pages:
                self._last[bank] = last._replace(tokens=0)

    def note(self, slices: Sequence[Slice]) -> list[Noted]:
        """A step with these slices runs now."""
        noted = []
        for piece in slices:
            bank, count = piece.bank, len(piece.tokens)
            again = piece.start - self._last[bank].start if self.possible(piece) else 0
            end = piece.start + count - 1
            for page in self._pages(bank, piece.start, end):
                self.forget(page, bank)
            kept = count if count <= self._most else 0
            pages = self._page_at(bank, piece.start), self._page_at(bank, end)
            self._last[bank] = _Last(piece.start, kept, pages)
            noted.append(Noted(again, kept > 0))
        return noted

    def _pages(self, bank: int, start: int, end: int) -> Iterable[int]:
        size = self._page_tokens
        return (self._page_at(bank, i * size) for i in range(start // size, end // size + 1))
