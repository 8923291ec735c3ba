"""Clients of a killed worker, at the next one: real sockets, real kills, a fake model."""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds4_common.seat import Seat, Slot
from ds4_worker.http import journal
from ds4_worker.http.parking import Parking
from ds4_worker.http.traffic import UnixCounts
from helpers.descriptors import open_fds
from helpers.fake_server import FakeServer, fake_server, read_all
from helpers.seats import Other, open_seat, other, seat_fds

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*lines, *headers, b"", body])


def generate(*headers: bytes, stream: bool = False, padding: int = 0, tokens: int = 4) -> bytes:
    body = {"prompt": "a", "max_tokens": tokens, "stream": stream, "ignore_eos": True}
    return post(json.dumps(body | {"padding": "x" * padding}).encode(), *headers)


def slots(seat: Seat) -> Iterator[Slot]:
    """Those in use."""
    for lane in range(seat.layout.lanes):
        for index in range(seat.layout.slots_per_lane):
            slot = seat.slot(lane, index)
            if slot.connection:
                yield slot


@dataclass
class Scene:
    """A listening socket and its seat, as an owner holds them."""

    fds: tuple[int, ...]
    listener: socket.socket

    @contextmanager
    def worker(self, steps: int = 0) -> Iterator[Other]:
        """Another process that serves; its model computes `steps` steps and then none."""
        fd = self.listener.fileno()
        with other(self.fds, "serve", str(fd), str(steps), pass_too=fd) as worker:
            yield worker

    @contextmanager
    def next_worker(self) -> Iterator[FakeServer]:
        """The one after it, here, with a model that computes."""
        seat = open_seat(self.fds)
        try:
            with fake_server(listener=self.listener.dup(), parking=Parking(seat)) as server:
                yield server
        finally:
            seat.close()

    def kill(self, worker: Other) -> None:
        """Kills a worker that is not in the middle of sending to a client."""
        self.wait_until_unsure(False)
        worker.kill()

    def wait_until_unsure(self, unsure: bool) -> None:
        """Until it is, or is not, unknown of a Unix client how much was sent to it."""
        seat = open_seat(self.fds)
        while any(slot.sent >> 63 for slot in slots(seat)) != unsure:
            os.sched_yield()
        seat.close()

    def connect(self) -> socket.socket:
        client = socket.socket(self.listener.family)
        client.settimeout(60)
        client.connect(self.listener.getsockname())
        return client


@pytest.fixture(params=["tcp", "unix"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    if request.param == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "http"))
        listener.listen(64)
    with seat_fds() as fds, listener:
        listener.setblocking(False)
        yield Scene(fds, listener)


def answered(connection: socket.socket, text: bytes = b"") -> bool:
    """Whether the next response on a connection is a 200 that holds `text`."""
    with connection.makefile("rb", buffering=0) as reply:  # the next response is not ours
        assert reply.readline() == b"HTTP/1.1 200 OK\r\n"
        size = 0
        while line := reply.readline().strip():
            name, _, value = line.partition(b": ")
            if name.lower() == b"content-length":
                size = int(value)
        body = b""
        while len(body) < size:
            body += reply.read(size - len(body))
        return text in body


def test_an_unanswered_request_is_answered_by_the_next_worker(scene: Scene) -> None:
    with scene.connect() as client, scene.worker() as first:
        client.sendall(generate())
        assert first.line() == "stuck"
        scene.kill(first)
        with scene.next_worker() as server:
            assert answered(client, b"usage")
            assert server.server.inherited == 1


@pytest.mark.parametrize("sent", [0, 1, 20, 70, 140])
def test_half_a_request_is_completed_at_the_next_worker(scene: Scene, sent: int) -> None:
    request = generate()
    with scene.connect() as client, scene.worker() as first, scene.connect() as late:
        client.sendall(request[:sent])
        late.sendall(HEALTH)
        assert answered(late)
        scene.kill(first)
        with scene.next_worker():
            client.sendall(request[sent:])
            assert answered(client, b"usage")


@pytest.mark.parametrize("padding", [16 << 10, 1 << 20, 4 << 20])
def test_a_request_longer_than_a_journals_first_part_survives(scene: Scene, padding: int) -> None:
    request = generate(padding=padding)
    blocks = os.fstat(scene.fds[0]).st_blocks
    with scene.connect() as client, scene.worker() as first:
        client.sendall(request)
        assert first.line() == "stuck"
        scene.kill(first)
        with scene.next_worker():
            assert answered(client, b"usage")
            client.sendall(LAST_HEALTH)
            assert answered(client)
            assert client.recv(1) == b""
    # What was spilled is given back; journals' first parts and the page of locks stay.
    assert os.fstat(scene.fds[0]).st_blocks * 512 - blocks < 1 << 20


