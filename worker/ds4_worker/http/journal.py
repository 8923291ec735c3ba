"""What the client of a parked connection has asked, and how much of it is answered.

Its bytes are read straight into a journal in the seat's memory, and every response is announced
there before its first byte goes. When the worker is killed, its successor judges the connection:
requests whose response had not begun are answered, a response that had begun cannot be continued.
What began is not guessed: bytes are counted where they outlive a worker (`traffic.py`).

Owns: one slot and its journal (native/seat.h). Fields change one at a time, in an order that leaves
the successor something consistent whenever the process ends. Refuses to keep more than a request of
the greatest size: such a connection is not parked any more.
"""

from __future__ import annotations

import mmap
import socket
from typing import Protocol

import msgspec

from ds4_common.seat import Slot
from ds4_worker.http.traffic import Traffic, UnixCounts

MAX_LIVES = 16  # workers that may die over one request before it is answered by an error


class Lane(Protocol):
    """Where a connection is parked."""

    def map_spill(self, index: int) -> mmap.mmap:
        """The part of a journal beyond its head."""

    def free(self, index: int, slot: Slot) -> None:
        """Drops the copy of a connection, and its slot."""


class Ticket:
    """A parked connection. Its owner reports what happens, in this order: `buffer`, `received` for
    bytes that come; `begins`, `queues`, `ends` for the bytes of a response, before they go."""

    __slots__ = ("_head", "_index", "_lane", "_slot", "_spill", "counts")

    def __init__(
        self,
        lane: Lane,
        index: int,
        slot: Slot,
        head: memoryview,
        counts: UnixCounts | None = None,
    ) -> None:
        """`counts`: of a Unix connection, whose bytes are sent through it."""
        self._lane = lane
        self._index = index
        self._slot = slot
        self._head = head
        self.counts = counts
        self._spill: mmap.mmap | None = None

    def buffer(self, fresh: bool) -> memoryview | None:
        """Where the next bytes must be read to. `fresh`: everything received is answered. None: the
        journal is full, and the connection is not parked any more."""
        slot = self._slot
        if fresh and slot.received != slot.base:
            self._restart()
        used = slot.received - slot.base
        if used < len(self._head):
            return self._head[used:]
        used -= len(self._head)
        if self._spill is None:
            self._spill = self._lane.map_spill(self._index)
        if used == len(self._spill):
            return None
        return memoryview(self._spill)[used:]

    def received(self, n_bytes: int) -> None:
        self._slot.received += n_bytes
        if self.counts is not None:
            self.counts.received(n_bytes)

    def _restart(self) -> None:
        """An empty journal. Whenever this is cut short, what is left is consistent."""
        slot = self._slot
        slot.begin_answered = slot.progress >> 1
        slot.begin = slot.queued
        slot.base = slot.received
        slot.progress = slot.begin_answered = 0
        slot.lives = 0
        self._forget_spill()

    def interjects(self, n_bytes: int) -> None:
        """Bytes that are no response go to the client: 100 Continue."""
        slot = self._slot
        slot.begin_answered = slot.progress >> 1
        slot.begin = slot.queued
        slot.queued += n_bytes

    def begins(self) -> None:
        """What is queued from now on is the next response."""
        slot = self._slot
        slot.begin_answered = slot.progress >> 1
        slot.begin = slot.queued
        slot.progress |= 1

    def queues(self, n_bytes: int) -> None:
        self._slot.queued += n_bytes

    def ends(self, n_bytes: int) -> None:
        """As `queues`, of the last bytes of the response. If they do not all reach the kernel, its
        count will tell."""
        self._slot.queued += n_bytes
        self._slot.progress = (self._slot.progress | 1) + 1

    @property
    def begun(self) -> bool:
        """Whether a response is under way and the client may have seen some of it."""
        return bool(self._slot.progress & 1) and self._slot.queued > self._slot.begin

    def free(self) -> None:
        """The connection is over, or not to be continued by anybody."""
        self._forget_spill()
        self._lane.free(self._index, self._slot)

    def _forget_spill(self) -> None:
        if self._spill is not None:
            self._spill.madvise(mmap.MADV_REMOVE)  # back to a hole: the memory is the machine's
            self._spill = None  # unmapped when the last view of it is gone

    # --- what a predecessor left -----------------------------------------------------------------

    def judge(self, now: Traffic) -> Inheritance | None:
        """What is to be done for the connection by a new worker; None: close it."""
        slot = self._slot
        missing = now.delivered - slot.received
        room = self.buffer(fresh=False)
        if not now.established or not 0 <= missing <= (0 if room is None else len(room)):
            return None
        if now.accepted is None:  # the worker died while it sent
            return None
        slot.received += missing  # read by a worker that had no time to say so
        answered, open_ = slot.progress >> 1, slot.progress & 1
        if now.accepted == slot.queued and not open_:
            skip = answered
        elif now.accepted == slot.begin:
            skip = slot.begin_answered
        else:
            return None
        data = self._journal()
        slot.lives += bool(data)
        slot.queued = slot.begin = now.accepted
        slot.begin_answered = skip if data else 0
        slot.progress = 2 * slot.begin_answered
        return Inheritance(data, slot.begin_answered, slot.lives > MAX_LIVES)

    def _journal(self) -> bytes:
        used = self._slot.received - self._slot.base
        head = bytes(self._head[:used])
        if self._spill is None or used == len(head):
            return head
        return head + self._spill[: used - len(head)]


class Inheritance(msgspec.Struct, frozen=True):
    """`data`: what the client sent, of which the first `answered` requests are done. `fatal`: too
    many workers died over the rest."""

    data: bytes
    answered: int
    fatal: bool


def shut(connection: socket.socket) -> None:
    """Ends a connection of which there may be copies: its peer sees the end at once."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer was faster
