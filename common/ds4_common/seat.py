"""The seat of a listening socket: who serves it, who is next, and what its clients have asked.

Owns: the mapping of the seat's memory (laid out by `native/seat.h`), its robust locks, its bell.
The holder of SERVING accepts connections. Whoever wants its place holds CLAIM meanwhile and rings;
whoever waits for its end holds STANDBY. A lane belongs to the worker that holds its lock;
`ds4_worker.http.parking` says what is in it.

The kernel gives a lock on the moment the thread that holds it dies, so all of this is for the main
thread of a process. Everything works without an owner: it only made the descriptors.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os

from ds4_common import fdpass
from ds4_common.errors import BackendError
from ds4_common.native import lib

SERVING, CLAIM, STANDBY, _FIRST_LANE = range(4)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Slot(ctypes.Structure):
    """One parked connection: `ds4_slot` in native/seat.h, where the fields are explained."""

    _fields_ = (
        ("connection", ctypes.c_uint64), ("received", ctypes.c_uint64), ("base", ctypes.c_uint64),
        ("queued", ctypes.c_uint64), ("begin", ctypes.c_uint64), ("progress", ctypes.c_uint64),
        ("begin_answered", ctypes.c_uint32), ("lives", ctypes.c_uint32),
        ("sent", ctypes.c_uint64),
    )  # fmt: skip
    connection: int
    received: int
    base: int
    queued: int
    begin: int
    progress: int
    begin_answered: int
    lives: int
    sent: int


class _Head(ctypes.Structure):
    """The beginning of `ds4_seat`. The locks behind it are native code's."""

    _fields_ = (
        ("magic", ctypes.c_uint64), ("version", ctypes.c_uint64),
        ("next_connection", ctypes.c_uint64 * 4), ("holder_pid", ctypes.c_int64),
    )  # fmt: skip


class _Layout:
    """Where things lie, as native code says, in bytes."""

    def __init__(self, native: ctypes.CDLL) -> None:
        values = (ctypes.c_uint64 * 10)()
        native.ds4_seat_layout(values)
        self.total, self.mapped, self.slots, slot_bytes, self.journals = values[:5]
        self.journal_bytes, self.spills, self.spill_bytes, self.lanes, self.slots_per_lane = values[
            5:
        ]
        assert slot_bytes == ctypes.sizeof(Slot)
        assert self.lanes == len(_Head().next_connection)


