"""The KV pages of running sequences: found in the prefix cache, copied, taken, published.

Owns: the promise of admission. A sequence enters when every page it can ever need is free, cached
without a reader, or shared with one that runs; it takes them only as it grows. So a running
sequence never waits for a page, nothing is ever preempted, and cached pages live until the memory
is really needed.

A whole page is published when its last token has been computed, so prompts that begin alike share
it even while both run. The rest of a sequence's last page is published at its end. A new prompt
adopts whole pages and copies the beginning of the page at which it departs; it computes at least
its last token, whose logits are wanted. Which pages are found decides how much is computed, never
what comes out: a position's keys and values depend on the tokens up to it alone. Where pages hold
state that only runs forward, it is that of a page's last token: such a page is adopted whole, or
copied with every token it holds, never with fewer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ds4_worker.engine.pages import PagePool, pages_for
from ds4_worker.engine.prefix import Node, PrefixCache
from ds4_worker.engine.windows import Span, WindowHistory
from ds4_worker.executor.api import WindowPages

Copy = tuple[int, int, int, int]  # source page, target page, tokens, history
TokenRange = Callable[[int, int], tuple[int, ...]]  # the tokens of positions [start, stop)


class Holding:
    """The pages of one running sequence: its path in the cache, then its own; and of each window
    the pages that it has not left yet."""

    __slots__ = ("full_at", "mapped", "marks", "node", "pages", "promised", "shared", "spans")

    def __init__(self, root: Node, full_at: int, spans: list[Span]) -> None:
        self.node = root  # where the path ends
        self.shared = 0  # pages of the path
        self.pages: list[int] = []
        self.mapped = 0  # pages that the executor knows
        self.promised = 0  # pages it may still take
        self.full_at = full_at  # positions that complete the first page after the path
        self.spans = spans
        self.marks: list[int] = []  # positions behind which other prompts are likely to depart


class Memory:
    """All pages of an executor. `reuse` False: nothing is published and nothing found. `divisible`
    False: a page goes on only where it ends."""

    def __init__(
        self,
        pages: int,
        page_tokens: int,
        *,
        reuse: bool,
        divisible: bool = True,
        windows: Sequence[WindowPages] = (),
    ) -> None:
        self.pool = PagePool(pages)
        self.windows = [WindowHistory(window, page_tokens) for window in windows]
        self.cache = PrefixCache(self.pool, page_tokens, self._forget)
        self.page_tokens = page_tokens
        self._reuse = reuse
        self._divisible = divisible
        self._promised = 0

    @property
    def held(self) -> int:
        """Pages that running sequences read or write."""
        return self.pool.total - self.cache.available

    def admit(self, prompt: Sequence[int], positions: int, *, reuse: bool) -> Holding | None:
        """Promises the pages for `positions`, less those found now; None when that cannot be."""
        spans: list[Span] = []
        for window in self.windows:
            span = window.admit(positions)
            if span is None:
                self._end_spans(spans)
                return None
            spans.append(span)
        holding = Holding(self.cache.root, self.page_tokens if self._reuse else sys.maxsize, spans)
        found = self._walk(holding, prompt) if reuse else 0
        promised = pages_for(positions, self.page_tokens) - found
        if self._promised + promised > self.cache.available:
            self._end_spans(spans)
            self.cache.release(holding.node)
            return None
        holding.marks.append(len(prompt))
        holding.promised = promised
        self._promised += promised
        return holding

    # --- a prompt ---------------------------------------------------------------------------

    def adopt(self, holding: Holding, prompt: Sequence[int]) -> None:
        """Lengthens the path by the whole pages of the prompt that have been published."""
        found = self._walk(holding, prompt)
        holding.promised -= found
        self._promised -= found

    def next_page(self, holding: Holding, prompt: Sequence[int]) -> tuple[int, ...] | None:
        """The tokens of the first whole page after the path; None when the prompt ends before."""
        end = holding.full_at
        return tuple(prompt[end - self.page_tokens : end]) if end < len(prompt) else None

    def branch(self, holding: Holding, prompt: Sequence[int]) -> tuple[int, list[Copy]]:
        """Finds the page that shares most tokens after the path: how many that are, and the copies
        to make, into pages of the sequence's own."""
        start = holding.shared * self.page_tokens
        near = self.cache.nearest(holding.node, prompt[start : len(prompt) - 1][: self.page_tokens])
        if near is None:
            return 0, []
        source, tokens = near
        if tokens < len(source.tokens) and not self._divisible:
            return 0, []
        sources = [window.page_of(source) for window in self.windows]
        copies = []
        for number, page in enumerate(sources, start=1):
            if page is None:
                return 0, []
            copies.append((page, -1, tokens, number))
        copies.append((source.page, -1, tokens, 0))
        # Touched, the source is the last one to be given up for the page that it is copied to.
        for window, span in zip(self.windows, holding.spans, strict=True):
            window.touch(source)
            span.append(window.take(), None)
        self.cache.touch(source)
        self._take(holding)
        targets = [*(span.pages[-1] for span in holding.spans), holding.pages[-1]]
        made = zip(copies, targets, strict=True)
        return tokens, [(page, to, n, number) for (page, _, n, number), to in made if page != to]

    def _walk(self, holding: Holding, prompt: Sequence[int]) -> int:
        """Lengthens the path as far as the cache knows the prompt and no window has a hole."""
        chain: list[Node] = []
        node, end = holding.node, holding.full_at
        while end < len(prompt):
            child = self.cache.child(node, tuple(prompt[end - self.page_tokens : end]))
            if child is None:
                break
            chain.append(child)
            node, end = child, end + self.page_tokens
        if not chain:
            return 0
        found = len(chain)
        if self.windows:
            if not holding.marks:  # here the prompt departs from those before
                holding.marks.append(end - self.page_tokens)
            able = [w.reach(s, chain) for w, s in zip(self.windows, holding.spans, strict=True)]
            while not all(reached[found] for reached in able):
                found -= 1
        for child in chain[:found]:
            self.cache.hold(child)
            holding.pages.append(child.page)
            self._lengthen(holding, child)
        for window, span in zip(self.windows, holding.spans, strict=True):
            window.follow(span, chain[:found], holding.marks)
        return found

    def _lengthen(self, holding: Holding, node: Node) -> None:
        holding.node = node
        holding.shared += 1
        holding.full_at += self.page_tokens

    # --- growing and ending -----------------------------------------------------------------

    def extend(self, holding: Holding, start: int, positions: int) -> None:
        """Takes pages until `positions` fit, for tokens from `start` on."""
        for window, span in zip(self.windows, holding.spans, strict=True):
            window.extend(span, start, positions, holding.marks)
        while len(holding.pages) * self.page_tokens < positions:
            self._take(holding)

    def fits(self, holding: Holding, start: int, positions: int) -> bool:
        """Whether `extend` may take pages for `positions`: of a window no more than reserved."""
        pairs = zip(self.windows, holding.spans, strict=True)
        return all(window.fits(span, start, positions) for window, span in pairs)

    def publish(self, holding: Holding, ids: TokenRange, positions: int) -> None:
        """Makes the pages findable that `positions` computed tokens have completed."""
        while holding.full_at <= positions:
            index, end = holding.shared, holding.full_at
            tokens = ids(end - self.page_tokens, end)
            node = self.cache.publish(holding.node, tokens, holding.pages[index])
            if node.page != holding.pages[index]:
                holding.pages[index] = node.page
                holding.mapped = min(holding.mapped, index)
            for window, span in zip(self.windows, holding.spans, strict=True):
                window.publish(span, index, node)
            self._lengthen(holding, node)

    def end(self, holding: Holding, tail: tuple[int, ...] = ()) -> None:
        """The sequence reads no more. `tail`: tokens of the first page after the path, to keep."""
        own = holding.pages[holding.shared :]
        kept = None
        if tail:
            kept = self.cache.publish_tail(holding.node, tail, own.pop(0))
        self._end_spans(holding.spans, kept)
        self.pool.give_back(own)
        self.cache.release(holding.node)
        self._promised -= holding.promised

    def _end_spans(self, spans: list[Span], tail: Node | None = None) -> None:
        for window, span in zip(self.windows, spans, strict=False):
            window.end(span, tail)

    def _forget(self, node: Node) -> None:
        for window in self.windows:
            window.forget(node)

    def _take(self, holding: Holding) -> None:
        holding.pages.append(self.cache.take())
        holding.promised -= 1
        self._promised -= 1
