"""Work that is done in any order and counted in one: the order of a hash.

Owns the numbers and who waits for whom. After a failure nobody waits any more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """`turn(n)` blocks until turns 0 to n - 1 are over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self.failed = False

    @contextmanager
    def turn(self, number: int) -> Iterator[bool]:
        """In the block: it is our turn (True), or somebody failed (False)."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == number or self.failed)
            ours = not self.failed
        yield ours
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def fail(self) -> None:
        with self._changed:
            self.failed = True
            self._changed.notify_all()
