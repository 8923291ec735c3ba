"""Owners that lie. Whatever they say: one of our errors, and no descriptor left open."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds4_common import client, fdpass, line_client, paths, protocol
from ds4_common.errors import (
    Ds4Error,
    OwnerUnavailable,
    ProtocolError,
)
from helpers.brokers import memory
from helpers.descriptors import open_fds

# Owners that lie. Whatever they say: one of our errors, and no descriptor left open.

WELCOME = protocol.Welcome(
    protocol.PROTOCOL_VERSION, 1, "id", "ready", "", protocol.Progress(), "memfd", [], [], 2, 8192
)


RECORDS = [
    protocol.AllocationRecord(i, "base", 8192, 4096 * i, 4096, 4096, 4096, "") for i in range(2)
]


@contextmanager
def liar(folder: Path, *packets: tuple[bytes, int]) -> Iterator[str]:
    """Answers the hello properly and then each request by one of `packets` (bytes, descriptors)."""
    path = str(folder / "w")

    def serve() -> None:
        served, _ = sock.accept()
        with served:
            fdpass.receive(served)
            fdpass.send(served, protocol.encode(WELCOME))
            for data, count in packets:
                served.recv(1 << 16)
                if data:
                    fdpass.send(served, data, [fd] * count)

    fd = memory(4096, b"")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(paths.control_socket_path(path))
        sock.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path
        finally:
            thread.join()
            os.close(fd)


def allocations(ids: list[int], remaining: int = 0) -> bytes:
    return protocol.encode(protocol.Allocations([RECORDS[i] for i in ids], remaining))


def map_both(connection: client.OwnerConnection) -> object:
    return connection.map_allocations([0, 1])


@pytest.mark.parametrize(
    ("ask", "packet", "says"),
    [
        (map_both, (allocations([0, 1]), 1), "2 allocations, 1 descriptors"),
        (map_both, (allocations([0, 1]), 3), "2 allocations, 3 descriptors"),
        (map_both, (allocations([0, 1]), 2), "refusing weights that may be another range's"),
        (map_both, (allocations([1, 0]), 2), "got others"),
        (map_both, (allocations([0]), 1), "got others"),
        (map_both, (allocations([], 5), 0), "no allocation in a page"),
        (map_both, (allocations([0], 1), 1), "closed the connection"),
        (map_both, (b"{}", 2), "malformed"),
        (map_both, (protocol.encode(protocol.Stopping()), 2), "expected Allocations"),
        (map_both, (protocol.encode(protocol.Error("busy", "x")), 2), "x"),
        (map_both, (b"", 0), "closed the connection"),
        (lambda c: c.blob("a"), (protocol.encode(protocol.Blobs([])), 1), "asked for blobs"),
        (
            lambda c: c.blob("a"),
            (protocol.encode(protocol.Blobs([protocol.BlobRecord("b", 1, "")])), 1),
            "asked for blobs",
        ),
        (
            lambda c: c.listener("::1", 0),
            (protocol.encode(protocol.Listener(protocol.ListenerRecord("::1", 1, "", ""))), 0),
            "0 descriptors, expected 1",
        ),
        (lambda c: c.status(), (protocol.encode(WELCOME), 4), "expected Status"),
    ],
)
def test_replies_that_do_not_fit_are_refused_with_their_descriptors_closed(
    tmp_path: Path,
    ask: Callable[[client.OwnerConnection], object],
    packet: tuple[bytes, int],
    says: str,
) -> None:
    before = open_fds()
    with liar(tmp_path, packet) as path:
        with client.connect(path) as connection, pytest.raises(Ds4Error, match=says):
            ask(connection)
    assert open_fds() <= before


def test_an_owner_that_says_nothing_is_given_up_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "DEADLINE_SECONDS", 0.02)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(tmp_path / "w.ctl"))
        sock.listen()
        with pytest.raises(OwnerUnavailable, match="does not answer in time"):
            client.connect(str(tmp_path / "w"))


def test_a_line_broker_that_answers_something_else_is_refused(tmp_path: Path) -> None:
    before = open_fds()
    for answer in (b"OK 2 4096\n", b"OK 1\n", b"ERR invalid allocation\n", b"", b"x" * 100):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(tmp_path / "s"))
            sock.listen()

            def serve(sock: socket.socket = sock, answer: bytes = answer) -> None:
                with sock.accept()[0] as served:
                    served.recv(64)
                    if answer:
                        fdpass.send(served, answer, [0])

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(ProtocolError, match=r"GET 1: got|larger than 64"):
                line_client.fetch_allocation(str(tmp_path / "s"), 1)
            thread.join()
            os.unlink(tmp_path / "s")
    with pytest.raises(OwnerUnavailable, match="No such file"):
        line_client.fetch_allocation(str(tmp_path / "s"), 1)
    assert open_fds() <= before
