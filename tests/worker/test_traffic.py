"""How many bytes went over a client connection, told when its worker is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ds4_common.seat import Slot
from ds4_worker.http.traffic import UnixCounts, of_tcp

SO_PEEK_OFF = 42
Counted = tuple[UnixCounts, Slot, socket.socket, socket.socket]


def test_the_kernel_counts_what_it_took_and_what_it_gave() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            server, _ = listener.accept()
            with server:
                start = of_tcp(server.fileno())
                assert (start.established, start.accepted, start.delivered) == (True, 0, 0)
                client.sendall(b"12345")
                assert server.recv(3) == b"123"
                server.sendall(b"1234567")
                now = of_tcp(server.fileno())
                assert (now.accepted, now.delivered) == (7, 3)
                assert client.recv(7, socket.MSG_WAITALL) == b"1234567"
                client.close()
                assert server.recv(10) == b"45"
                assert server.recv(1) == b""
                assert not of_tcp(server.fileno()).established


@pytest.fixture
def counted() -> Iterator[Counted]:
    """The counts, the slot, the server's end and the client's end of a Unix connection."""
    client, server = socket.socketpair()
    server.setblocking(False)
    slot = Slot()
    counts = UnixCounts(server, slot)
    counts.start()
    with client, server:
        yield counts, slot, server, client


def test_of_a_unix_connection_both_directions_are_counted(counted: Counted) -> None:
    counts, slot, server, client = counted
    start = counts.traffic()
    assert (start.established, start.accepted, start.delivered) == (True, 0, 0)
    client.sendall(b"12345")
    assert server.recv(3) == b"123"  # and then nothing was written down
    slot.queued = 7
    assert counts.send(b"1234567") == 7
    now = counts.traffic()
    assert (now.accepted, now.delivered) == (7, 3)
    slot.received = 2
    assert counts.traffic().delivered == 3
    client.close()
    assert not counts.traffic().established


def test_what_a_unix_client_was_sent_is_unknown_until_all_of_it_went(counted: Counted) -> None:
    counts, slot, _, client = counted
    data = bytes(4 << 20)
    slot.queued = len(data)
    sent = counts.send(data)
    assert 0 < sent < len(data)
    assert counts.traffic().accepted == sent
    counts.leave()
    assert counts.traffic().accepted is None
    counts.settle()
    assert counts.traffic().accepted == len(data)
    client.close()
    assert counts.send(b"x") == 0


def test_a_unix_connection_may_bring_more_than_an_offset_can_count(counted: Counted) -> None:
    counts, slot, server, client = counted
    piece = bytes(1 << 16)
    turn = 1 << 30
    for before in (turn - 100, 2 * turn - 100, 5 * turn - 100):
        server.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, (1 << 31) - 1 - (turn - 100))
        slot.received = before
        client.sendall(piece)
        n_bytes = server.recv_into(bytearray(1 << 16))
        assert counts.traffic().delivered == before + n_bytes
        slot.received += n_bytes
        counts.received(n_bytes)
        assert server.getsockopt(socket.SOL_SOCKET, SO_PEEK_OFF) > turn
        assert counts.traffic().delivered == slot.received
