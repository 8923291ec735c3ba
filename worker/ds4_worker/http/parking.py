"""Copies of client connections where the next worker finds them.

A connection is parked in a lane the moment it is accepted, and what its client asks is written down
(`journal.py`). So a worker that is killed leaves its clients connected, and its successor goes on
with them.

Owns: the lanes this worker holds, what is in their queues, and collecting those of workers that are
gone. Refuses nothing: where there is no room, a connection is simply not parked. Lanes are for a
process's main thread (ds4_common/seat.py).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
from collections import deque
from collections.abc import Iterator

import msgspec

from ds4_common.errors import BackendError
from ds4_common.seat import Seat, Slot, native
from ds4_worker.http.journal import Inheritance, Ticket, shut
from ds4_worker.http.traffic import UnixCounts, of_tcp

_MARK_SLOT = 0xFFFFFFFF
_NO_COPY = 1 << 32
_MAX_DEAD = 64  # entries of ended connections in a lane, before those still alive move to its end


class Inherited(msgspec.Struct, frozen=True):
    """A connection that another worker had accepted."""

    connection: socket.socket
    ticket: Ticket
    inheritance: Inheritance


class Lane:
    """One lane that this worker holds. `_queue` mirrors what is in it, oldest first."""

    def __init__(self, seat: Seat, number: int) -> None:
        self._seat = seat
        self.number = number
        self._native = native()
        self._park, self._take = seat.lane_ends(number)
        self._queue: deque[int] = deque()
        self.live: dict[int, tuple[int, int]] = {}  # connection: slot and borrowed descriptor
        self._free = list(range(seat.layout.slots_per_lane - 1, -1, -1))

    def accept(self, listener: socket.socket) -> tuple[socket.socket, Ticket | None]:
        """A client, and a ticket if there was room. Raises OSError from accept."""
        index = self._free.pop() if self._free else -1
        if index < 0:
            result = self._native.ds4_lane_accept(listener.fileno(), -1, 0, 0)
            return socket.socket(fileno=self._accepted(result)[0]), None
        number = self._seat.next_connection(self.number)
        slot = self._clear(index)
        slot.connection = number
        result = self._native.ds4_lane_accept(listener.fileno(), self._park, index, number)
        try:
            fd, parked = self._accepted(result)
        except OSError:
            self._release(index, slot)
            raise
        connection = socket.socket(fileno=fd)
        if not parked:
            self._release(index, slot)
            return connection, None
        self._queue.append(number)
        self.live[number] = index, fd
        ticket = self._ticket(index, connection)
        try:
            if ticket.counts is not None:
                ticket.counts.start()
        except OSError:  # a kernel that cannot count: its clients are not parked
            ticket.free()
            return connection, None
        return connection, ticket

    def _accepted(self, result: int) -> tuple[int, bool]:
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result & (_NO_COPY - 1), result < _NO_COPY

    def free(self, index: int, slot: Slot) -> None:
        self.live.pop(slot.connection, None)
        self._release(index, slot)
        self._trim()

    def map_spill(self, index: int) -> mmap.mmap:
        return self._seat.map_spill(self.number, index)

    def _clear(self, index: int) -> Slot:
        slot = self._seat.slot(self.number, index)
        slot.received = slot.base = slot.queued = slot.begin = slot.progress = 0
        slot.begin_answered = slot.lives = slot.sent = 0
        return slot

    def _release(self, index: int, slot: Slot) -> None:
        slot.connection = 0
        self._free.append(index)

    def _ticket(self, index: int, connection: socket.socket) -> Ticket:
        slot = self._seat.slot(self.number, index)
        counts = UnixCounts(connection, slot) if connection.family == socket.AF_UNIX else None
        return Ticket(self, index, slot, self._seat.journal(self.number, index), counts)

    def _trim(self) -> None:
        """Drops the copies of ended connections. Those behind a long-lived one wait until there are
        many; then it moves to the end."""
        queue, live = self._queue, self.live
        while queue:
            oldest = queue[0]
            if oldest in live:
                if len(queue) <= 2 * len(live) + _MAX_DEAD:
                    return
                index, fd = live[oldest]
                if self._native.ds4_lane_park(self._park, fd, index, oldest):
                    return  # full: another time
                queue.append(oldest)
            queue.popleft()
            dropped = self._native.ds4_lane_drop(self._take)
            assert dropped == oldest, f"lane {self.number}: dropped {dropped}, expected {oldest}"

    def __bool__(self) -> bool:
        return bool(self.live)

    # --- what a predecessor left -----------------------------------------------------------------

    def holds_nothing(self) -> bool:
        entry = self._peek()
        if entry is not None and entry[2] >= 0:
            os.close(entry[2])
        return entry is None

    def collect(self) -> Iterator[Inherited]:
        """Takes what is in the lane. Every copy stays in it meanwhile, so that a worker that dies
        over this leaves all of them to the next. Connections with nothing to do are closed."""
        mark = self._seat.next_connection(self.number)
        marked = not self._native.ds4_lane_park(self._park, -1, _MARK_SLOT, mark)
        while (entry := self._peek()) is not None and entry[1] != mark:
            index, number, fd = entry
            keep = fd >= 0 and self._is_new(index, number, fd)
            parked = keep and not self._native.ds4_lane_park(self._park, fd, index, number)
            self._native.ds4_lane_drop(self._take)
            if not marked:  # the lane was full: now it is not
                marked = not self._native.ds4_lane_park(self._park, -1, _MARK_SLOT, mark)
            if keep and (parked or not self._native.ds4_lane_park(self._park, fd, index, number)):
                self._queue.append(number)
            elif fd >= 0 and not keep:
                os.close(fd)
        self._native.ds4_lane_drop(self._take)
        self._sweep()
        for index, fd in list(self.live.values()):
            inherited = self._judge(index, fd)
            if inherited is not None:
                yield inherited

    def _peek(self) -> tuple[int, int, int] | None:
        """Slot, connection and descriptor (-1: none) of the oldest entry; None: there is none."""
        slot, number = (ctypes.c_uint32 * 1)(), (ctypes.c_uint64 * 1)()
        fd = self._native.ds4_lane_peek(self._take, slot, number)
        if fd == -errno.EAGAIN - 1:
            return None
        if fd < -1:
            raise BackendError(f"lane {self.number}: {os.strerror(-1 - fd)}")
        return slot[0], number[0], fd

    def _is_new(self, index: int, number: int, fd: int) -> bool:
        """Whether an entry is of a connection that goes on, and seen for the first time."""
        if index >= self._seat.layout.slots_per_lane or number in self.live:
            return False
        if self._seat.slot(self.number, index).connection != number:
            return False
        self.live[number] = index, fd
        return True

    def _sweep(self) -> None:
        """Frees the slots of connections that never came into the lane."""
        count = self._seat.layout.slots_per_lane
        used = {index for index, _ in self.live.values()}
        self._free = [index for index in range(count - 1, -1, -1) if index not in used]
        for index in self._free:
            self._seat.slot(self.number, index).connection = 0

    def _judge(self, index: int, fd: int) -> Inherited | None:
        connection = socket.socket(fileno=fd)
        connection.setblocking(False)
        ticket = self._ticket(index, connection)
        try:
            traffic = of_tcp(fd) if ticket.counts is None else ticket.counts.traffic()
            inheritance = ticket.judge(traffic)
        except OSError:
            inheritance = None
        if inheritance is None:
            shut(connection)
            connection.close()
            ticket.free()
            return None
        return Inherited(connection, ticket, inheritance)


class Parking:
    """The lanes of one worker. New connections go to the first one."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._lanes: list[Lane] = []
        self.unparked = 0  # connections accepted without a copy, so far

    def accept(self, listener: socket.socket) -> tuple[socket.socket, Ticket | None]:
        """The next client. Raises OSError from accept; BlockingIOError: there is none."""
        if not self._lanes:
            self._take_free_lane()
        if self._lanes:
            connection, ticket = self._lanes[0].accept(listener)
        else:
            (connection, _), ticket = listener.accept(), None
        self.unparked += ticket is None
        return connection, ticket

    def _take_free_lane(self) -> None:
        for number in range(self._seat.layout.lanes):
            if self._seat.lock_lane(number):
                lane = Lane(self._seat, number)
                if lane.holds_nothing():
                    self._lanes.append(lane)
                    return
                self._seat.unlock_lane(number)  # `inherit` is about to come

    def inherit(self) -> list[Inherited]:
        """The connections in lanes that nobody holds: of workers that died or handed over."""
        found: list[Inherited] = []
        self._give_back_empty_lanes()
        held = {lane.number for lane in self._lanes}
        for number in range(self._seat.layout.lanes):
            if number in held or not self._seat.lock_lane(number):
                continue
            lane = Lane(self._seat, number)
            if lane.holds_nothing():
                self._seat.unlock_lane(number)
                continue
            found += lane.collect()
            self._lanes.append(lane)
        return found

    def _give_back_empty_lanes(self) -> None:
        for lane in self._lanes[1:]:
            if not lane:
                self._lanes.remove(lane)
                self._seat.unlock_lane(lane.number)

    def close(self) -> None:
        """Leaves what is parked to whoever looks next."""
        for lane in self._lanes:
            self._seat.unlock_lane(lane.number)
        self._lanes.clear()
