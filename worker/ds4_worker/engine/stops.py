"""Stops: finding the first completed pattern in a stream that arrives in pieces.

One automaton (Aho-Corasick) serves both kinds of stop: over characters for stop strings, over token
ids for stop sequences. At any moment `held` symbols at the stream's end could still become a match
and must not be shown; everything before them is settled. When several patterns complete at the same
symbol, the longest wins: it removes the most, and all of it was held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

Symbol = TypeVar("Symbol", bound=Hashable)
_MOST_KEPT = 1024  # patterns


class StopAutomaton(Generic[Symbol]):
    """The patterns of one request, compiled. Immutable; `StopState` walks it."""

    def __init__(self, patterns: Iterable[Sequence[Symbol]]) -> None:
        """Raises ValueError for an empty pattern, which would match everywhere."""
        self.next: list[dict[Symbol, int]] = [{}]
        self.depth = [0]
        self.fail = [0]
        self.match = [0]  # length of the longest pattern that ends at this node, 0 for none
        self._single = 0  # the one node of all single symbols that begin nothing longer
        for pattern in sorted(patterns, key=len, reverse=True):
            self._insert(pattern)
        self._link()

    def _insert(self, pattern: Sequence[Symbol]) -> None:
        if not pattern:
            raise ValueError("a stop pattern must not be empty")
        if len(pattern) == 1 and pattern[0] not in self.next[0]:
            # A request may name every id of the vocabulary: they end alike.
            self._single = self._single or self._add_node(1, match=1)
            self.next[0][pattern[0]] = self._single
            return
        node = 0
        for symbol in pattern:
            child = self.next[node].get(symbol)
            if child is None:
                child = self._add_node(self.depth[node] + 1)
                self.next[node][symbol] = child
            node = child
        self.match[node] = len(pattern)

    def _add_node(self, depth: int, match: int = 0) -> int:
        self.next.append({})
        self.depth.append(depth)
        self.fail.append(0)
        self.match.append(match)
        return len(self.next) - 1

    def _link(self) -> None:
        """Breadth first, so that every shorter suffix is linked before it is needed."""
        queue = deque(dict.fromkeys(self.next[0].values()))
        while queue:
            node = queue.popleft()
            for symbol, child in self.next[node].items():
                self.fail[child] = self.step(self.fail[node], symbol)
                self.match[child] = self.match[child] or self.match[self.fail[child]]
                queue.append(child)

    def step(self, node: int, symbol: Symbol) -> int:
        """The node of the longest pattern prefix that ends the stream after `symbol`."""
        while node and symbol not in self.next[node]:
            node = self.fail[node]
        return self.next[node].get(symbol, 0)


@lru_cache(maxsize=32)
def compile_strings(patterns: tuple[str, ...]) -> StopAutomaton[str]:
    """Cached: the choices of one request, and often all requests of a client, share their stops."""
    return StopAutomaton(patterns)


def compile_sequences(patterns: tuple[tuple[int, ...], ...]) -> StopAutomaton[int]:
    """As `compile_strings`; a great many are not kept."""
    if len(patterns) > _MOST_KEPT:
        return StopAutomaton(patterns)
    return _compile_sequences(patterns)


@lru_cache(maxsize=32)
def _compile_sequences(patterns: tuple[tuple[int, ...], ...]) -> StopAutomaton[int]:
    return StopAutomaton(patterns)


class StopState(Generic[Symbol]):
    """One stream's position in an automaton."""

    __slots__ = ("_automaton", "_node")

    def __init__(self, automaton: StopAutomaton[Symbol]) -> None:
        self._automaton = automaton
        self._node = 0

    @property
    def held(self) -> int:
        """Symbols at the end of the stream that may still become part of a match."""
        return self._automaton.depth[self._node]

    def push(self, symbol: Symbol) -> int:
        """Advances by one symbol; length of the match that it completes, or 0."""
        self._node = self._automaton.step(self._node, symbol)
        return self._automaton.match[self._node]


class TextStop:
    """Stop strings over text that arrives in arbitrary pieces."""

    __slots__ = ("_pending", "_state", "matched")

    def __init__(self, automaton: StopAutomaton[str]) -> None:
        self._state = StopState(automaton)
        self._pending = ""
        self.matched: str | None = None  # the stop string, once it has completed

    def push(self, text: str) -> str:
        """The text that is settled by now. After a match nothing more is: the rest is cut."""
        if self.matched is not None:
            return ""
        offset = len(self._pending)
        stream = self._pending + text
        for index, symbol in enumerate(text, start=offset + 1):
            length = self._state.push(symbol)
            if length:
                self.matched = stream[index - length : index]
                self._pending = ""
                return stream[: index - length]
        cut = len(stream) - self._state.held
        self._pending = stream[cut:]
        return stream[:cut]

    def flush(self) -> str:
        """What was held back and will not become a match any more."""
        rest, self._pending = self._pending, ""
        return rest
