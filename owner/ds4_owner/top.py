"""`ds4-weight-server top`: owners, their memory, their workers and what these do, live.

Owns the sampling, the rates between two samples, and the view: redrawn on a terminal until q or
Ctrl-C, printed once elsewhere. Read-only. Rates come from the workers' own counters, over
loopback or a Unix socket; a worker that does not answer is shown all the same.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ds4_common.errors import ManifestError, OwnerUnavailable, UsageError
from ds4_common.protocol import LeaseRecord
from ds4_owner import report, status, tables
from ds4_owner.arguments import Parser
from ds4_owner.progress import size
from ds4_owner.replace import client, commands, machine, processes
from ds4_owner.tables import Row, Section

if TYPE_CHECKING:
    from rich.console import Group

GENERATED, PROMPTED = "ds4_generated_tokens_total", "ds4_prompt_tokens_total"
ATTEMPTS = 4  # several workers may share a socket: any of them may answer


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One lease. `problem`: why there are no counters; `at`: seconds, monotonic."""

    lease: LeaseRecord
    at: float
    addresses: tuple[str, ...] = ()
    health: client.Health | None = None
    counters: dict[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything seen at one time."""

    owners: tuple[report.Report, ...]
    silent: tuple[str, ...]
    workers: dict[tuple[str, int], WorkerSample]  # by manifest and pid
    machine: machine.Machine


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code; raises Ds4Error."""
    options = _parse(arguments)
    manifests = status.owners_meant(options.manifest)
    if not sys.stdout.isatty():
        first = take(manifests)
        if any(worker.counters for worker in first.workers.values()):
            time.sleep(options.interval)
        print(text(take(manifests), first))
        return 0
    try:
        _live(manifests, options.interval)
    except KeyboardInterrupt:
        pass  # one of the two ways to leave
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="ds4-weight-server top", allow_abbrev=False,
                     description="What owners hold and their workers do; q leaves.")  # fmt: skip
    parser.add_argument("--manifest", metavar="FILE", help="of one owner (default: all private"
                        " ones, or DS4_CUDA_WEIGHT_IPC_MANIFEST)")  # fmt: skip
    parser.add_argument("--interval", metavar="S", type=float, default=1.0,
                        help="seconds between two looks (default: 1)")  # fmt: skip
    options = parser.parse_args(arguments)
    if not 0.1 <= options.interval <= 3600:
        raise UsageError(f"--interval: got {options.interval:g}, expected 0.1 to 3600 seconds")
    return options


# Sampling


def take(manifests: Sequence[str]) -> Sample:
    """Asks every owner and every worker once."""
    owners: list[report.Report] = []
    silent: list[str] = []
    workers: dict[tuple[str, int], WorkerSample] = {}
    for path in manifests:
        try:
            found = report.gather(path)
        except (OwnerUnavailable, ManifestError) as error:
            silent.append(str(error))
            continue
        owners.append(found)
        for lease in found.leases:
            workers[path, lease.pid] = _ask_worker(lease)
    return Sample(tuple(owners), tuple(silent), workers, machine.read_machine())


def _ask_worker(lease: LeaseRecord) -> WorkerSample:
    at = time.monotonic()
    try:
        listening = processes.listening_of(lease.pid)
    except PermissionError:
        return WorkerSample(lease, at, problem="of another user")
    addresses = tuple(map(str, listening))
    reachable = [entry for entry in listening if entry.local]
    if not reachable:
        return WorkerSample(
            lease, at, addresses, problem="neither a loopback port nor a Unix socket"
        )
    argv = processes.command_line(lease.pid)
    environment = processes.environment(lease.pid)
    try:
        key = commands.api_key(argv, environment, processes.working_folder(lease.pid))
        for _ in range(ATTEMPTS):
            health, counters = client.metrics(reachable[0], key)
            if health.pid == lease.pid:
                return WorkerSample(lease, time.monotonic(), addresses, health, counters)
    except (client.NoAnswer, UsageError) as error:
        return WorkerSample(lease, at, addresses, problem=str(error))
    return WorkerSample(lease, at, addresses, problem="other workers of its socket answer")


