"""Messages, the line protocol, and packets with descriptors."""

from __future__ import annotations

import array
import fcntl
import os
import resource
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common import fdpass, protocol
from ds4_common.errors import ProtocolError
from helpers.descriptors import open_fds

REQUESTS: list[protocol.Request] = [
    protocol.Hello(1, "worker", "w", "ds4-server --port 1"),
    protocol.GetAllocations(),
    protocol.GetAllocations([3, 1], False),
    protocol.GetBlobs(["tokenizer"]),
    protocol.GetListener(host="127.0.0.1", port=8000, name="http"),
    protocol.GetListener(path="/run/x"),
    protocol.WaitReady(1.5),
    protocol.GetStatus(),
    protocol.Stop(),
]
ALLOCATION = protocol.AllocationRecord(
    0, "base", 9, 0, 9, 9, 4096, "0" * 32, protocol.ArtifactRecord(64, 1, 2, 3, "x")
)
LISTENER = protocol.ListenerRecord("::1", 80, "", "http")
REPLIES: list[protocol.Reply] = [
    protocol.Welcome(
        1, 2, "id", "loading", "", protocol.Progress("read", 1, 2), "memfd",
        [protocol.ModelRecord("base", 9, "", [protocol.FileRecord("/m", 1, 2, 3, 4, 5)])],
        [protocol.BlobRecord("tokenizer", 3, "")], 1, 4096,
    ),
    protocol.Allocations([ALLOCATION], 3),
    protocol.Blobs([protocol.BlobRecord("tokenizer", 3, "")]),
    protocol.Listener(LISTENER),
    protocol.Status("ready", 1.0, 2, 3, "/s", [
        protocol.LeaseRecord(1, 2, "worker", "n", "c", 0.5)], [LISTENER]),
    protocol.Stopping(),
    protocol.Error("busy", "no room"),
]  # fmt: skip


def test_every_message_survives_the_round_trip() -> None:
    assert [protocol.decode_request(protocol.encode(x)) for x in REQUESTS] == REQUESTS
    assert [protocol.decode_reply(protocol.encode(x)) for x in REPLIES] == REPLIES


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_a_request_with_an_unknown_field_is_refused(message: protocol.Request) -> None:
    fields = msgspec.to_builtins(message) | {"surprise": 1}
    with pytest.raises(ProtocolError, match="surprise"):
        protocol.decode_request(msgspec.json.encode(fields))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"type":"welcome"}',
        b'{"type":"get_status"} trailing',
        b'{"type":"hello","version":1,"role":"admin","name":"","command":""}',
        b'{"type":"get_allocations","ids":["1"]}',
        b'{"type":"get_listener","port":65536}',
        b'{"type":"wait_ready","seconds":-1}',
        b'{"type":"wait_ready","seconds":1e9}',
        b"\xff\xfe",
    ],
)
def test_a_malformed_request_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_request(data)


@given(st.binary() | st.text().map(str.encode))
def test_arbitrary_bytes_are_never_another_error(data: bytes) -> None:
    for decode in (protocol.decode_request, protocol.decode_reply):
        with pytest.raises(ProtocolError):
            decode(data)
    protocol.hello_version(data)


def test_the_version_of_an_unreadable_hello_is_found() -> None:
    newer = b'{"type":"hello","version":7,"role":"worker","name":"","command":"","extra":1}'
    assert protocol.hello_version(newer) == 7
    assert protocol.hello_version(b'{"type":"stop","version":7}') is None


@given(st.integers(0, 2**32))
def test_get_lines_survive_the_round_trip(number: int) -> None:
    assert protocol.parse_get(protocol.format_get(number)) == number


@given(st.binary(max_size=80))
def test_only_get_lines_are_get_lines(data: bytes) -> None:
    number = protocol.parse_get(data)
    assert number is None or (data[:4], data[-1:], int(data[4:-1])) == (b"GET ", b"\n", number)


@pytest.mark.parametrize(
    "line", [b"GET 1", b"GET  1\n", b"GET -1\n", b"GET 1\r\n", b"get 1\n", b"GET \n"]
)
def test_lines_that_are_nearly_right_are_not(line: bytes) -> None:
    assert protocol.parse_get(line) is None


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.integers(0, 5)), max_size=8))
def test_every_packet_keeps_its_own_bytes_and_descriptors(
    packets: list[tuple[bytes, int]],
) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        for data, count in packets:
            fdpass.send(left, data, [left.fileno()] * count)
        for data, count in packets:
            received, fds = fdpass.receive(right)
            fdpass.close_all(fds)
            assert (received, len(fds)) == (data, count)


def test_received_descriptors_are_the_same_files_and_close_on_exec(pair: Pair) -> None:
    with open(os.devnull) as file:
        fdpass.send(pair[0], b"x", [file.fileno()])
        _, [fd] = fdpass.receive(pair[1])
        assert os.path.sameopenfile(fd, file.fileno())
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)


def test_250_descriptors_fit_one_packet_and_251_are_refused(pair: Pair) -> None:
    fd = pair[0].fileno()
    fdpass.send(pair[0], b"x", [fd] * fdpass.MAX_FDS)
    _, fds = fdpass.receive(pair[1])
    fdpass.close_all(fds)
    assert len(fds) == 250
    with pytest.raises(ProtocolError, match="251 descriptors"):
        fdpass.send(pair[0], b"x", [fd] * 251)


def test_the_largest_packet_arrives_and_a_larger_one_is_refused(pair: Pair) -> None:
    data = b"x" * fdpass.MAX_PACKET_BYTES
    fdpass.send(pair[0], data)
    assert fdpass.receive(pair[1]) == (data, [])
    with pytest.raises(ProtocolError, match="at most"):
        fdpass.send(pair[0], data + b"x")


def test_a_packet_that_is_too_large_is_refused_with_its_descriptors_closed(pair: Pair) -> None:
    before = open_fds()
    fdpass.send(pair[0], b"x" * 65, [pair[0].fileno()] * 3)
    with pytest.raises(ProtocolError, match="larger than 64"):
        fdpass.receive(pair[1], 64)
    assert open_fds() <= before


def test_a_set_of_descriptors_that_was_cut_is_refused_and_closed(pair: Pair) -> None:
    before = open_fds()
    fdpass.send(pair[0], b"x", [pair[0].fileno()] * 10)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    spare = os.dup(0)  # the lowest free number
    os.close(spare)
    taken = [os.dup(0) for _ in range(max(0, highest - spare))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, *taken, 0) + 5, limits[1]))
    try:
        with pytest.raises(ProtocolError, match="descriptors were cut"):
            fdpass.receive(pair[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        fdpass.close_all(taken)
    assert open_fds() <= before


def test_ancillary_data_of_another_kind_is_refused_and_descriptors_closed(pair: Pair) -> None:
    before = open_fds()
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    fds = array.array("i", [pair[0].fileno()])
    pair[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    with pytest.raises(ProtocolError, match="ancillary"):
        fdpass.receive(pair[1])
    assert open_fds() <= before


def test_sending_to_nobody_raises_instead_of_killing_the_process(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        fdpass.send(pair[0], b"x")
