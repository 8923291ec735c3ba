"""Seats without an owner, and processes that use them until they are killed.

As a program (`python -m helpers.seats FDS COMMAND ...`) it is such a process, and says "ready".
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ds4_common.seat import Seat
from ds4_owner.seats import make_seat


@contextmanager
def seat_fds() -> Iterator[tuple[int, ...]]:
    """What an owner holds."""
    made = make_seat()
    try:
        yield made.fds
    finally:
        made.close()


def open_seat(fds: tuple[int, ...]) -> Seat:
    """As a worker gets it: with descriptors of its own."""
    return Seat([os.dup(fd) for fd in fds])


@dataclass
class Other:
    """Another process at the same seat."""

    process: subprocess.Popen[str]
    early: list[str] = field(default_factory=list)

    def line(self) -> str:
        """What it says next."""
        return self.early.pop(0) if self.early else self._read()

    def wait_ready(self) -> None:
        """Until it is ready. What it says earlier - of inherited requests - is not lost."""
        while (line := self._read()) != "ready":
            assert line, f"it said an empty line before it was ready, after {self.early}"
            self.early.append(line)

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.endswith("\n"), f"it ended, with {self.process.wait()}, after {line!r}"
        return line.removesuffix("\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def other(fds: tuple[int, ...], *command: str, pass_too: int = -1) -> Iterator[Other]:
    """Starts a process that is ready, and kills it at the end."""
    text = ",".join(map(str, fds))
    passed = (*fds, pass_too) if pass_too >= 0 else fds
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.seats", text, *command],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=passed,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    made = Other(process)
    try:
        made.wait_ready()
        yield made
    finally:
        made.kill()
        assert process.stdout is not None
        process.stdout.close()


def _say(line: str) -> None:
    """In one write: print() makes two, and the line of another thread can come between them."""
    os.write(1, f"{line}\n".encode())


def _hold(seat: Seat, locks: list[int]) -> None:
    for lock in locks:
        assert seat.lock(lock)
    seat.sit()
    _say("ready")
    threading.Event().wait()


def _serve(seat: Seat, listener: socket.socket, steps: int) -> None:
    """A server over a fake model that computes so many steps and then none."""
    from ds4_worker.executor.api import ExecutorConfig
    from ds4_worker.http.parking import Parking
    from helpers.fake_executor import FakeExecutor
    from helpers.fake_model import VOCABULARY
    from helpers.fake_server import fake_server

    left = steps

    def before_step() -> None:
        nonlocal left
        if left == 0:
            _say("stuck")
            threading.Event().wait()
        left -= 1

    config = ExecutorConfig(banks=4, context_tokens=64)
    executor = FakeExecutor(config, vocabulary=VOCABULARY, before_step=before_step)
    with fake_server(executor, listener=listener, parking=Parking(seat)):
        _say("ready")
        threading.Event().wait()


def main() -> None:
    seat = Seat([int(fd) for fd in sys.argv[1].split(",")])
    command, *arguments = sys.argv[2:]
    if command == "hold":
        _hold(seat, [int(lock) for lock in arguments])
    elif command == "serve":
        _serve(seat, socket.socket(fileno=int(arguments[0])), int(arguments[1]))


if __name__ == "__main__":
    main()