def test_a_response_that_had_begun_is_cut_and_not_answered_twice(scene: Scene) -> None:
    with scene.connect() as client, scene.worker(steps=3) as first:
        client.sendall(generate(stream=True, tokens=40))
        assert first.line() == "stuck"
        begun = client.recv(1 << 16)
        assert begun.startswith(b"HTTP/1.1 200")
        scene.kill(first)
        with scene.next_worker() as server:
            assert b"HTTP/1.1" not in read_all(client)
            assert server.server.inherited == 0


def test_an_idle_connection_goes_on_at_the_next_worker(scene: Scene) -> None:
    with scene.connect() as client:
        for _ in range(3):
            with scene.worker() as worker:
                client.sendall(HEALTH)
                assert answered(client)
                scene.kill(worker)
        with scene.next_worker():
            client.sendall(generate())
            assert answered(client, b"usage")


def test_a_connection_that_was_idle_at_two_dead_workers_is_idle_at_the_third(scene: Scene) -> None:
    with scene.connect() as fresh, scene.connect() as used:
        for _ in range(2):
            with scene.worker() as worker, scene.connect() as other_client:
                used.sendall(HEALTH)
                other_client.sendall(HEALTH)
                assert answered(used)
                assert answered(other_client)
                scene.kill(worker)
        with scene.next_worker() as server:
            assert server.request("GET", "/health")[0] == 200
            # `fresh` and `used`; the other client counts too as long as its end was not seen.
            assert server.server.inherited in (2, 3)
            assert server.call(server.server.drain(60)) == 0
            assert fresh.recv(1) == used.recv(1) == b""


def test_only_what_is_unanswered_is_answered_again(scene: Scene) -> None:
    with scene.connect() as client, scene.worker() as first:
        client.sendall(HEALTH + HEALTH + generate() + HEALTH)
        assert first.line() == "stuck"
        assert answered(client, b'"status":"ok"')
        assert answered(client, b'"status":"ok"')
        scene.kill(first)
        with scene.next_worker():
            assert answered(client, b"usage")
            assert answered(client, b'"status":"ok"')
            client.sendall(LAST_HEALTH)
            assert answered(client)
            assert client.recv(1) == b""


def test_a_client_that_waits_for_100_continue_is_not_forgotten(scene: Scene) -> None:
    request = generate(b"Expect: 100-continue")
    head, _, body = request.partition(b"\r\n\r\n")
    with scene.connect() as client, scene.worker() as first:
        client.sendall(head + b"\r\n\r\n")
        go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert client.recv(len(go_on), socket.MSG_WAITALL) == go_on
        scene.kill(first)
        with scene.next_worker():
            assert client.recv(len(go_on), socket.MSG_WAITALL) == go_on
            client.sendall(body)
            assert answered(client, b"usage")


def test_a_refused_request_is_not_refused_twice(scene: Scene) -> None:
    with scene.connect() as client, scene.worker() as first:
        client.sendall(HEALTH + b"NONSENSE\r\n\r\n")
        assert answered(client)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 400")
        scene.kill(first)
        with scene.next_worker():
            assert b"HTTP/1.1" not in read_all(client)


def test_clients_that_left_meanwhile_are_dropped(scene: Scene) -> None:
    with scene.worker() as first:
        with scene.connect() as client:
            client.sendall(generate())
            assert first.line() == "stuck"
            scene.kill(first)
        with scene.next_worker() as server:
            assert server.request("GET", "/health")[0] == 200
            assert server.server.inherited == 0


def test_a_request_over_which_too_many_workers_died_is_given_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_LIVES", 1)
    with scene.connect() as client, scene.connect() as idle:
        with scene.worker() as first:
            idle.sendall(HEALTH)
            assert answered(idle)
            client.sendall(generate())
            assert first.line() == "stuck"
            scene.kill(first)
        with scene.worker() as second:
            assert second.line() == "stuck"
            scene.kill(second)
        with scene.next_worker():
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 503")
            idle.sendall(HEALTH)
            assert answered(idle)


