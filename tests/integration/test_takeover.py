"""Workers follow one another: takeover, standby, zygote, and what clients notice of it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ds4_worker.bench.steady import Tally, steady_load
from helpers import stack
from helpers.stack import Program

HEALTH = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}


class Cast:
    """Starts workers of one address and ends those that are left."""

    def __init__(self, manifest: Path, cleanup: ExitStack) -> None:
        self.port = stack.free_port()
        self._manifest = manifest
        self._cleanup = cleanup

    def start(self, *flags: str, until: str = "ready http", **environment: str) -> Program:
        program = Program.start(
            "ds4_worker.cli",
            *("--manifest", str(self._manifest), "--port", str(self.port), *flags),
            **environment,
        )
        self._cleanup.callback(self._end, program)
        program.wait_for(until)
        return program

    def _end(self, program: Program) -> None:
        if program.process.poll() is None:
            program.process.kill()
        program.wait()

    def health(self) -> dict[str, object]:
        status, body = stack.request(self.port, "GET", "/health")
        assert status == 200
        assert isinstance(body, dict)
        return body

    def pid(self) -> int:
        pid = self.health()["pid"]
        assert isinstance(pid, int)
        return pid


@pytest.fixture
def cast(manifest: Path) -> Iterator[Cast]:
    with ExitStack() as cleanup:
        yield Cast(manifest, cleanup)


def test_a_new_worker_takes_over_and_the_old_one_finishes_its_streams(cast: Cast) -> None:
    old = cast.start("--drain-seconds", "60")
    with stack.connected(cast.port) as client:
        body = json.dumps(LONG).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\n"
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        stream = client.makefile("rb")
        assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
        new = cast.start()
        assert cast.pid() == new.process.pid
        old.wait_for("another worker takes over")
        assert b"data: [DONE]" in stream.read()
        assert old.wait() == 0


def test_an_idle_connection_goes_from_worker_to_worker(cast: Cast) -> None:
    pids = []
    cast.start()
    with stack.connected(cast.port) as client, client.makefile("rb") as reply:
        for _ in range(3):
            client.sendall(HEALTH)
            assert reply.readline() == b"HTTP/1.1 200 OK\r\n"
            while line := reply.readline().strip():
                size = int(line.split()[1]) if line.startswith(b"Content-Length") else 0
            pids.append(json.loads(reply.read(size))["pid"])
            cast.start()
    assert len(set(pids)) == 3


def test_a_worker_that_may_not_take_over_refuses_clearly(cast: Cast) -> None:
    old = cast.start()
    new = cast.start("--no-takeover", until="serves there")
    assert new.wait() == 1
    assert f"worker pid {old.process.pid} serves there" in new.text
    assert len(new.lines) == 1
    assert cast.pid() == old.process.pid


def test_a_worker_that_cannot_start_leaves_the_old_one_serving(cast: Cast) -> None:
    old = cast.start()
    assert cast.start("--ctx", "1000000", until="has a context").wait() == 2
    assert cast.pid() == old.process.pid


def test_a_stopped_worker_is_named_and_goes_on_when_it_is_continued(cast: Cast) -> None:
    old = cast.start()
    old.process.send_signal(signal.SIGSTOP)
    try:
        new = cast.start(until="does not make room")
        assert new.wait() == 1
        assert f"worker pid {old.process.pid} does not make room" in new.text
    finally:
        old.process.send_signal(signal.SIGCONT)
    assert cast.pid() == old.process.pid


def test_a_standby_serves_when_the_worker_is_killed_or_stopped(cast: Cast) -> None:
    first = cast.start()
    second = cast.start("--standby", until="standby for")
    third = cast.start("--standby", until="standby for")
    assert cast.pid() == first.process.pid
    first.process.kill()
    assert cast.pid() == second.process.pid
    assert second.stop() == 0
    assert cast.pid() == third.process.pid


def test_a_standby_lets_a_worker_that_takes_over_go_first(cast: Cast) -> None:
    first = cast.start()
    standby = cast.start("--standby", until="standby for")
    for _ in range(3):
        new = cast.start()
        assert first.wait() == 0
        assert cast.pid() == new.process.pid
        first = new
    first.process.kill()
    assert cast.pid() == standby.process.pid


def test_a_killed_standby_or_newcomer_harms_nobody(cast: Cast) -> None:
    first = cast.start()
    cast.start("--standby", until="standby for").process.kill()
    second = cast.start("--standby", until="standby for")
    assert cast.pid() == first.process.pid
    first.process.kill()
    assert cast.pid() == second.process.pid


def test_the_owners_books_show_what_each_worker_is(cast: Cast, manifest: Path) -> None:
    from ds4_common import client

    first = cast.start("--name", "blue")
    standby = cast.start("--name", "blue", "--standby", until="standby for")
    with client.connect(str(manifest), role="status") as connection:

        def roles() -> dict[int, str]:
            leases = connection.status().leases
            assert {lease.name for lease in leases} == {"blue"}
            return {lease.pid: lease.role for lease in leases}

        assert roles() == {first.process.pid: "worker", standby.process.pid: "standby"}
        first.stop(signal.SIGKILL)
        assert cast.pid() == standby.process.pid
        while roles() != {standby.process.pid: "worker"}:
            assert cast.pid() == standby.process.pid


def test_two_builds_side_by_side_have_an_address_and_a_lease_each(
    cast: Cast, manifest: Path
) -> None:
    from ds4_common import client

    a = cast.start("--name", "a")
    other_port = stack.free_port()
    with stack.worker(manifest, other_port, "--name", "b") as b:
        assert cast.pid() == a.process.pid
        assert stack.request(other_port, "GET", "/health")[1]["pid"] == b.process.pid
        with client.connect(str(manifest), role="status") as connection:
            assert {lease.name for lease in connection.status().leases} == {"a", "b"}
    assert cast.pid() == a.process.pid


# --- the zygote


@pytest.mark.parametrize("standby", [(), ("--standby",)])
def test_a_zygote_replaces_its_workers(cast: Cast, standby: tuple[str, ...]) -> None:
    zygote = cast.start("--zygote", *standby)
    seen = set()
    for number in range(4):
        zygote.wait_for_count("standby for", number + 1)
        seen.add(pid := cast.pid())
        os.kill(pid, signal.SIGKILL)
    seen.add(cast.pid())
    assert len(seen) == 5
    assert zygote.process.pid not in seen
    zygote.wait_for_count("standby for", 5)
    assert zygote.stop() == 0
    assert "cut off" not in zygote.text


def test_a_zygote_replaces_a_standby_that_was_killed(cast: Cast) -> None:
    zygote = cast.start("--zygote", "--standby")
    pid = int(zygote.wait_for("standby for").rpartition("pid=")[2])
    os.kill(pid, signal.SIGKILL)
    zygote.wait_for_count("standby for", 2)
    assert zygote.stop() == 0


def test_a_zygote_ends_when_another_worker_took_over(cast: Cast) -> None:
    zygote = cast.start("--zygote")
    zygote.wait_for("standby for")
    new = cast.start()
    assert zygote.wait() == 0
    assert cast.pid() == new.process.pid


def test_a_zygote_whose_worker_cannot_start_ends_with_its_code(cast: Cast) -> None:
    assert cast.start("--zygote", "--ctx", "1000000", until="has a context").wait() == 2


def test_a_worker_outlives_its_zygote_and_the_next_one_takes_over(cast: Cast) -> None:
    zygote = cast.start("--zygote")
    zygote.wait_for("standby for")
    pid = cast.pid()
    zygote.process.kill()  # what it forked keeps its stderr open: not for wait()
    assert cast.pid() == pid
    following = cast.start("--zygote")
    assert cast.pid() != pid
    assert following.stop() == 0


# --- under load

Restart = Callable[[Cast, Program], Program]
# However slow the machine is: nothing is turned away, nothing is cut off at the end.
PATIENT = ("--max-queue", "1000", "--drain-seconds", "120")


def take_over(cast: Cast, old: Program) -> Program:
    new = cast.start(*PATIENT)
    assert old.wait() == 0, old.text
    return new


def kill_and_start(cast: Cast, old: Program) -> Program:
    old.stop(signal.SIGKILL)
    return cast.start(*PATIENT)


def restarts_under_load(cast: Cast, restart: Restart, times: int, per_second: float) -> Tally:
    draw = random.Random(7)
    worker = cast.start(*PATIENT)
    with steady_load(cast.port, per_second) as tally:
        for _ in range(times):
            worker = restart(cast, worker)
            answers = len(tally.outcomes) + draw.randrange(12)
            while len(tally.outcomes) < answers:  # the load goes on, so this ends
                time.sleep(0.001)
    assert worker.stop() == 0
    return tally


@pytest.mark.parametrize("restart", [take_over, kill_and_start])
def test_restarts_under_load_lose_no_request(cast: Cast, restart: Restart) -> None:
    tally = restarts_under_load(cast, restart, 10, 20)
    assert tally.refused == []
    if restart is take_over:
        assert tally.lost == tally.cut == []
    else:  # one may be between `accept` and `sendmsg` (docs/restart.md)
        assert len(tally.lost) <= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("restart", [take_over, kill_and_start])
def test_two_hundred_restarts_under_fifty_requests_per_second_lose_none(
    cast: Cast, restart: Restart
) -> None:
    tally = restarts_under_load(cast, restart, 200, 50)
    assert tally.lost == []
    assert tally.refused == []
