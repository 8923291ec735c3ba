"""A client of the published line protocol (docs/protocol.md), which any broker of it understands.

Owns: one request, and the descriptor that answers it. Refuses replies that are not exactly that.
"""

from __future__ import annotations

import socket

from ds4_common import fdpass, protocol
from ds4_common.client import DEADLINE_SECONDS, set_timeouts
from ds4_common.errors import OwnerUnavailable, ProtocolError


def fetch_allocation(socket_path: str, allocation: int) -> tuple[int, int]:
    """Asks for one allocation by the published line protocol; (alloc_bytes, fd that we own).

    Raises ProtocolError when the broker refuses or answers anything else."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line, fds = b"", list[int]()
    try:
        set_timeouts(sock, DEADLINE_SECONDS)
        sock.connect(socket_path)
        sock.sendall(protocol.format_get(allocation))
        while not line.endswith(b"\n"):
            data, more = fdpass.receive(sock, protocol.MAX_LINE_BYTES)
            fds += more
            line += data
            if not data or len(line) > protocol.MAX_LINE_BYTES:
                break
        words = line.split()
        if len(words) != 3 or words[:2] != [b"OK", b"%d" % allocation] or len(fds) != 1:
            raise ProtocolError(f"{socket_path}: GET {allocation}: got {line!r}, {len(fds)} fds")
        return int(words[2]), fds.pop()
    except OSError as error:
        raise OwnerUnavailable(f"{socket_path}: {error}") from error
    finally:
        sock.close()
        fdpass.close_all(fds)