def test_a_worker_that_drains_leaves_the_rest_to_its_successor(scene: Scene) -> None:
    with scene.next_worker() as old, scene.connect() as idle, scene.connect() as half:
        idle.sendall(HEALTH)
        assert answered(idle)
        half.sendall(LAST_HEALTH[:20])
        with scene.next_worker() as new:
            assert old.call(old.server.drain(0.0, successor=True)) == 0
            while new.server.inherited < 2:
                new.loop.call_soon_threadsafe(new.server.look)
                assert new.request("GET", "/health")[0] == 200
            idle.sendall(LAST_HEALTH)
            half.sendall(LAST_HEALTH[20:])
            assert read_all(idle).startswith(b"HTTP/1.1 200")
            assert read_all(half).startswith(b"HTTP/1.1 200")


def test_copies_of_ended_connections_do_not_pile_up_behind_a_long_one(scene: Scene) -> None:
    with scene.next_worker() as server, scene.connect() as long:
        long.sendall(HEALTH)
        assert answered(long)
        for _ in range(300):
            assert server.raw(LAST_HEALTH).startswith(b"HTTP/1.1 200")
        park = server.server._parking
        assert park is not None
        (lane,) = park._lanes
        assert len(lane._queue) <= 2 * len(lane.live) + 65
        long.sendall(LAST_HEALTH)
        assert read_all(long).startswith(b"HTTP/1.1 200")


def test_a_full_lane_costs_the_copy_and_not_the_client(scene: Scene) -> None:
    with socket.socket(fileno=os.dup(scene.fds[2])) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's minimum
    with scene.next_worker() as server:
        clients = [scene.connect() for _ in range(20)]
        for client in clients:
            client.sendall(LAST_HEALTH)
            assert answered(client)
            client.close()
        idle = [scene.connect() for _ in range(20)]
        assert server.request("GET", "/health")[0] == 200
        park = server.server._parking
        assert park is not None
        assert park.unparked > 0
        for client in idle:
            client.close()


def test_with_every_lane_taken_clients_are_served_without_copies(scene: Scene) -> None:
    lanes = [str(3 + lane) for lane in range(4)]
    with other(scene.fds, "hold", *lanes), scene.next_worker() as server:
        assert server.raw(LAST_HEALTH).startswith(b"HTTP/1.1 200")
        park = server.server._parking
        assert park is not None
        assert park.unparked == 1


def test_where_the_kernel_cannot_count_unix_clients_are_served_without_copies(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(counts: UnixCounts) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(UnixCounts, "start", refuse)
    with scene.next_worker() as server:
        assert server.raw(LAST_HEALTH).startswith(b"HTTP/1.1 200")
        park = server.server._parking
        assert park is not None
        assert park.unparked == (scene.listener.family == socket.AF_UNIX)


def test_a_worker_leaves_no_descriptor_behind(scene: Scene) -> None:
    counts = []
    for _ in range(3):
        with scene.next_worker() as server, scene.connect() as client:
            client.sendall(HEALTH)
            assert answered(client)
        del server
        gc.collect()  # a seat's mapping holds a descriptor as long as anything refers to it
        counts.append(len(open_fds()))
    assert max(counts[1:]) <= counts[0]


def test_a_client_that_read_slowly_goes_on_once_it_has_read_all(scene: Scene) -> None:
    unix = scene.listener.family == socket.AF_UNIX
    count = 15  # more than the kernel's buffers hold
    with scene.connect() as client, scene.worker() as first:
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * count)
        if unix:
            scene.wait_until_unsure(True)
        for _ in range(count):
            assert answered(client)
        client.sendall(HEALTH)
        assert answered(client)
        scene.kill(first)
        with scene.next_worker() as server:
            client.sendall(HEALTH)
            assert answered(client)
            assert server.server.inherited == 1


def test_a_unix_client_is_cut_when_nobody_knows_what_was_sent_to_it(scene: Scene) -> None:
    unix = scene.listener.family == socket.AF_UNIX  # of TCP the kernel knows
    with scene.connect() as client, scene.worker() as first:
        client.sendall(HEALTH)
        assert answered(client)
        scene.kill(first)
        seat = open_seat(scene.fds)
        (slot,) = slots(seat)
        slot.sent |= 1 << 63  # as if killed while it sent
        seat.close()
        with scene.next_worker() as server:
            if unix:
                assert read_all(client) == b""
            else:
                client.sendall(HEALTH)
                assert answered(client)
            assert server.server.inherited == (not unix)


def test_seats_of_two_workers_are_the_same_memory(scene: Scene) -> None:
    first, second = open_seat(scene.fds), open_seat(scene.fds)
    assert isinstance(first, Seat)
    first.slot(1, 5).received = 77
    assert second.slot(1, 5).received == 77
    first.close()
    second.close()
