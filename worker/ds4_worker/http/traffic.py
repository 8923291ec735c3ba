"""How many bytes went over a client connection, by the kernel's count: what a worker knew of it is
lost with the worker.

Of TCP the kernel counts both directions. Of a Unix connection it counts nothing, but it moves its
peek offset back by whatever is read, so that an offset far ahead of everything is a count of what
was read. What was sent is counted by the sender, in the slot (`ds4_slot_send`, native/seat.h); a
sender that died over it leaves the count unsure. Refuses nothing: judging is `journal.py`'s.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct

import msgspec

from ds4_common.seat import Slot, native

# struct tcp_info: tcpi_state is its first byte.
_TCP_INFO_BYTES = 136
_TCP_COUNTS = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
_TCP_COUNTS_OFFSET = 120
_TCP_ESTABLISHED = 1
_SIOCOUTQ, _SIOCINQ = 0x5411, 0x541B
_SO_PEEK_OFF = 42
_AHEAD = (1 << 31) - 1  # the greatest offset; the kernel stops it at 0
_ROUND = 1 << 30  # what is read is counted modulo this
_UNSURE = 1 << 63  # DS4_SLOT_UNSURE
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Traffic(msgspec.Struct, frozen=True):
    """Bytes of one connection since it began."""

    established: bool
    accepted: int | None  # by the kernel from its server, acknowledged or not; None: unknown
    delivered: int  # to its server


def of_tcp(fd: int) -> Traffic:
    """Raises OSError for what is no TCP connection."""
    with socket.socket(fileno=os.dup(fd)) as connection:
        while True:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            sent = struct.unpack("i", fcntl.ioctl(fd, _SIOCOUTQ, bytes(4)))[0]
            unread = struct.unpack("i", fcntl.ioctl(fd, _SIOCINQ, bytes(4)))[0]
            again = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            counts = info[_TCP_COUNTS_OFFSET:]
            if counts == again[_TCP_COUNTS_OFFSET:_TCP_INFO_BYTES]:
                acked, received = _TCP_COUNTS.unpack_from(counts)
                return Traffic(info[0] == _TCP_ESTABLISHED, acked + sent, received - unread)


class UnixCounts:
    """The counts of one Unix connection, for its server. Refers to its descriptor and slot."""

    __slots__ = ("_connection", "_slot")

    def __init__(self, connection: socket.socket, slot: Slot) -> None:
        self._connection = connection
        self._slot = slot

    def start(self) -> None:
        """For a new connection, before anything is read. Raises OSError where the kernel cannot."""
        self._connection.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, _AHEAD)

    def received(self, n_bytes: int) -> None:
        """Told of what was read once the slot counts it."""
        if (self._slot.received ^ (self._slot.received - n_bytes)) & (_ROUND >> 1):
            offset = self._offset()
            if offset < _ROUND:  # far from both ends, however much one turn reads
                self._connection.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, offset + _ROUND)

    def send(self, data: bytes) -> int:
        """How many of the bytes went at once."""
        sent = native().ds4_slot_send(
            ctypes.addressof(self._slot), self._connection.fileno(), data, len(data)
        )
        return max(0, int(sent))  # what is wrong with it the transport will find out

    def leave(self) -> None:
        """The rest is sent by somebody who does not count."""
        self._slot.sent |= _UNSURE

    def settle(self) -> None:
        """All that was queued has gone."""
        self._slot.sent = self._slot.queued

    def traffic(self) -> Traffic:
        """Raises OSError."""
        poll = select.poll()
        poll.register(self._connection, _GONE)
        delivered = (_AHEAD - self._offset()) % _ROUND
        missing = (delivered - self._slot.received) % _ROUND
        sent = None if self._slot.sent & _UNSURE else self._slot.sent
        return Traffic(not poll.poll(0), sent, self._slot.received + missing)

    def _offset(self) -> int:
        offset = self._connection.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
        return _AHEAD if offset < 0 else offset  # not started: nothing was read
