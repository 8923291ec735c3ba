"""Physical KV pages: which are free. Pure; knows neither memory nor sequences."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """A fixed number of interchangeable pages, named 0..total-1."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._held = bytearray(total)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page. Raises IndexError when there is none."""
        page = self._free.pop()
        self._held[page] = 1
        return page

    def give_back(self, pages: Iterable[int]) -> None:
        """Returns pages taken before. Raises ValueError for a page that nobody holds."""
        for page in pages:
            if not self._held[page]:
                raise ValueError(f"page {page} of {self.total} is given back but was not taken")
            self._held[page] = 0
            self._free.append(page)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_tokens)
