"""Owners as real processes, also such as hang where a test wants it."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

from ds4_common import client
from helpers.stack import DEADLINE_SECONDS, Program

TESTS = Path(__file__).resolve().parents[1]
STARTED: list[Program] = []


def end_started() -> None:
    """Kills what still runs of all that was launched."""
    while STARTED:
        program = STARTED.pop()
        if program.process.poll() is None:
            program.stop(signal.SIGKILL)


def flags(model: Path, run: Path, *more: str) -> list[str]:
    return [
        *("--base", str(model), "--scope", "base", "--backend", "memfd"),
        *("--manifest", str(run / "w"), "--lock-file", str(run / "lock"), *more),
    ]


def start(model: Path, run: Path, *more: str, **environment: str) -> Program:
    return launch("ds4_owner.cli", *flags(model, run, *more), **environment)


def launch(module: str, *arguments: str, **environment: str) -> Program:
    STARTED.append(Program.start(module, *arguments, **environment))
    return STARTED[-1]


def start_helper(*arguments: str) -> Program:
    """helpers.stuck_owner, importable from the test tree."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return launch("helpers.stuck_owner", *arguments, PYTHONPATH=path)


def start_stuck(step: str, model: Path, run: Path, *more: str) -> tuple[Program, int, int]:
    """An owner whose loader waits at `step`; its process, the loader's pid and a pidfd of it."""
    return stuck(step, start_helper(step, *flags(model, run, *more)))


def stuck(step: str, program: Program) -> tuple[Program, int, int]:
    """The same for an owner that was started."""
    line = program.wait_for(f"stuck at {step} pid ")
    pid = int(line.rpartition(" ")[2])
    return program, pid, os.pidfd_open(pid)


def wait_gone(pidfd: int) -> None:
    """Until the process behind the pidfd has ended (or is a zombie)."""
    assert select.select([pidfd], [], [], DEADLINE_SECONDS)[0], "the process is still there"
    os.close(pidfd)


def leftovers(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()} - {"lock"}


def reexec(run: Path) -> float:
    with client.connect(str(run / "w"), "operator") as operator:
        return operator.request_reexec()


def descriptors_when_alone(
    connection: client.OwnerConnection, pid: int, at_most: int | None = None
) -> int:
    """How many descriptors the owner holds once it has seen every other client leave. It may be
    importing still, with a file open: with `at_most`, waits for no more than that."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        alone = connection.status().connections == 1
        count = len(os.listdir(f"/proc/{pid}/fd"))
        if alone and (at_most is None or count <= at_most):
            return count
        if time.monotonic() > deadline:
            assert alone
            return count
