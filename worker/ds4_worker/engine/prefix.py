"""Pages of the KV cache that outlive their sequence, found again by the tokens they hold.

Owns: a tree whose nodes are pages. A node's path from the root spells the tokens from position 0 to
the end of its page, so equal prefixes meet in the same nodes. Whole pages are immutable and shared:
a sequence holds every node of its path and reads their pages. A page with fewer tokens is a leaf
that nobody holds; it can only be copied from. Nodes that nobody holds count as free: the least
recently used leaf gives its page away when one is needed. Pure; knows neither memory nor sequences.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter

from ds4_worker.engine.pages import PagePool

Tokens = tuple[int, ...]
_TOKENS = attrgetter("tokens")
_SPARE_ENTRIES = 64  # outdated entries that the eviction queue may hold beside one per node


class Node:
    """One page of tokens after those of its ancestors. `page` is -1 for the root, which is its own
    parent, and once evicted."""

    __slots__ = ("children", "holders", "page", "parent", "stamp", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, page: int) -> None:
        self.parent = self if parent is None else parent
        self.tokens = tokens
        self.page = page
        self.children: list[Node] = []  # sorted by tokens
        self.holders = 0  # sequences whose path it is on
        self.stamp = 0  # when it was last used


class PrefixCache:
    """The tree over the pages of a pool. Every page of a node is taken from the pool. `left` hears
    of nodes that leave the tree."""

    def __init__(
        self, pool: PagePool, page_tokens: int, left: Callable[[Node], None] | None = None
    ) -> None:
        self.pool = pool
        self.root = Node(None, (), -1)
        self.unheld = 0  # nodes that can be evicted, leaves first
        self.evicted = 0  # pages, since the beginning
        self._page_tokens = page_tokens
        self._left = left
        self._nodes = 0
        self._clock = 0
        self._queue: list[tuple[int, int, Node]] = []  # (stamp, serial, leaf), some outdated
        self._serial = count()

    @property
    def available(self) -> int:
        """Pages that `take` could give."""
        return self.pool.free + self.unheld

    def take(self) -> int:
        """A page for tokens still to be computed. Raises IndexError when `available` is 0."""
        if not self.pool.free:
            self._evict()
        return self.pool.take()

    # --- looking up -------------------------------------------------------------------------

    def child(self, node: Node, tokens: Tokens) -> Node | None:
        """The page that holds exactly `tokens` after `node`."""
        place = bisect_left(node.children, tokens, key=_TOKENS)
        if place < len(node.children) and node.children[place].tokens == tokens:
            return node.children[place]
        return None

    def nearest(self, node: Node, tokens: Sequence[int]) -> tuple[Node, int] | None:
        """The page after `node` that begins with the most of `tokens`, and how many that is."""
        wanted = tuple(tokens[: self._page_tokens])
        place = bisect_left(node.children, wanted, key=_TOKENS)
        best, most = None, 0
        for other in node.children[max(0, place - 1) : place + 1]:  # neighbours share the most
            shared = common_length(other.tokens, wanted)
            if shared > most:
                best, most = other, shared
        return None if best is None else (best, most)

    # --- holding ----------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        """One more sequence reads this page; it must hold the node's ancestors already."""
        if node.holders == 0:
            self.unheld -= 1
        node.holders += 1

    def release(self, node: Node) -> None:
        """A sequence whose path ends at `node` reads its pages no more."""
        self._clock += 1
        while node is not self.root:
            node.holders -= 1
            node.stamp = self._clock
            if node.holders == 0:
                self.unheld += 1
                self._offer(node)
            node = node.parent

    def touch(self, node: Node) -> None:
        """The page was copied from."""
        self._clock += 1
        node.stamp = self._clock
        self._offer(node)

    # --- keeping ----------------------------------------------------------------------------

    def publish(self, parent: Node, tokens: Tokens, page: int) -> Node:
        """Makes a whole page that a sequence has computed findable; the sequence holds the node.

        When another sequence has published the same tokens, the node is that one's and `page` is
        free again: the caller reads the node's page from now on."""
        node = self.child(parent, tokens)
        if node is None:
            node = self._insert(parent, tokens, page)
            node.holders = 1
            self.unheld -= 1
            self._forget_beginning(parent, tokens)
        else:
            self.pool.give_back((page,))
            self.hold(node)
        return node

    def publish_tail(self, parent: Node, tokens: Tokens, page: int) -> Node | None:
        """Keeps the last page of a sequence, which is not full, as the node returned; gives it back
        where another page begins with the same tokens."""
        near = self.nearest(parent, tokens)
        if near is not None and near[1] == len(tokens):
            self.pool.give_back((page,))
            self.touch(near[0])
            return None
        self._forget_beginning(parent, tokens)
        node = self._insert(parent, tokens, page)
        self._clock += 1
        node.stamp = self._clock
        self._offer(node)
        return node

    def clear(self) -> None:
        """Evicts everything that nobody holds."""
        while self.unheld:
            self._evict()

    # --- inside -----------------------------------------------------------------------------

    def _insert(self, parent: Node, tokens: Tokens, page: int) -> Node:
        node = Node(parent, tokens, page)
        place = bisect_left(parent.children, tokens, key=_TOKENS)
        parent.children.insert(place, node)
        self._nodes += 1
        self.unheld += 1
        return node

    def _forget_beginning(self, parent: Node, tokens: Tokens) -> None:
        """A tail that is a beginning of `tokens` adds nothing any more. There is at most one, right
        before them, because no tail is ever a beginning of a page beside it."""
        place = bisect_left(parent.children, tokens, key=_TOKENS)
        if place > 0:
            tail = parent.children[place - 1]
            if tail.tokens == tokens[: len(tail.tokens)]:
                self._remove(tail)

    def _offer(self, node: Node) -> None:
        """Queues a leaf for eviction; its earlier entries, of other stamps, are outdated."""
        if node.holders or node.children:
            return
        heapq.heappush(self._queue, (node.stamp, next(self._serial), node))
        if len(self._queue) > 2 * self._nodes + _SPARE_ENTRIES:
            self._queue = [entry for entry in self._queue if _is_current(entry)]
            heapq.heapify(self._queue)

    def _evict(self) -> None:
        while True:
            entry = heapq.heappop(self._queue)
            if _is_current(entry):
                break
        self.evicted += 1
        self._remove(entry[2])

    def _remove(self, node: Node) -> None:
        parent = node.parent
        parent.children.remove(node)
        self.pool.give_back((node.page,))
        node.page = -1
        if self._left is not None:
            self._left(node)
        self._nodes -= 1
        self.unheld -= 1
        if parent is not self.root:
            self._offer(parent)


def _is_current(entry: tuple[int, int, Node]) -> bool:
    stamp, _, node = entry
    return node.page >= 0 and node.stamp == stamp and not node.holders and not node.children


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading elements are equal."""
    shared = 0
    for ours, theirs in zip(left, right, strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared
