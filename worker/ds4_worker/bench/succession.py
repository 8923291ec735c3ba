"""One worker after another: standby, zygote, takeover and kill under load, and what parking costs.

Owns: the timing from `kill -9` to the next HTTP answer when somebody waits for the place, counting
what a constant load loses over many restarts, and the price of parking per request.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds4_common import client
from ds4_common.errors import Ds4Error
from ds4_common.seat import STANDBY, Seat
from ds4_worker.bench import processes
from ds4_worker.bench.report import Row, summarise
from ds4_worker.bench.steady import ANSWER_SECONDS, Tally, steady_load

_READY_SECONDS = 60.0
_BLOCK = 500  # requests between two changes from parked to not parked


@contextmanager
def _seat(manifest: Path, port: int) -> Iterator[Seat]:
    with client.connect(str(manifest), role="worker", name="bench") as connection:
        listener, fds = connection.listener_and_seat("127.0.0.1", port)
        listener.close()
        seat = Seat(fds)
        try:
            yield seat
        finally:
            seat.close()


def _wait_for_standby(seat: Seat) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not seat.held(STANDBY):
        if time.monotonic() > deadline:
            raise Ds4Error("no standby got ready")
        time.sleep(0.005)
    time.sleep(0.05)  # it holds the lock just before it waits


def _kill_to_health(seat: Seat, port: int) -> float:
    """Kills the worker that serves; milliseconds until another one answers a new connection."""
    pid = seat.holder_pid
    started = time.perf_counter()
    os.kill(pid, 9)
    with processes.connect(port) as connection:
        if processes.http_status(connection, "/health") != 200:
            raise Ds4Error("the worker that follows is not healthy")
    return (time.perf_counter() - started) * 1e3


def standby(manifest: Path, runs: int) -> Row:
    port = processes.free_port()
    workers = [processes.start_worker(manifest, port)]
    samples = []
    try:
        processes.wait_until_healthy(port)
        with _seat(manifest, port) as seat:
            for _ in range(runs):
                workers.append(processes.start_worker(manifest, port, "--standby"))
                _wait_for_standby(seat)
                samples.append(_kill_to_health(seat, port))
    finally:
        _end(workers)
    return summarise("kill -9 to /health, standby", "ms", samples, goal="<= 20")


def zygote(manifest: Path, runs: int) -> Row:
    port = processes.free_port()
    process = processes.start_worker(manifest, port, "--zygote")
    samples = []
    try:
        processes.wait_until_healthy(port)
        with _seat(manifest, port) as seat:
            for _ in range(runs):
                _wait_for_standby(seat)
                samples.append(_kill_to_health(seat, port))
    finally:
        process.terminate()
        process.wait(_READY_SECONDS)
    return summarise("kill -9 to /health, zygote", "ms", samples, goal="<= 40")


def plain_exec(manifest: Path, runs: int) -> Row:
    """Nobody waits for the place: the next worker is started after the kill."""
    port = processes.free_port()
    worker = processes.start_worker(manifest, port)
    samples = []
    try:
        processes.wait_until_healthy(port)
        for _ in range(runs):
            started = time.perf_counter()
            worker.kill()
            with processes.connect(port) as connection:
                worker.wait()
                worker = processes.start_worker(manifest, port)
                if processes.http_status(connection, "/health") != 200:
                    raise Ds4Error("the worker that follows is not healthy")
            samples.append((time.perf_counter() - started) * 1e3)
    finally:
        _end([worker])
    return summarise("kill -9 to /health, plain exec", "ms", samples, goal="<= 250")


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in reversed(workers):  # a standby first, or it would serve
        worker.kill()
        worker.wait()


def under_load(manifest: Path, restarts: int, per_second: float, *, kills: bool) -> list[Row]:
    """What a constant load loses over takeovers, or over kills with a restart."""
    tally = _restarts(manifest, restarts, per_second, kills=kills)
    label = f"{restarts} {'kill -9' if kills else 'takeovers'} under {per_second:g}/s"
    answered = [outcome.seconds * 1e3 for outcome in tally.answered]
    return [
        summarise(f"{label}: requests lost", "", [len(tally.lost)], goal="0"),
        summarise(
            f"{label}: of these, waiting for {ANSWER_SECONDS:g} s", "", [len(tally.unanswered)]
        ),
        summarise(f"{label}: streams cut", "", [len(tally.cut)]),
        summarise(f"{label}: refused", "", [len(tally.refused)], goal="0"),
        summarise(f"{label}: answered", "", [len(tally.answered)]),
        summarise(f"{label}: time to the end of an answer", "ms", answered),
    ]


def _restarts(manifest: Path, restarts: int, per_second: float, *, kills: bool) -> Tally:
    port = processes.free_port()
    # No deadline of an operator's cuts anything off: what is lost here is lost by the succession.
    flags = ("--max-queue", "10000", "--drain-seconds", str(_READY_SECONDS))
    worker = processes.start_worker(manifest, port, *flags)
    processes.wait_until_healthy(port)
    try:
        with _seat(manifest, port) as seat, steady_load(port, per_second) as tally:
            for _ in range(restarts):
                if kills:
                    worker.kill()
                    worker.wait()
                old, worker = worker, processes.start_worker(manifest, port, *flags)
                while seat.holder_pid != worker.pid:
                    if worker.poll() is not None:
                        raise Ds4Error(f"a worker ended with exit code {worker.returncode}")
                    time.sleep(0.002)
                if not kills and old.wait(_READY_SECONDS):
                    raise Ds4Error(f"a worker drained with exit code {old.returncode}")
    finally:
        worker.kill()
        worker.wait()
    return tally


def parking_cost(manifest: Path, runs: int) -> list[Row]:
    """Microseconds that parking adds to a request, by blocks of requests in turn with and without
    it: each on a connection of its own, and all on one connection."""
    rows = []
    ports = {flag: processes.free_port() for flag in ("on", "off")}
    workers = [
        processes.start_worker(manifest, port, "--park", flag) for flag, port in ports.items()
    ]
    try:
        for port in ports.values():
            processes.wait_until_healthy(port)
        for what, block in (("own connection", _connections), ("kept alive", _kept_alive)):
            costs: dict[str, list[float]] = {"on": [], "off": []}
            for _ in range(2 * runs):
                for flag, port in ports.items():
                    costs[flag].append(block(port))
            best = statistics.median(costs["off"])
            extra = [on - best for on in costs["on"]]
            rows.append(
                summarise(
                    f"parking, {what}",
                    "us",
                    extra,
                    goal="<= 100",
                    reference=best,
                    reference_name="request",
                )
            )
    finally:
        _end(workers)
    return rows


def _connections(port: int) -> float:
    """Microseconds per request on a connection of its own."""
    started = time.perf_counter()
    for _ in range(_BLOCK):
        with processes.connect(port) as connection:
            processes.http_status(connection, "/health")
    return (time.perf_counter() - started) / _BLOCK * 1e6


def _kept_alive(port: int) -> float:
    with processes.connect(port) as connection:
        started = time.perf_counter()
        for _ in range(_BLOCK):
            processes.http_status(connection, "/health")
        return (time.perf_counter() - started) / _BLOCK * 1e6
