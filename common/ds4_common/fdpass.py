"""Packets with file descriptors over Unix sockets, and who is at the other end.

Owns: one send, one receive, the peer's credentials. A receive gives a whole packet with all its
descriptors, close-on-exec, or raises with every received descriptor closed: a truncated set is
never handed on, because a missing descriptor would silently become missing weights. CPython 3.11's
`socket.recv_fds` drops its flags (descriptors would leak into children), hence `recvmsg`.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterable, Sequence

from ds4_common.errors import ProtocolError

MAX_FDS = 250  # the kernel takes 253 in one packet; 254 is EINVAL
MAX_PACKET_BYTES = 128 * 1024  # below the default socket buffer, so one packet always fits
_ANCILLARY_BYTES = socket.CMSG_SPACE(256 * 4)


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Sends one packet. Raises ProtocolError when it breaks a cap, OSError when the peer is gone
    (BlockingIOError: the peer's buffer is full and the socket does not wait)."""
    if len(data) > MAX_PACKET_BYTES:
        raise ProtocolError(f"packet of {len(data)} bytes; at most {MAX_PACKET_BYTES} are sent")
    if len(fds) > MAX_FDS:
        raise ProtocolError(f"packet with {len(fds)} descriptors; at most {MAX_FDS} are sent")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, max_bytes: int = MAX_PACKET_BYTES) -> tuple[bytes, list[int]]:
    """One packet and its descriptors, which the caller owns. (b"", []) is the end.

    Raises ProtocolError for a packet that is too large, whose descriptors were cut, or that carries
    other ancillary data; OSError from the socket."""
    data, ancillary, flags, _ = sock.recvmsg(
        max_bytes + 1, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    foreign = 0
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        else:
            foreign += 1
    problem = ""
    if flags & socket.MSG_CTRUNC:
        problem = (
            f"its descriptors were cut: {len(fds)} arrived; "
            "raise the limit of open files (ulimit -n) of this process"
        )
    elif flags & socket.MSG_TRUNC or len(data) > max_bytes:
        problem = f"it is larger than {max_bytes} bytes"
    elif foreign:
        problem = f"it carries {foreign} ancillary messages that are not descriptors"
    if problem:
        close_all(fds)
        raise ProtocolError(f"packet refused: {problem}")
    return data, fds.tolist()


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected, or that listens, at the other end: the kernel's."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return pid, uid


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
