"""Descriptors that exist only while they are sent.

Host memory is one descriptor that stays open; device memory is a handle, and a descriptor of it is
made for every send and closed after it. Owns the difference: `Descriptor` is what the broker, the
service manager's store and the loader are given, `lent` is how they get a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias


class Lender(Protocol):
    """Memory whose descriptors are made on demand."""

    @property
    def held_fd(self) -> int:
        """The descriptor that stays open between `hold` and `let_go`; -1: none."""

    def lend(self) -> int:
        """A descriptor, until it is taken back. Raises BackendError."""

    def take_back(self, fd: int) -> None: ...
    def hold(self) -> None:
        """Keeps one descriptor open, for a program that inherits it."""

    def let_go(self) -> None: ...
    def close(self) -> None:
        """Gives the memory up."""


Descriptor: TypeAlias = int | Lender  # an int is borrowed from whoever holds it


def number(descriptor: Descriptor) -> int:
    """Where it is open now, -1 where it is not."""
    return descriptor if isinstance(descriptor, int) else descriptor.held_fd


@contextmanager
def lent(descriptors: Sequence[Descriptor]) -> Iterator[list[int]]:
    """The numbers of all, closed again at the end where they were made for it."""
    given: list[tuple[Lender, int]] = []
    numbers = []
    try:
        for descriptor in descriptors:
            if isinstance(descriptor, int):
                numbers.append(descriptor)
            else:
                fd = descriptor.lend()
                given.append((descriptor, fd))
                numbers.append(fd)
        yield numbers
    finally:
        for lender, fd in given:
            lender.take_back(fd)
