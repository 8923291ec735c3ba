"""The published line protocol under good, slow, hostile and vanishing clients."""

from __future__ import annotations

import os
import socket

import pytest

from ds4_common import fdpass, protocol
from ds4_owner import desks
from helpers.broker_clients import HELLO, control_client, everybody_is_served, line_client
from helpers.brokers import Stage, content
from helpers.descriptors import open_fds


def test_reply_is_the_published_one_byte_for_byte(stage: Stage) -> None:
    with line_client(stage) as sock:
        sock.sendall(b"GET 2\n")
        data, fds = fdpass.receive(sock)
        assert data == b"OK 2 4194304\n"
        assert os.pread(fds[0], len(content(2)), 0) == content(2)
        fdpass.close_all(fds)
        assert sock.recv(1) == b""  # one request per connection


@pytest.mark.parametrize(
    "line",
    [b"GET 3\n", b"GET -1\n", b"GET\n", b"PUT 1\n", b"\n", b"GET 1 \n", b"\0\xff\n", b"x" * 65],
)
def test_anything_else_is_answered_by_the_published_error(stage: Stage, line: bytes) -> None:
    with line_client(stage) as sock:
        sock.sendall(line)
        assert fdpass.receive(sock) == (b"ERR invalid allocation\n", [])
        assert sock.recv(1) == b""
    everybody_is_served(stage)


def test_a_line_may_come_in_pieces(stage: Stage) -> None:
    with line_client(stage) as sock:
        for piece in (b"G", b"ET", b" ", b"0", b"\n"):
            stage.settle()
            sock.sendall(piece)
        data, fds = fdpass.receive(sock)
        fdpass.close_all(fds)
        assert data == b"OK 0 4194304\n"


def test_half_a_line_and_the_end_is_an_error(stage: Stage) -> None:
    with line_client(stage) as sock:
        sock.sendall(b"GET 1")
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(64) == b"ERR invalid allocation\n"


def test_a_megabyte_is_cut_short_by_an_error(stage: Stage) -> None:
    with line_client(stage) as sock:
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.sendall(b"x" * (1 << 20))
        assert sock.recv(64) == b"ERR invalid allocation\n"
    everybody_is_served(stage)


def test_a_client_that_vanishes_before_its_reply_hurts_nobody(stage: Stage) -> None:
    for _ in range(20):
        with line_client(stage) as sock:
            sock.sendall(b"GET 1\n")
    stage.settle()
    everybody_is_served(stage)


def test_descriptors_that_a_client_sends_are_not_kept(stage: Stage) -> None:
    before = open_fds()
    with line_client(stage) as line, control_client(stage) as control:
        fdpass.send(line, b"GET 1\n", [line.fileno()] * 10)
        line.recv(64)  # a plain recv: its descriptor is dropped by the kernel
        fdpass.send(control, HELLO, [control.fileno()] * 10)
        reply = protocol.decode_reply(control.recv(65536))
        assert isinstance(reply, protocol.Error)
        assert reply.code == "malformed"
    stage.settle()
    assert open_fds() <= before


@pytest.mark.parametrize("half", [b"", b"GET 1"])
def test_a_silent_line_client_is_dropped_at_its_deadline(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, half: bytes
) -> None:
    monkeypatch.setattr(desks, "GREETING_SECONDS", 0.02)
    with line_client(stage) as sock:
        sock.sendall(half)
        assert sock.recv(1) == b""
    everybody_is_served(stage)


def test_requests_are_counted_and_logged_as_published(stage: Stage) -> None:
    for number in (0, 1, 2, 7):
        with line_client(stage) as sock:
            sock.sendall(protocol.format_get(number))
            sock.recv(64)
    assert stage.broker.line_requests == 3
    assert [x for x in stage.log if x.startswith("broker request")] == [
        "broker request 1 id=0",
        "broker request 3 id=2",
    ]
    assert f"broker listening {stage.path}.sock" in stage.log
