"""The exact text in which the model wrote its tool calls, by call id.

A client sends a call back as a name and arguments. Rendered anew it may differ from what the model
wrote - a space, an escape, the order of two keys - and everything behind it would have to be
computed again. So the next turn renders what was sampled.

Owns: the memory, its bounds (ids, bytes; the least recently used go first) and its ids, which
nobody can guess.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

MAX_IDS = 100_000
MAX_BYTES = 512 << 20


class Block(msgspec.Struct, frozen=True, eq=False):
    """Consecutive calls of one answer, as sampled: first opener to last closer.

    `space` is the whitespace before them. It follows visible text if `after_text`; else the answer
    began with it.
    """

    text: str
    space: str = ""
    after_text: bool = False

    @property
    def n_bytes(self) -> int:
        return len(self.text.encode()) + len(self.space)


def sampled_block(answer: str, calls: str, *, after_text: bool) -> Block:
    """The block of `calls` in an answer as sampled, delimiters included. Whitespace between
    reasoning and calls stays the template's: it writes the reasoning too, or leaves it out."""
    begin = max(answer.find(calls), 0)
    before = answer[:begin].rstrip()
    space = answer[len(before) : begin] if after_text or not before else ""
    return Block(calls, space, after_text)


class CallMemory:
    """Used from the event loop and from the threads that render prompts."""

    def __init__(self, max_ids: int = MAX_IDS, max_bytes: int = MAX_BYTES) -> None:
        """`max_ids` 0: nothing is remembered."""
        self._max_ids, self._max_bytes = max_ids, max_bytes
        self._blocks: OrderedDict[str, Block] = OrderedDict()  # least recently used first
        self._shares: dict[Block, int] = {}  # ids that lead to a block
        self._lock = threading.Lock()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def new_id(self, prefix: str) -> str:
        """An id that was never given before: 128 random bits."""
        while True:
            id_ = prefix + os.urandom(16).hex()
            if id_ not in self._blocks:
                return id_

    def remember(self, ids: Sequence[str], block: Block) -> None:
        """All of `ids` lead to one shared block."""
        with self._lock:
            for id_ in ids:
                self._forget(id_)
                self._blocks[id_] = block
                if block not in self._shares:
                    self.n_bytes += block.n_bytes
                self._shares[block] = self._shares.get(block, 0) + 1
            while len(self._blocks) > self._max_ids or self.n_bytes > self._max_bytes:
                self._forget(next(iter(self._blocks)))

    def block_of(self, ids: Sequence[str]) -> Block | None:
        """The block that all of `ids` lead to; None when they do not, or to different ones."""
        with self._lock:
            found = {self._blocks.get(id_) for id_ in ids}
            block = found.pop() if len(found) == 1 else None
            if block is not None:
                for id_ in ids:
                    self._blocks.move_to_end(id_)
            return block

    def _forget(self, id_: str) -> None:
        block = self._blocks.pop(id_, None)
        if block is None:
            return
        self._shares[block] -= 1
        if not self._shares[block]:
            del self._shares[block]
            self.n_bytes -= block.n_bytes
