"""What the workers of one listening socket share, so that one can follow another (docs/restart.md).

Owns the descriptors of a seat and nothing of what is in them: memory in which workers keep robust
locks and what their clients asked, a bell, and lanes: socket pairs in whose queues workers park
copies of client connections. The owner never reads any of it; holding them is enough to keep the
clients of a killed worker connected until the next one comes.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from ds4_common import fdpass
from ds4_common.protocol import SEAT_LANES

# A parked connection takes about 770 bytes of this; the kernel caps it at net.core.wmem_max.
_LANE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Seat:
    """`fds`: the memory, the bell, then of each lane the end to park at and that to take from."""

    fds: tuple[int, ...]

    def close(self) -> None:
        fdpass.close_all(self.fds)


def make_seat() -> Seat:
    """Raises OSError when there are no descriptors left."""
    fds: list[int] = []
    try:
        fds.append(os.memfd_create("ds4-seat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        fds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        for _ in range(SEAT_LANES):
            park, take = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            fds += [park.detach(), take.detach()]
            _prepare(fds[-2:])
    except OSError:
        fdpass.close_all(fds)
        raise
    return Seat(tuple(fds))


def _prepare(ends: list[int]) -> None:
    for fd in ends:
        os.set_blocking(fd, False)
    with socket.socket(fileno=os.dup(ends[0])) as park:
        park.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LANE_BYTES)