@functools.cache
def native() -> ctypes.CDLL:
    """The library with the prototypes of native/seat.h."""
    library = lib.load()
    c = ctypes
    for name, result, arguments in (
        ("ds4_seat_init", c.c_int, (c.c_void_p,)),
        ("ds4_seat_fits", c.c_int, (c.c_void_p,)),
        ("ds4_seat_lock", c.c_int, (c.c_void_p, c.c_int, c.c_int)),
        ("ds4_seat_unlock", c.c_int, (c.c_void_p, c.c_int)),
        ("ds4_lane_accept", c.c_int64, (c.c_int, c.c_int, c.c_uint32, c.c_uint64)),
        ("ds4_lane_park", c.c_int, (c.c_int, c.c_int, c.c_uint32, c.c_uint64)),
        ("ds4_lane_peek", c.c_int, (c.c_int, c.c_void_p, c.c_void_p)),
        ("ds4_lane_drop", c.c_uint64, (c.c_int,)),
        ("ds4_slot_send", c.c_int64, (c.c_void_p, c.c_int, c.c_char_p, c.c_uint64)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Seat:
    """The seat behind the descriptors that an owner gave for a listening socket; it takes them."""

    def __init__(self, fds: list[int]) -> None:
        """Raises BackendError when the memory cannot be mapped or is of a build that differs."""
        self._fds = fds
        self._native = native()
        self.layout = _Layout(self._native)
        self._memory_fd, self.bell = fds[:2]
        try:
            self._prepare()
            self.memory = mmap.mmap(self._memory_fd, self.layout.mapped)
        except OSError as error:
            fdpass.close_all(fds)
            raise BackendError(f"seat: cannot map its memory: {error.strerror}") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._head = _Head.from_address(self.address)
        if not self._native.ds4_seat_fits(self.address):
            fdpass.close_all(fds)
            raise BackendError(
                "seat: the worker that serves this address is of a build with another seat; stop "
                "it, restart the owner, or choose another --port"
            )

    def _prepare(self) -> None:
        """Fills the memory, once. The lock is this process's and ends with it, so a worker that
        dies half-way leaves unfitting memory to nobody."""
        fcntl.lockf(self._memory_fd, fcntl.LOCK_EX)
        try:
            if os.fstat(self._memory_fd).st_size == 0:
                os.ftruncate(self._memory_fd, self.layout.total)
            with mmap.mmap(self._memory_fd, mmap.PAGESIZE) as page:
                if page[:16] == bytes(16):
                    start = ctypes.c_char.from_buffer(page)
                    problem = self._native.ds4_seat_init(ctypes.addressof(start))
                    del start
                    if problem:
                        raise OSError(-problem, os.strerror(-problem))
            fcntl.fcntl(self._memory_fd, fcntl.F_ADD_SEALS, _SEALS)
        finally:
            fcntl.lockf(self._memory_fd, fcntl.LOCK_UN)

    def lane_ends(self, lane: int) -> tuple[int, int]:
        """Borrowed descriptors of a lane: where to park, where to take from."""
        park, take = self._fds[2 + 2 * lane : 4 + 2 * lane]
        return park, take

    def slot(self, lane: int, index: int) -> Slot:
        number = lane * self.layout.slots_per_lane + index
        return Slot.from_address(self.address + self.layout.slots + number * ctypes.sizeof(Slot))

    def journal(self, lane: int, index: int) -> memoryview:
        """The first part of a journal, writable."""
        size = self.layout.journal_bytes
        start = self.layout.journals + (lane * self.layout.slots_per_lane + index) * size
        return memoryview(self.memory)[start : start + size]

    def map_spill(self, lane: int, index: int) -> mmap.mmap:
        """The second part of a journal; close it after use."""
        number = lane * self.layout.slots_per_lane + index
        offset = self.layout.spills + number * self.layout.spill_bytes
        return mmap.mmap(self._memory_fd, self.layout.spill_bytes, offset=offset)

    def next_connection(self, lane: int) -> int:
        """A number that no connection of this lane had before."""
        number = self._head.next_connection[lane] + 1
        self._head.next_connection[lane] = number
        return int(number)

    @property
    def holder_pid(self) -> int:
        """Who said last that it serves. For messages: it may be gone, or of another namespace."""
        return int(self._head.holder_pid)

    def sit(self) -> None:
        """Says that this process serves. For the holder of SERVING."""
        self._head.holder_pid = os.getpid()

    def lock(self, lock: int, seconds: float | None = 0.0) -> bool:
        """Whether it was got within `seconds`; None: waits for ever, without the interpreter lock,
        and no Python signal handler runs meanwhile. Raises BackendError for a broken lock."""
        timeout = -1 if seconds is None else round(seconds * 1000)
        result = self._native.ds4_seat_lock(self.address, lock, timeout)
        if result in (-errno.EBUSY, -errno.ETIMEDOUT):
            return False
        if result < 0:
            raise BackendError(f"seat: lock {lock}: {os.strerror(-result)}")
        return True

    def unlock(self, lock: int) -> None:
        """Gives a lock that this thread holds to whoever waits for it."""
        result = self._native.ds4_seat_unlock(self.address, lock)
        if result:
            raise BackendError(f"seat: lock {lock}: {os.strerror(-result)}")

    def held(self, lock: int) -> bool:
        """Whether another process holds a lock."""
        if not self.lock(lock):
            return True
        self.unlock(lock)
        return False

    def lock_lane(self, lane: int) -> bool:
        return self.lock(_FIRST_LANE + lane)

    def unlock_lane(self, lane: int) -> None:
        self.unlock(_FIRST_LANE + lane)

    def ring(self) -> None:
        """Wakes the serving worker, which looks at the seat."""
        os.eventfd_write(self.bell, 1)

    def hear(self) -> None:
        """Takes back all rings."""
        try:
            os.eventfd_read(self.bell)
        except BlockingIOError:
            return  # somebody else heard them

    def close(self) -> None:
        """Lets go of descriptors. The memory stays mapped: locks that are held lie in it."""
        fdpass.close_all(self._fds)
        self._fds = []
