"""The whole product as real processes, for tests: an owner, workers, and a plain HTTP client.

Nothing is faked. Every wait ends at an event (a log line, a socket, an exit), never at a sleep.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 120.0


def process_environment(**changes: str) -> dict[str, str]:
    """The test's environment without what would change a program's defaults.

    Test programs (`python -m helpers.…`) are found as they are in the tests."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DS4_")}
    tests = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [tests, environment.get("PYTHONPATH")])
    )
    environment.update(changes)
    return environment


@dataclass
class Program:
    """A running program of ours whose stderr is collected line by line."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _reader: threading.Thread | None = None

    @classmethod
    def start(cls, module: str, *arguments: str, **environment: str) -> Program:
        return cls.following(
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=process_environment(**environment),
            )
        )

    @classmethod
    def following(cls, process: subprocess.Popen[str]) -> Program:
        """Collects the stderr of a process that was started elsewhere, as text from a pipe."""
        program = cls(process)
        program._reader = threading.Thread(target=program._collect, daemon=True)
        program._reader.start()
        return program

    def _collect(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, text: str) -> str:
        """The first line holding `text`; fails when the program ends or stays silent."""
        return self.wait_for_count(text, 1)[0]

    def wait_for_count(self, text: str, count: int) -> list[str]:
        """At least `count` lines holding `text`, the same way."""

        def holding() -> list[str]:
            return [line for line in self.lines if text in line]

        def found() -> bool:
            ended = self._reader is not None and not self._reader.is_alive()
            return len(holding()) >= count or ended or self._eof()

        with self._changed:
            self._changed.wait_for(found, DEADLINE_SECONDS)
        if len(lines := holding()) >= count:
            return lines
        raise AssertionError(
            f"no {count} lines with {text!r}; the program said:\n" + "\n".join(self.lines)
        )

    def _eof(self) -> bool:
        return self.process.poll() is not None

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal, waits for the end, returns the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(DEADLINE_SECONDS)
        if self._reader:
            self._reader.join(DEADLINE_SECONDS)
        if self.process.stderr:
            self.process.stderr.close()
        return code

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@contextmanager
def owner(model: Path, run: Path, *flags: str, **environment: str) -> Iterator[Program]:
    """A ready owner of `model`; its manifest is `run / "w"`."""
    program = Program.start(
        "ds4_owner.cli",
        *("--base", str(model), "--manifest", str(run / "w"), "--scope", "base"),
        *("--lock-file", str(run / "lock"), *flags),
        **environment,
    )
    try:
        program.wait_for("ready manifest=")
        yield program
    finally:
        if program.process.poll() is None:
            program.stop()


@contextmanager
def worker(
    manifest: Path, at: int | Path | str, *flags: str, **environment: str
) -> Iterator[Program]:
    """A worker process that answers /health with 200, at a port, a Unix socket, or as --host."""
    host = f"unix:{at}" if isinstance(at, Path) else str(at)
    where = ("--port", str(at)) if isinstance(at, int) else ("--host", host)
    program = Program.start(
        "ds4_worker.cli", "--manifest", str(manifest), *where, *flags, **environment
    )
    try:
        program.wait_for("ready")
        yield program
    finally:
        if program.process.poll() is None:
            program.stop(signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class UnixConnection(http.client.HTTPConnection):
    """An HTTP client on a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=DEADLINE_SECONDS)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def request(
    at: int | Path, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, Any]:
    """One request on its own connection, to a port of this host or a Unix socket; returns (status,
    decoded JSON or text)."""
    connection = (
        http.client.HTTPConnection("127.0.0.1", at, timeout=DEADLINE_SECONDS)
        if isinstance(at, int)
        else UnixConnection(at)
    )
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        payload = response.read().decode()
        kind = response.getheader("Content-Type", "")
        return response.status, json.loads(payload) if "json" in kind else payload
    finally:
        connection.close()


def connected(port: int) -> socket.socket:
    """An open connection to a port of this host."""
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS)
