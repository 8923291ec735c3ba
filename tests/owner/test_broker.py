"""Both sockets under good, slow, hostile and vanishing clients."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common import client, fdpass, protocol
from ds4_common.errors import (
    AddressInUse,
    IdentityError,
    OwnerUnavailable,
    ProtocolError,
    UsageError,
)
from ds4_common.identity import ShardStat
from ds4_common.protocol import FileRecord, ModelRecord
from ds4_owner import answers, desks, native_desk, transport
from ds4_owner.answers import file_record
from ds4_owner.state import Desk, Kept
from ds4_owner.transport import Client, Transport
from helpers.brokers import Stage, broker, broker_process, content, own_command
from helpers.descriptors import open_fds

HELLO = protocol.encode(protocol.Hello(protocol.PROTOCOL_VERSION, "worker", "t", "test"))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    before, threads = open_fds(), set(threading.enumerate())
    with broker(tmp_path) as made:
        made.ready()
        yield made
    assert open_fds() <= before
    assert set(threading.enumerate()) <= threads
    assert os.listdir(tmp_path) == []


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


def send_for_ever(sock: socket.socket, data: bytes) -> None:
    while True:
        sock.send(data)


def attach_for_ever(leases: ExitStack, path: str) -> None:
    while True:
        leases.enter_context(client.connect(path))


def everybody_is_served(stage: Stage) -> None:
    """The proof that nothing was hurt: both protocols still hand out the right bytes."""
    n_bytes, fd = client.fetch_allocation(stage.path + ".sock", 1)
    assert os.pread(fd, len(content(1)), 0) == content(1)
    assert n_bytes == os.fstat(fd).st_size
    os.close(fd)
    with client.connect(stage.path) as connection:
        mapped = connection.map_allocations([2])
        assert bytes(mapped[2].view[: len(content(2))]) == content(2)
        mapped[2].close()


# The line protocol


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


# The native protocol


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


# Nothing that a client says breaks the broker

words = st.text(max_size=20) | st.sampled_from(
    ["/tmp/\0x", "127.0.0.1\0", "::1", "\x1b[2J", "x" * 64]
)
numbers = st.integers(-(2**63), 2**63)
fields = st.fixed_dictionaries(
    {"type": st.sampled_from(["hello", "get_allocations", "get_blobs", "get_listener", "wait_ready",
                              "get_status", "stop", "welcome", ""])},
    optional={
        "version": st.just(1) | numbers,
        "role": st.sampled_from(["worker", "inspect", "stop", "king"]),
        "name": words, "command": words, "host": words,
        "path": st.sampled_from(["", "relative", "/tmp/\0x", "/no/folder/x", "/" + "x" * 200]),
        "port": st.integers(-1, 70000), "seconds": st.floats(-1, 0.001) | st.none(),
        "ids": st.lists(numbers, max_size=5) | st.none(), "with_fds": st.booleans(),
        "names": st.lists(words, max_size=5), "surprise": words,
    },
)  # fmt: skip


def test_no_sequence_of_packets_breaks_the_broker(stage: Stage) -> None:
    @settings(deadline=None)
    @given(
        st.booleans(),
        st.lists(fields.map(msgspec.json.encode) | st.binary(max_size=50), max_size=6),
    )
    def converse(polite: bool, packets: list[bytes]) -> None:
        with control_client(stage) as sock:
            try:
                for packet in [HELLO, *packets] if polite else packets:
                    sock.send(packet or b"?")
            except (BrokenPipeError, ConnectionResetError):
                pass  # it has heard enough
        with line_client(stage) as sock:
            sock.sendall(packets[0][:60] + b"\n" if packets else b"\n")
            sock.recv(64)

    converse()
    stage.settle()
    everybody_is_served(stage)
    assert stage.broker._thread.is_alive()


def test_replies_fit_a_packet_whatever_clients_call_themselves(stage: Stage) -> None:
    nasty = protocol.Hello(1, "worker", "\U0001f600" * 64, '"\\' * 100)
    with ExitStack() as leases:
        for _ in range(native_desk.MAX_LEASES):
            sock = leases.enter_context(control_client(stage))
            assert isinstance(reply_to(sock, protocol.encode(nasty)), protocol.Welcome)
        status = reply_to(sock, protocol.encode(protocol.GetStatus()))
        assert isinstance(status, protocol.Status)
        assert len(status.leases) == native_desk.MAX_LEASES
        last = status.leases[-1]
        assert last.name == "\U0001f600" * 16
        huge = b'{"type":"get_status","' + b"x" * 100_000 + b'":1}'
        assert isinstance(reply_to(sock, huge), protocol.Error)


def test_control_characters_of_a_client_do_not_reach_a_terminal(stage: Stage) -> None:
    with client.connect(stage.path, "worker", "\x1b[2Jx\n"):
        assert stage.broker.leases()[0].name == "?[2Jx?"


def test_a_model_of_a_thousand_shards_with_odd_names_is_announced(tmp_path: Path) -> None:
    odd = os.fsdecode(b"/models/\xff/" + b"m" * 200)
    files = [FileRecord(odd, 1, 2, 3, 4, 5)] * 1000
    with broker(tmp_path) as stage:
        stage.ready(models=(ModelRecord("base", 1, "0" * 16, files),))
        with client.connect(stage.path, "status") as connection:
            [model] = connection.welcome.models
        assert model.files[0].path.startswith("/models/\ufffd/")
        assert len(model.files) + model.more_files == 1000
        with pytest.raises(IdentityError, match="and 996 more"):
            client.connect(stage.path)


def test_a_reply_that_cannot_be_sent_costs_only_its_client(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = protocol.Error("busy", "x" * fdpass.MAX_PACKET_BYTES)
    monkeypatch.setattr(stage.broker._native, "_status", lambda: answers.Packet(big))
    with client.connect(stage.path) as connection:
        with pytest.raises(OwnerUnavailable, match="closed the connection"):
            connection.status()
    assert any("cannot send to it: packet of" in line for line in stage.log)
    everybody_is_served(stage)


def test_too_many_descriptors_in_flight_are_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, refusals = fdpass.send, [errno.ETOOMANYREFS] * 2

    def busy_send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
        if fds and refusals:
            raise OSError(refusals.pop(), "too many references")
        send(sock, data, fds)

    monkeypatch.setattr(fdpass, "send", busy_send)
    everybody_is_served(stage)
    assert refusals == []


def test_a_defect_in_the_broker_stops_the_owner_instead_of_leaving_it_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    with broker(tmp_path) as stage:
        monkeypatch.setattr(answers, "welcome", None)
        with pytest.raises(OwnerUnavailable):
            client.connect(stage.path)
        assert stage.stop_asked.wait(30)
    assert [hook.exc_type for hook in seen] == [TypeError]
    assert os.listdir(tmp_path) == []


# Out of descriptors


def test_without_descriptors_newcomers_are_told_and_the_others_go_on(stage: Stage) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with client.connect(stage.path, "status") as old, ExitStack() as taken:
        newcomer = taken.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        while (fd := os.dup(0)) < highest:
            taken.callback(os.close, fd)
        taken.callback(os.close, fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, limits[1]))
        try:
            newcomer.connect(stage.path + ".ctl")
            reply = protocol.decode_reply(newcomer.recv(65536))
            assert old.status().state == "ready"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(reply, protocol.Error)
    assert (reply.code, "no file descriptors left" in reply.message) == ("busy", True)
    everybody_is_served(stage)


def test_the_reserve_survives_when_the_last_descriptor_goes_to_a_newcomer(stage: Stage) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as taken:
        newcomers = [
            taken.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            for _ in range(5)
        ]
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        while (fd := os.dup(0)) < highest:
            taken.callback(os.close, fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, limits[1]))
        os.close(fd)  # room for exactly one newcomer
        try:
            for newcomer in newcomers:
                newcomer.settimeout(30)
                newcomer.connect(stage.path + ".ctl")
            replies = [reply_to(newcomers[0], HELLO)]
            replies += [protocol.decode_reply(newcomer.recv(65536)) for newcomer in newcomers[1:]]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(replies[0], protocol.Welcome)
    assert all(isinstance(reply, protocol.Error) for reply in replies[1:])
    everybody_is_served(stage)


def test_accepting_pauses_when_even_the_reserve_is_lost_and_goes_on_later(stage: Stage) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = stage.broker._transport
    with ExitStack() as taken:
        newcomer = taken.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        os.close(loop._reserve)
        loop._reserve = -1
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        while (fd := os.dup(0)) < highest:
            taken.callback(os.close, fd)
        taken.callback(os.close, fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, limits[1]))
        try:
            newcomer.connect(stage.path + ".ctl")
            stage.settle()
            assert loop._paused_until is not None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert isinstance(reply_to(newcomer, HELLO), protocol.Welcome)


def test_a_socket_that_is_added_while_accepting_pauses_is_served_afterwards() -> None:
    class Greeter:
        max_request_bytes = 64
        desk: Desk = "line"

        def opened(self, client: Client) -> bool:
            loop.send(client, b"hello")
            return True

        def received(self, client: Client, data: bytes, intact: bool) -> None:
            loop.drop(client)

        def expired(self, client: Client) -> None: ...

        def closed(self, client: Client) -> None: ...

        def exhausted(self) -> bytes:
            return b""

        def keep(self, client: Client) -> Kept:
            return Kept()

        def take(self, client: Client, kept: Kept) -> None: ...

    loop = Transport(lambda line: None)
    with ExitStack() as cleanup:
        first, late = (cleanup.enter_context(socket.create_server(("", 0))) for _ in range(2))
        for listener in (first, late):
            listener.setblocking(False)
        loop.listen(first, Greeter())
        loop._pause(OSError(errno.ENOMEM, "no memory"))
        loop.listen(late, Greeter())
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            for listener in (first, late):
                with socket.create_connection(listener.getsockname(), timeout=60) as client:
                    assert client.recv(64) == b"hello"
        finally:
            loop.stop()
            thread.join()
            loop.close()
            loop.release()


def test_an_owner_with_32_descriptors_serves_as_many_as_it_can(tmp_path: Path) -> None:
    path = tmp_path / "w"
    with broker_process(path, allocations=12, open_file_limit=32):
        with ExitStack() as leases:
            first = leases.enter_context(client.connect(str(path)))
            with pytest.raises(OwnerUnavailable, match="no file descriptors left"):
                attach_for_ever(leases, str(path))
            assert first.status().leases
        with client.connect(str(path)) as connection:
            mapped = connection.map_allocations()
            assert bytes(mapped[11].view[:13]) == content(11)


# Loading


def test_a_worker_sees_loading_go_on_and_gets_nothing_before_it_is_over(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        stage.broker.set_progress("reading", 10, 100)
        with pytest.raises(OwnerUnavailable, match="still loading \\(reading, 10 of 100 bytes\\)"):
            client.connect(stage.path)
        with client.connect(stage.path, wait_seconds=None) as connection:
            assert connection.welcome.state == "loading"
            with pytest.raises(OwnerUnavailable, match="still loading"):
                connection.map_allocations()
            assert connection.wait_ready(0.0).progress.done_bytes == 10
        assert not os.path.exists(stage.path + ".sock")


def test_those_who_wait_are_answered_when_loading_ends(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        waiting = threading.Thread(target=stage.ready)
        with client.connect(stage.path, wait_seconds=None) as connection:
            waiting.start()
            welcome = connection.wait_ready(60)
            waiting.join()
            assert (welcome.state, welcome.allocation_count) == ("ready", 3)
            connection.map_allocations()


def test_those_who_wait_hear_why_loading_failed_even_when_the_owner_stops_at_once(
    tmp_path: Path,
) -> None:
    with broker(tmp_path) as stage, control_client(stage) as sock:
        assert isinstance(reply_to(sock, HELLO), protocol.Welcome)
        sock.send(protocol.encode(protocol.WaitReady(60)))
        stage.settle()
        stage.broker.failed("model.gguf: truncated")
        stage.broker.stop()
        reply = protocol.decode_reply(sock.recv(65536))
        assert isinstance(reply, protocol.Welcome)
        assert (reply.state, reply.reason) == ("failed", "model.gguf: truncated")


def test_a_failed_owner_gives_its_reason_to_whoever_comes_later(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        stage.broker.failed("no room")
        with pytest.raises(OwnerUnavailable, match="failed to load: no room"):
            client.connect(stage.path)
        with client.connect(stage.path, wait_seconds=None) as connection:
            with pytest.raises(OwnerUnavailable, match="no room"):
                connection.blob("tokenizer")


def test_a_request_while_waiting_is_a_breach_and_a_hangup_is_noticed(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        with control_client(stage) as sock:
            reply_to(sock, HELLO)
            sock.send(protocol.encode(protocol.WaitReady(60)))
            reply = reply_to(sock, protocol.encode(protocol.GetStatus()))
            assert isinstance(reply, protocol.Error)
        with control_client(stage) as sock:
            reply_to(sock, HELLO)
            sock.send(protocol.encode(protocol.WaitReady(60)))
        stage.settle()
        assert stage.broker.leases() == []


# Identity


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Stage, Path]]:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    record = file_record(str(file), ShardStat.capture(file))
    run = tmp_path / "run"
    run.mkdir()
    with broker(run) as stage:
        stage.ready(models=(ModelRecord("base", 7, "0" * 16, [record]),))
        client.connect(stage.path).close()
        yield stage, file


def rewrite_and_restore_mtime(file: Path) -> None:
    """Other bytes of equal size in the same inode, with the old modification time."""
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of some file systems is coarse
        file.write_bytes(b"WEIGHTS")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda file: file.write_bytes(b"other weights"), "size in bytes 7 -> 13"),
        (rewrite_and_restore_mtime, r"loaded: base: \S+: change time \(ns\)"),
        (lambda file: os.utime(file, ns=(0, 0)), "modification time"),
        (lambda file: file.unlink(), "No such file"),
    ],
)
def test_a_model_file_that_changed_is_refused_by_name_but_operators_get_in(
    served: tuple[Stage, Path], change: object, says: str
) -> None:
    stage, file = served
    assert callable(change)
    change(file)
    with pytest.raises(IdentityError, match=says) as error:
        client.connect(stage.path)
    assert str(file) in str(error.value)
    for role in ("status", "stop"):
        client.connect(stage.path, role).close()


# Claiming paths


def test_a_second_owner_of_the_same_manifest_is_refused(stage: Stage) -> None:
    with (
        pytest.raises(AddressInUse, match="somebody answers there"),
        broker(Path(stage.path).parent),
    ):
        pass
    everybody_is_served(stage)


def test_what_a_killed_owner_left_is_replaced_and_said(tmp_path: Path) -> None:
    with broker_process(tmp_path / "w") as process:
        process.kill()
        process.wait()
        assert sorted(os.listdir(tmp_path)) == ["w", "w.ctl", "w.sock"]
        with pytest.raises(OwnerUnavailable, match=f"owner pid {process.pid}, which is gone"):
            client.connect(str(tmp_path / "w"))
    with broker(tmp_path) as stage:
        assert stage.log == [f"removing stale manifest {stage.path} of owner pid {process.pid}"]
        assert os.listdir(tmp_path) == ["w.ctl"]
        stage.ready()
        everybody_is_served(stage)


def test_a_damaged_manifest_is_removed_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_text("DS4_WEIGHT_SERVER_VMM_V1\nowner 1")
    with broker(tmp_path) as stage:
        assert "removing damaged manifest" in stage.log[0]
    path.write_text("my thesis")
    with pytest.raises(UsageError, match="not a manifest"), broker(tmp_path):
        pass
    assert os.listdir(tmp_path) == ["w"]


def test_a_manifest_whose_broker_answers_elsewhere_is_not_stale(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "elsewhere"))
        other.listen()
        (tmp_path / "w").write_text(
            f"DS4_WEIGHT_SERVER_VMM_V1\nowner 1 0 base -\nbroker {tmp_path}/elsewhere\n"
            "alloc 0 base 9 0 9 9\n"
        )
        with pytest.raises(AddressInUse, match="still answers"), broker(tmp_path):
            pass


def test_sockets_are_for_their_user_only(stage: Stage) -> None:
    for suffix in (".ctl", ".sock"):
        assert os.stat(stage.path + suffix).st_mode & 0o777 == 0o600


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