def rate(name: str, now: WorkerSample, before: WorkerSample | None) -> float | None:
    """Per second between two samples of one process; None without two of them."""
    if before is None or name not in now.counters or name not in before.counters:
        return None
    seconds = now.at - before.at
    if seconds <= 0 or now.counters[name] < before.counters[name]:
        return None
    return (now.counters[name] - before.counters[name]) / seconds


# Showing


def sections(sample: Sample, before: Sample | None) -> list[Section]:
    """What is shown, as (title, columns, rows)."""
    owners: list[Row] = []
    workers: list[Row] = []
    for owner in sample.owners:
        memory = owner.memory
        own = "?" if memory.own_bytes is None else size(memory.own_bytes)
        shared = memory.ranges_bytes + memory.artifacts_bytes + memory.blobs_bytes
        served = ", ".join(os.path.basename(f.path) for m in owner.models for f in m.files[:1])
        count = f"{len(owner.ranges)}+{len(owner.artifacts)}"
        owners.append(
            (str(owner.pid), owner.manifest, _state(owner), served, count, size(shared), own)
        )
        for lease in owner.leases:
            key = owner.manifest, lease.pid
            previous = None if before is None else before.workers.get(key)
            workers.append(_worker_row(sample.workers[key], previous))
    return [
        ("owners", ("pid", "manifest", "state", "model", "ranges+artifacts", "shared", "own"),
         owners),
        ("workers", ("pid", "role", "address", "running", "waiting", "tok/s", "prompt tok/s",
                     "tokens", "note"), workers),
        ("machine", ("",), [(str(sample.machine),)]),
        ("silent", ("",), [(line,) for line in sample.silent]),
    ]  # fmt: skip


def _state(owner: report.Report) -> str:
    progress = owner.progress
    if owner.state == "loading" and progress.total_bytes:
        return f"{progress.phase} {100 * progress.done_bytes // progress.total_bytes} %"
    return owner.state


def _worker_row(now: WorkerSample, before: WorkerSample | None) -> Row:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    health, total = now.health, now.counters.get(GENERATED)
    return (
        str(now.lease.pid),
        now.lease.role,
        " ".join(now.addresses) or "-",
        "-" if health is None else str(health.running),
        "-" if health is None else str(health.waiting),
        shown(rate(GENERATED, now, before)),
        shown(rate(PROMPTED, now, before)),
        "-" if total is None else f"{total:.0f}",
        now.problem or (health.model if health else ""),
    )


def text(sample: Sample, before: Sample | None) -> str:
    """Plain text, for pipes and files."""
    shown = [section for section in sections(sample, before) if section[2]]
    return tables.plain_text(shown)


def _drawn(sample: Sample, before: Sample | None) -> Group:
    from rich.console import Group
    from rich.text import Text

    shown = [section for section in sections(sample, before) if section[2]]
    return Group(tables.drawn(shown), Text("\nq leaves", style="dim"))


def _live(manifests: Sequence[str], interval: float) -> None:
    from rich.live import Live

    before: Sample | None = None
    with _keys() as fd, Live(screen=True, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            sample = take(manifests)
            live.update(_drawn(sample, before), refresh=True)
            before = sample
            if _left(fd, max(0.0, began + interval - time.monotonic())):
                return


@contextmanager
def _keys() -> Iterator[int]:
    """Stdin, giving single keys while this lasts; -1 when it is no terminal."""
    if not sys.stdin.isatty():
        yield -1
        return
    fd = sys.stdin.fileno()
    saved = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, saved)


def _left(fd: int, seconds: float) -> bool:
    """Waits; whether q was pressed, or the terminal is gone."""
    ready, _, _ = select.select([fd] if fd >= 0 else [], [], [], seconds)
    return bool(ready) and os.read(fd, 64)[:1] in (b"q", b"Q", b"")
