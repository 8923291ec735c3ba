"""A real owner attacked by real processes: others are served meanwhile, and nothing is left.

After every attack the owner has the descriptors, threads, named mappings, children and files that
it had before, and as much memory. The same claims about single messages, in one process and with
deadlines of milliseconds: test_broker.py. Killed owners and loaders: test_owner_ends.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds4_common import client, line_client
from ds4_common.errors import OwnerUnavailable
from helpers import attacker
from helpers.stack import DEADLINE_SECONDS, Program
from helpers.tiny_gguf import write_llama

# Python keeps freed memory for itself: after an attack, up to this much of it.
SLACK_BYTES = 4 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf")


@contextmanager
def owner(model: Path, *before: str) -> Iterator[tuple[Program, Path]]:
    """A ready owner and its manifest, in a folder with a short path. It must stop cleanly."""
    with tempfile.TemporaryDirectory(prefix="ds4-") as folder:
        run = Path(folder)
        flags = ("--base", str(model), "--scope", "base", "--backend", "memfd")
        paths = ("--manifest", str(run / "w"), "--lock-file", str(run / "lock"))
        module = "helpers.stuck_owner" if before else "ds4_owner.cli"
        program = Program.start(module, *before, *flags, *paths)
        try:
            program.wait_for("ready manifest=")
            yield program, run / "w"
            assert program.stop() == 0
            assert [path.name for path in run.iterdir()] == ["lock"]
        finally:
            if program.process.poll() is None:
                program.stop(signal.SIGKILL)


@dataclass(frozen=True)
class Vitals:
    """What an owner process holds."""

    descriptors: tuple[str, ...]
    threads: int
    mappings: tuple[str, ...]  # names of files and shared memory
    children: str
    files: tuple[str, ...]
    private_bytes: int

    @classmethod
    def of(cls, pid: int, manifest: Path) -> Vitals:
        process = Path("/proc", str(pid))
        open_files = []
        for link in (process / "fd").iterdir():
            try:
                open_files.append(os.readlink(link).partition("[")[0])
            except FileNotFoundError:  # closed since it was listed
                continue
        fields = [text.split(maxsplit=5) for text in (process / "maps").read_text().splitlines()]
        rollup = (process / "smaps_rollup").read_text().splitlines()
        return cls(
            tuple(sorted(open_files)),
            len(list((process / "task").iterdir())),
            tuple(sorted({f[5] for f in fields if len(f) == 6})),
            (process / "task" / str(pid) / "children").read_text(),
            tuple(sorted(path.name for path in manifest.parent.iterdir())),
            sum(int(x.split()[1]) << 10 for x in rollup if x.startswith("Private_")),
        )

    def beside(self, baseline: Vitals) -> list[str]:
        """What differs from the baseline, one line each."""
        now, then = Counter(self.descriptors), Counter(baseline.descriptors)
        changes = [f"new descriptor {name}" for name in (now - then).elements()]
        changes += [f"lost descriptor {name}" for name in (then - now).elements()]
        changes += [
            f"{name}: {getattr(baseline, name)} -> {getattr(self, name)}"
            for name in ("threads", "mappings", "children", "files")
            if getattr(self, name) != getattr(baseline, name)
        ]
        if self.private_bytes > baseline.private_bytes + SLACK_BYTES:
            changes.append(f"private bytes: {baseline.private_bytes} -> {self.private_bytes}")
        return changes


@dataclass(frozen=True)
class Besieged:
    """An owner, and what it held before anybody attacked it."""

    program: Program
    manifest: Path
    baseline: Vitals

    def vitals(self) -> Vitals:
        """Taken while one operator is connected, who saw everybody else leave."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        with client.connect(str(self.manifest), "status") as operator:
            while (status := operator.status()).connections > 1 and time.monotonic() < deadline:
                pass
            assert (status.leases, status.connections, status.state) == ([], 1, "ready")
            return Vitals.of(self.program.process.pid, self.manifest)

    def serves(self) -> None:
        """A worker and a client of the line protocol get everything, within the deadlines that
        `attach` keeps."""
        with client.connect(str(self.manifest), name="other") as connection:
            for mapping in connection.map_allocations().values():
                mapping.close()
            connection.blob("tokenizer").close()
        _, fd = line_client.fetch_allocation(str(self.manifest) + ".sock", 0)
        os.close(fd)

    def recovers(self) -> None:
        """All is as before."""
        assert self.vitals().beside(self.baseline) == []


@contextmanager
def besieged(model: Path, *before: str) -> Iterator[Besieged]:
    with owner(model, *before) as (program, manifest):
        place = Besieged(program, manifest, Vitals.of(program.process.pid, manifest))
        # What the first request of a kind imports or caches is no leak, and the loader leaves when
        # the manifest is there already.
        place.serves()
        baseline = place.vitals()
        while baseline.children or baseline.descriptors != place.vitals().descriptors:
            place.serves()
            baseline = place.vitals()
        yield Besieged(program, manifest, baseline)


@pytest.fixture(scope="module")
def place(model: Path) -> Iterator[Besieged]:
    with besieged(model) as made:
        yield made


@contextmanager
def attack(place: Besieged, kind: str, count: int) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of its attack; killed afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-S", attacker.__file__, kind, str(place.manifest), str(count)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "armed\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("silent", 1), ("half", 30), ("stall", 20), ("slow", 20), ("garbage", 60), ("dying", 50),
        ("flood", 1000),
    ],
)  # fmt: skip
def test_an_attack_delays_nobody_and_leaves_nothing(place: Besieged, kind: str, count: int) -> None:
    with attack(place, kind, count):
        for _ in range(5):
            place.serves()
    place.recovers()


def test_a_crowd_that_takes_every_lease_is_said_and_hurts_no_holder(place: Besieged) -> None:
    path = str(place.manifest)
    with client.connect(path, name="holder") as holder, attack(place, "crowd", 1000):
        with pytest.raises(OwnerUnavailable, match="leases are taken"):
            client.connect(path)
        assert len(holder.describe_allocations()) > 0
        with client.connect(path, "status") as operator:
            assert "holder" in {lease.name for lease in operator.status().leases}
    place.recovers()
    place.serves()


def test_all_attacks_at_once_delay_nobody_and_leave_nothing(place: Besieged) -> None:
    with ExitStack() as attackers:
        for kind in ("silent", "half", "stall", "slow", "garbage", "dying"):
            attackers.enter_context(attack(place, kind, 20))
        for _ in range(5):
            place.serves()
    place.recovers()


def test_a_stopped_client_that_holds_a_lease_delays_nobody(place: Besieged) -> None:
    with attack(place, "stall", 3) as process:
        process.send_signal(signal.SIGSTOP)
        place.serves()
        with client.connect(str(place.manifest), "status") as connection:
            assert process.pid in {lease.pid for lease in connection.status().leases}
    place.recovers()


def test_interrupted_calls_of_the_owner_are_taken_up_again(place: Besieged) -> None:
    with attack(place, "garbage", 20), attack(place, "stall", 5):
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGCHLD, signal.SIGWINCH) * 20:
            place.program.process.send_signal(number)
            if number == signal.SIGCONT:
                place.serves()
    place.recovers()


def test_those_who_say_or_take_nothing_are_dropped_at_their_deadline(model: Path) -> None:
    with besieged(model, "--deadlines", "1.5") as hasty:
        with ExitStack() as attackers:
            processes = [
                attackers.enter_context(attack(hasty, kind, 10))
                for kind in ("silent", "stall", "slow")
            ]
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "dropped\n"
            hasty.recovers()  # while those processes live


def attach_for_ever(leases: ExitStack, manifest: Path) -> None:
    while True:
        leases.enter_context(client.connect(str(manifest)))


def test_an_owner_at_its_descriptor_limit_turns_newcomers_away_and_recovers(model: Path) -> None:
    with besieged(model, "--limit", "NOFILE=64") as small:
        with ExitStack() as leases:
            first = leases.enter_context(client.connect(str(small.manifest)))
            with pytest.raises(OwnerUnavailable, match="no file descriptors left"):
                attach_for_ever(leases, small.manifest)
            assert first.status().leases
            assert len(first.describe_allocations()) > 0
        small.recovers()
        with attack(small, "flood", 300):
            pass
        small.recovers()
        small.serves()


def cycle(place: Besieged, count: int) -> None:
    with attack(place, "dying", count):
        pass


@pytest.mark.parametrize("cycles", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_attach_and_kill_cycles_leave_memory_and_descriptors_flat(
    place: Besieged, cycles: int
) -> None:
    cycle(place, 100)
    place.recovers()
    before = place.vitals()
    cycle(place, cycles)
    place.recovers()
    after = place.vitals()
    print(f"\n{cycles} cycles: descriptors {len(before.descriptors)} -> {len(after.descriptors)},")
    print(f"private memory {before.private_bytes >> 10} -> {after.private_bytes >> 10} KiB")
    assert after.private_bytes <= before.private_bytes + (1 << 20)


def test_a_stop_during_an_attack_ends_everything(model: Path) -> None:
    with besieged(model) as place, ExitStack() as attackers:
        for kind in ("silent", "stall", "slow"):
            attackers.enter_context(attack(place, kind, 20))
        assert place.program.stop() == 0
        assert "shutting down broker_requests=" in place.program.text
