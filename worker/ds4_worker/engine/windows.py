"""Pages of layers that see the last positions of a sequence only.

Owns: who holds them. A sequence takes pages ahead and gives them back behind its window, so it
never holds more than a fixed number of them, however long it grows. The page of a node of the
prefix cache (`prefix.py`) may stay after its last reader: a prompt that departs there needs it. A
node without one is a hole: a prompt can depart right behind a window without holes only (`reach`).
Pages that no prompt is likely to depart behind - a sequence slid past them - are given up first,
then the least recently used. Knows neither memory nor tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ds4_worker.engine.pages import PagePool, pages_for
from ds4_worker.engine.prefix import Node
from ds4_worker.executor.api import WindowPages


class Kept:
    """The page of a node, and how many sequences hold it."""

    __slots__ = ("holders", "page", "wanted")

    def __init__(self, page: int, holders: int) -> None:
        self.page = page
        self.holders = holders
        self.wanted = False  # a prompt may depart behind it


class Span:
    """The pages that a sequence holds: logical `first`, `first` + 1 ..."""

    __slots__ = ("first", "mapped", "nodes", "pages", "reserved")

    def __init__(self, reserved: int) -> None:
        self.first = 0
        self.pages: list[int] = []
        self.nodes: list[Node | None] = []  # whose page it is; None: the sequence's own
        self.mapped = 0  # the executor knows the pages before this logical one
        self.reserved = reserved

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def append(self, page: int, node: Node | None) -> None:
        self.pages.append(page)
        self.nodes.append(node)


class WindowHistory:
    """All pages of one window length. A sequence reserves the most it can hold: what is reserved
    never exceeds what there is, so a page can always be taken."""

    def __init__(self, window: WindowPages, page_tokens: int) -> None:
        self.pool = PagePool(window.pages)
        self.reserved = 0
        self.evicted = 0
        self._tokens = window.tokens
        self._most = window.most
        self._page_tokens = page_tokens
        self._kept: dict[Node, Kept] = {}
        self._spare: OrderedDict[Node, None] = OrderedDict()  # held by nobody, oldest first
        self._wanted: OrderedDict[Node, None] = OrderedDict()  # likewise, given up after those

    @property
    def cached(self) -> int:
        """Pages that nobody holds."""
        return len(self._spare) + len(self._wanted)

    @property
    def held(self) -> int:
        return self.pool.total - self.pool.free - self.cached

    def first_page(self, position: int) -> int:
        """The first page that a token at `position` sees."""
        return max(0, position + 1 - self._tokens) // self._page_tokens

    def page_of(self, node: Node) -> int | None:
        kept = self._kept.get(node)
        return None if kept is None else kept.page

    # --- a sequence ---------------------------------------------------------------------------

    def admit(self, positions: int) -> Span | None:
        """Reserves the pages for a sequence of that length; None when there are too few."""
        need = min(self._most, pages_for(positions, self._page_tokens))
        if self.reserved + need > self.pool.total:
            return None
        self.reserved += need
        return Span(need)

    def reach(self, span: Span, chain: Sequence[Node]) -> list[bool]:
        """Whether a sequence at the end of `span` can go on behind the first 0, 1 ... of `chain`:
        all pages that its next token sees are there."""
        present, able = len(span.pages), [True]
        for index, node in enumerate(chain, start=span.end + 1):
            present = present + 1 if node in self._kept else 0
            able.append(index - self.first_page(index * self._page_tokens) <= present)
        return able

    def follow(self, span: Span, chain: Sequence[Node], marks: Sequence[int]) -> None:
        """Moves a sequence behind the nodes of `chain`, which it can reach."""
        start = span.end
        self.slide(span, (start + len(chain)) * self._page_tokens, marks)
        for index, node in enumerate(chain, start=start):
            if index >= span.first:
                kept = self._kept[node]
                self._hold(node, kept)
                span.append(kept.page, node)

    def slide(self, span: Span, position: int, marks: Sequence[int]) -> None:
        """Gives back what a token at `position` sees no more. `marks`: positions behind which other
        prompts are likely to depart."""
        first = self.first_page(position)
        gone = min(max(0, first - span.first), len(span.pages))
        for index, page, node in zip(range(gone), span.pages, span.nodes, strict=False):
            if node is None:
                self.pool.give_back((page,))
            else:
                self._release(node, wanted=self._before(span.first + index, marks))
        del span.pages[:gone], span.nodes[:gone]
        span.first = max(first, span.first) if not span.pages else span.first + gone

    def extend(self, span: Span, position: int, positions: int, marks: Sequence[int]) -> None:
        """Has pages from what a token at `position` sees up to `positions`."""
        self.slide(span, position, marks)
        while span.end * self._page_tokens < positions:
            span.append(self.take(), None)

    def fits(self, span: Span, position: int, positions: int) -> bool:
        """Whether a sequence with a token at `position` may have pages up to `positions`: no more
        than it reserved."""
        first = max(span.first, self.first_page(position))
        return pages_for(positions, self._page_tokens) - first <= span.reserved

    def publish(self, span: Span, index: int, node: Node) -> None:
        """The sequence's page `index` is the node's now, or the node's page takes its place."""
        place = index - span.first
        kept = self._kept.get(node)
        if kept is None:
            self._kept[node] = Kept(span.pages[place], holders=1)
        else:
            self.pool.give_back((span.pages[place],))
            self._hold(node, kept)
            span.pages[place] = kept.page
            span.mapped = min(span.mapped, index)
        span.nodes[place] = node

    def end(self, span: Span, tail: Node | None) -> None:
        """The sequence reads no more. `tail`: the node that its last page was given to."""
        own = [page for page, node in zip(span.pages, span.nodes, strict=True) if node is None]
        for node in span.nodes:
            if node is not None:
                self._release(node, wanted=True)
        if tail is not None:
            self._kept[tail] = Kept(own.pop(0), holders=1)
            self._release(tail, wanted=True)
        self.pool.give_back(own)
        self.reserved -= span.reserved

    # --- nodes --------------------------------------------------------------------------------

    def take(self) -> int:
        if not self.pool.free:
            self._evict()
        return self.pool.take()

    def touch(self, node: Node) -> None:
        """The page was copied from."""
        kept = self._kept[node]
        if not kept.holders:
            self._spare.pop(node, None)
            self._wanted.pop(node, None)
            self._wanted[node] = None
        kept.wanted = True

    def forget(self, node: Node) -> None:
        """The node has left the tree; nobody holds it."""
        kept = self._kept.pop(node, None)
        if kept is not None:
            self._spare.pop(node, None)
            self._wanted.pop(node, None)
            self.pool.give_back((kept.page,))

    def _hold(self, node: Node, kept: Kept) -> None:
        if not kept.holders:
            self._spare.pop(node, None)
            self._wanted.pop(node, None)
        kept.holders += 1

    def _release(self, node: Node, *, wanted: bool) -> None:
        kept = self._kept[node]
        kept.holders -= 1
        kept.wanted = kept.wanted or wanted
        if not kept.holders:
            (self._wanted if kept.wanted else self._spare)[node] = None

    def _evict(self) -> None:
        node, _ = (self._spare or self._wanted).popitem(last=False)
        self.pool.give_back((self._kept.pop(node).page,))
        self.evicted += 1

    def _before(self, index: int, marks: Sequence[int]) -> bool:
        """Whether page `index` is seen from one of the marks."""
        return any(
            self.first_page(mark) <= index <= (mark - 1) // self._page_tokens for mark in marks
        )
