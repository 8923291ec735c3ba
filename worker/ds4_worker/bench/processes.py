"""Real owners, workers and clients for the benchmarks.

Owns: starting and stopping processes by the interpreter that runs the benchmark, and a socket
client thin enough to time the server instead of itself. Refuses to go on when a process dies.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds4_common.errors import Ds4Error

READY_SECONDS = 600.0


def python_environment() -> dict[str, str]:
    """The environment of measured processes: byte code may be written, nothing else changes."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


@contextmanager
def owner(model: Path, run: Path, *flags: str) -> Iterator[Path]:
    """Runs a weight owner on `model`; yields its manifest once it is ready; stops it."""
    manifest = run / "w.manifest"
    command = [sys.executable, "-P", "-m", "ds4_owner.cli", "--base", str(model)]
    command += ["--manifest", str(manifest), "--scope", "base"]
    command += ["--lock-file", str(run / "lock"), *flags]
    log = run / "owner.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=python_environment()
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not manifest.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise Ds4Error(f"owner: not ready (exit {process.returncode}): {log.read_text()}")
            time.sleep(0.005)
        yield manifest
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def start_worker(manifest: Path, port: int, *flags: str) -> subprocess.Popen[bytes]:
    """A plain exec of the worker program, as its console script does it."""
    script = Path(sys.executable).with_name("ds4-server")
    command = [str(script)] if script.exists() else [sys.executable, "-P", "-m", "ds4_worker.cli"]
    command += ["--manifest", str(manifest), "--port", str(port), *flags]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=python_environment(),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connect(port: int, deadline_seconds: float = 60.0) -> socket.socket:
    """Connects, waiting for the very first worker to have the listening socket created."""
    deadline = time.monotonic() + deadline_seconds
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=deadline_seconds)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def http_status(connection: socket.socket, path: str) -> int:
    """GET over an open connection; returns the status, 0 when the server closes instead."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
    with connection.makefile("rb") as reply:
        first = reply.readline()
        if not first:
            return 0
        status = int(first.split()[1])
        length = 0
        while (line := reply.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        reply.read(length)
    return status


def wait_until_healthy(port: int) -> None:
    """Returns at the first 200 of /health. A server that is loading may close or answer 503."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with connect(port) as connection:
            try:
                if http_status(connection, "/health") == 200:
                    return
            except ConnectionResetError:
                continue  # as good as a closed connection: ask again
            except TimeoutError as error:
                raise Ds4Error(
                    f"nobody answers on port {port}: run that ds4-server by hand"
                ) from error
        time.sleep(0.001)
    raise Ds4Error(f"no 200 from /health on port {port} within {READY_SECONDS:.0f} s")


def send_post(connection: socket.socket, path: str, body: dict[str, object]) -> None:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    connection.sendall(head.encode() + data)


def stream_events(connection: socket.socket) -> Iterator[tuple[float, dict[str, object]]]:
    """Yields (arrival time, event) for each SSE event of the response on this connection."""
    with connection.makefile("rb") as reply:
        status = int(reply.readline().split()[1])
        if status != 200:
            raise Ds4Error(f"HTTP {status} from the server: {reply.read()[:500]!r}")
        for line in reply:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield time.perf_counter(), json.loads(line[6:])
