"""The native protocol under good, slow and vanishing clients."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from ds4_common import client, fdpass, protocol
from ds4_common.errors import (
    OwnerUnavailable,
    ProtocolError,
)
from ds4_owner import desks, transport
from helpers.broker_clients import HELLO, control_client, everybody_is_served, line_client, reply_to
from helpers.brokers import Stage, own_command
from helpers.descriptors import open_fds


def send_for_ever(sock: socket.socket, data: bytes) -> None:
    while True:
        sock.send(data)


def test_an_open_connection_is_a_lease_and_its_end_ends_it(stage: Stage) -> None:
    with client.connect(stage.path, "worker", "first") as first:
        with client.connect(stage.path, "standby", "second"):
            assert [(x.name, x.role) for x in stage.broker.leases()] == [
                ("first", "worker"), ("second", "standby"),
            ]  # fmt: skip
        stage.settle()
        [lease] = first.status().leases
        assert (lease.pid, lease.uid, lease.name) == (os.getpid(), os.geteuid(), "first")
        assert lease.command == own_command()
    stage.settle()
    assert stage.broker.leases() == []


def test_an_operator_holds_no_lease(stage: Stage) -> None:
    with client.connect(stage.path, "status"), client.connect(stage.path, "inspect"):
        assert stage.broker.leases() == []


def test_the_owner_is_known_by_its_nonce_and_pid(stage: Stage) -> None:
    with client.connect(stage.path) as connection:
        assert connection.welcome.owner_id == "0123456789abcdef"
        assert connection.welcome.owner_pid == connection.owner_pid == os.getpid()


@pytest.mark.parametrize(
    ("first", "code", "says"),
    [
        (b"", None, ""),
        (b"garbage", "malformed", "malformed"),
        (b"x" * fdpass.MAX_PACKET_BYTES + b"y" * 100, "malformed", "too large"),
        (protocol.encode(protocol.GetStatus()), "malformed", "expected a hello first"),
        (HELLO.replace(b'"version":1', b'"version":2'), "version", "version 2, the owner 1"),
        (HELLO.replace(b'"version":1', b'"version":2,"new":0'), "version", "version 2"),
        (HELLO.replace(b"worker", b"king"), "malformed", "king"),
    ],
)
def test_a_bad_greeting_gets_one_clear_error_and_the_door(
    stage: Stage, first: bytes, code: str | None, says: str
) -> None:
    with control_client(stage) as sock:
        if first:
            reply = reply_to(sock, first)
            assert isinstance(reply, protocol.Error)
            assert reply.code == code
            assert says in reply.message
        else:
            sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    everybody_is_served(stage)


def test_a_second_hello_and_garbage_later_end_the_connection(stage: Stage) -> None:
    for data in (HELLO, b"{}"):
        with control_client(stage) as sock:
            assert isinstance(reply_to(sock, HELLO), protocol.Welcome)
            reply = reply_to(sock, data)
            assert isinstance(reply, protocol.Error)
            assert sock.recv(1) == b""


def test_what_a_role_may_not_do_is_refused_and_the_connection_stays(stage: Stage) -> None:
    with client.connect(stage.path, "status") as connection:
        with pytest.raises(OwnerUnavailable, match="role status may not send Stop"):
            connection.request_stop()
        assert connection.status().state == "ready"
    assert not stage.stop_asked.is_set()


def test_unknown_allocations_and_blobs_are_refused_and_the_connection_stays(stage: Stage) -> None:
    with client.connect(stage.path) as connection:
        with pytest.raises(ProtocolError, match=r"unknown allocations \[3\]; there are 3"):
            connection.map_allocations([3])
        with pytest.raises(ProtocolError, match="asked for twice"):
            connection.map_allocations([1, 1])
        with pytest.raises(ProtocolError, match=r"unknown blobs \['no'\]"):
            connection.blob("no")
        assert len(connection.describe_allocations()) == 3


def test_stop_is_answered_before_the_supervisor_is_told(stage: Stage) -> None:
    with client.connect(stage.path, "stop") as connection:
        connection.request_stop()
    assert stage.stop_asked.wait(30)


def test_an_owner_is_not_stopped_unless_used_while_another_process_holds_a_lease(
    stage: Stage,
) -> None:
    script = "import sys; from ds4_common import client; c = client.connect(sys.argv[1]); input()"
    other = subprocess.Popen([sys.executable, "-c", script, stage.path], stdin=subprocess.PIPE)
    with client.connect(stage.path, "stop") as asking:
        while not stage.broker.ask(stage.broker.leases):
            assert other.poll() is None
        with pytest.raises(OwnerUnavailable, match=rf"pid {other.pid} \(worker\) uses this owner"):
            asking.request_stop(unless_used=True)
        assert not stage.stop_asked.is_set()
        other.communicate(b"\n")
        stage.settle()
        with client.connect(stage.path, "worker"):  # a lease of its own is no use by another
            asking.request_stop(unless_used=True)
    assert stage.stop_asked.wait(30)


def test_a_silent_greeting_is_dropped_at_its_deadline(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "GREETING_SECONDS", 0.02)
    with control_client(stage) as sock:
        assert sock.recv(1) == b""


def test_a_client_that_does_not_read_is_dropped_and_delays_nobody(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SENDING_SECONDS", 0.05)
    before = open_fds()
    with control_client(stage) as sock:
        sock.setblocking(False)
        sock.send(HELLO)
        request = protocol.encode(protocol.GetAllocations())
        with pytest.raises((BlockingIOError, BrokenPipeError, ConnectionResetError)):
            send_for_ever(sock, request)
        everybody_is_served(stage)
        sock.setblocking(True)  # the next send waits for room, and hears of the hang-up instead
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_for_ever(sock, request)
    stage.settle()
    assert open_fds() <= before


def test_a_flood_of_silent_connections_does_not_keep_others_out(stage: Stage) -> None:
    before = open_fds()
    with ExitStack() as flood:
        for _ in range(300):
            flood.enter_context(control_client(stage))
            flood.enter_context(line_client(stage))
        everybody_is_served(stage)
    stage.settle()
    assert open_fds() <= before


def test_leases_are_limited_but_an_operator_still_gets_in(stage: Stage) -> None:
    stage.broker._native.book.max_leases = 2
    with client.connect(stage.path), client.connect(stage.path):
        with pytest.raises(OwnerUnavailable, match="leases are taken"):
            client.connect(stage.path)
        with client.connect(stage.path, "status") as operator:
            assert len(operator.status().leases) == 2
    stage.settle()
    client.connect(stage.path).close()


def test_when_all_connections_are_in_use_a_newcomer_is_told(stage: Stage) -> None:
    stage.broker._native.book.max_connections = 2
    with (
        client.connect(stage.path),
        client.connect(stage.path),
        pytest.raises(OwnerUnavailable, match="2 connections are open"),
    ):
        client.connect(stage.path)


def test_killed_clients_leave_nothing_behind(stage: Stage) -> None:
    before = open_fds()
    for _ in range(10):
        ready, done = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                connection = client.connect(stage.path)
                connection.map_allocations()
                os.write(done, b"x")
                signal.pause()
            finally:
                os._exit(1)
        assert os.read(ready, 1) == b"x"
        assert [x.pid for x in stage.broker.leases()] == [pid]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(done)
        stage.settle()
        assert stage.broker.leases() == []
    assert open_fds() <= before


def _as_nobody(stage: Stage) -> bytes:
    """What the control socket says to another user, when the file modes let that user in."""
    for path in (os.path.dirname(stage.path), stage.path + ".ctl", stage.path + ".sock"):
        os.chmod(path, 0o777)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            with control_client(stage) as sock, line_client(stage) as line:
                os.write(write, b"%r %r" % (line.recv(64), sock.recv(65536)))
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read, "rb") as file:
        return file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_file_modes_let_it_in(stage: Stage) -> None:
    for folder in Path(stage.path).parents:
        if folder.owner() == "root" and folder.parts[:2] == ("/", "tmp") and len(folder.parts) > 2:
            os.chmod(folder, 0o755)
    said = _as_nobody(stage)
    assert said.startswith(b"b''")
    assert b"forbidden" in said
    assert any("uid 65534" in line for line in stage.log)


def test_a_seat_comes_with_its_listening_socket(stage: Stage) -> None:
    with client.connect(stage.path) as connection:
        listener, fds = connection.listener_and_seat("127.0.0.1", 0, "http")
        with listener, client.connect(stage.path, role="standby") as second:
            again, same = second.listener_and_seat("127.0.0.1", listener.getsockname()[1])
            again.close()
        try:
            assert os.fstat(fds[0]).st_ino == os.fstat(same[0]).st_ino
        finally:
            fdpass.close_all([*fds, *same])


def test_status_counts_listeners_and_requests(stage: Stage) -> None:
    with client.connect(stage.path) as connection, connection.listener("127.0.0.1", 0, "http") as x:
        status = connection.status()
        port = x.getsockname()[1]
    assert [(r.host, r.port, r.name) for r in status.listeners] == [("127.0.0.1", port, "http")]
    assert status.connections == 1
    assert msgspec.json.encode(status)
