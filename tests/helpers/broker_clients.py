"""Raw clients of both sockets of a broker."""

from __future__ import annotations

import os
import socket

from ds4_common import client, fdpass, protocol
from ds4_common.line_client import fetch_allocation
from helpers.brokers import Stage, content

HELLO = protocol.encode(protocol.Hello(protocol.PROTOCOL_VERSION, "worker", "t", "test"))


def line_client(stage: Stage) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(stage.path + ".sock")
    return sock


def control_client(stage: Stage) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(30)
    sock.connect(stage.path + ".ctl")
    return sock


def reply_to(sock: socket.socket, data: bytes) -> protocol.Reply:
    sock.send(data)
    received, fds = fdpass.receive(sock)
    fdpass.close_all(fds)
    return protocol.decode_reply(received)


def everybody_is_served(stage: Stage) -> None:
    """The proof that nothing was hurt: both protocols still hand out the right bytes."""
    n_bytes, fd = fetch_allocation(stage.path + ".sock", 1)
    assert os.pread(fd, len(content(1)), 0) == content(1)
    assert n_bytes == os.fstat(fd).st_size
    os.close(fd)
    with client.connect(stage.path) as connection:
        mapped = connection.map_allocations([2])
        assert bytes(mapped[2].view[: len(content(2))]) == content(2)
        mapped[2].close()
