"""ds4-guard as a real process around real jobs, on a machine whose memory the test invents.

The job's processes inherit the pipe of stdout, so its end of file proves that none is left.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.machines import Machine
from helpers.stack import process_environment

DEADLINE_SECONDS = 60
GUARD = (sys.executable, "-m", "ds4_owner.guard.cli")
# Three processes that ignore SIGTERM: the command, one in a session of its own, and one whose
# parents are gone. The echo comes when all three run.
STUBBORN = """
trap "" TERM
setsid sh -c 'echo up; exec sleep 1000' &
(setsid sh -c 'echo up; exec sleep 1000' &)
echo up
while :; do sleep 1000; done
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.fixture
def start(machine: Machine, tmp_path: Path) -> Iterator[Start]:
    """Starts the guard; `shell` is a prefix that ends in exec. Kills what a failed test left."""
    running: list[subprocess.Popen[str]] = []

    def begin(
        *arguments: str, shell: str = "", env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        log = ("--log", str(tmp_path / "log"))
        command = [*GUARD, "--root", str(machine.root), *log, *arguments]
        if shell:
            command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
        running.append(
            subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, env=process_environment(**(env or {})),
            )
        )  # fmt: skip
        return running[-1]

    yield begin
    for process in running:
        with process:
            if process.poll() is None:
                process.terminate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) once the guard and every process of its job is gone."""
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, out, err


def expect(process: subprocess.Popen[str], word: str, times: int = 1) -> None:
    assert process.stdout is not None
    for _ in range(times):
        assert process.stdout.readline().strip() == word


def events(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def names(tmp_path: Path) -> list[str]:
    """The events but samples, of which there are as many as the machine is slow."""
    return [e["event"] for e in events(tmp_path) if e["event"] != "sample"]


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_the_status_of_the_command_passes_through(
    start: Start, tmp_path: Path, script: str, code: int
) -> None:
    assert finish(start("--", "sh", "-c", script))[0] == code
    assert names(tmp_path) == ["start", "exit"]
    end = events(tmp_path)[-1]
    assert (end["exit_code"], end["job_status"], end["reason"]) == (code, code, None)


def test_streams_and_arguments_belong_to_the_command(start: Start) -> None:
    process = start("--", "sh", "-c", 'cat; echo "$1" >&2', "sh", "--log $x")
    out, err = process.communicate("through\n", timeout=DEADLINE_SECONDS)
    assert out == "through\n"
    assert err.endswith("--log $x\n")


def test_a_command_that_cannot_run_ends_as_in_a_shell(start: Start, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program\n")
    code, _, err = finish(start("--", "no-such-command"))
    assert (code, "cannot run no-such-command" in err) == (127, True)
    assert finish(start("--", str(plain)))[0] == 126
    plain.chmod(0o755)
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    assert finish(start("--", str(broken)))[0] == 126


@pytest.mark.parametrize(
    "arguments",
    [(), ("true",), ("--",), ("--max-gib", "nan", "--", "true"), ("--max-gib", "0", "--", "true"),
     ("--grace-seconds", "-1", "--", "true"), ("--profile", "king", "--", "true")],
)  # fmt: skip
def test_flags_that_make_no_sense_are_usage_errors(
    start: Start, arguments: tuple[str, ...]
) -> None:
    code, _, err = finish(start(*arguments))
    assert code == 2
    assert "usage: ds4-guard" in err


@pytest.mark.parametrize(
    ("available", "flags", "words"),
    [
        (12.05, (), "no room for a job"),
        (4.0, ("--reserve-gib", "1", "--trip-gib", "5"), "already below the floor"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_and_not_started(
    machine: Machine, start: Start, tmp_path: Path, available: float,
    flags: tuple[str, ...], words: str,
) -> None:  # fmt: skip
    machine.set_available(available)
    code, out, err = finish(start(*flags, "--", "echo", "started"))
    assert (code, out) == (75, "")
    assert words in err
    assert names(tmp_path) == ["refuse"]


def test_the_job_is_the_first_choice_of_the_kernel_and_limited(
    machine: Machine, start: Start, tmp_path: Path
) -> None:
    machine.set_available(20.0)
    script = "cat /proc/self/oom_score_adj; grep 'Max data' /proc/self/limits"
    code, out, err = finish(start("--", "sh", "-c", script))
    words = out.split()
    assert (code, words[0], words[4]) == (0, "800", str(8 << 30))
    assert "limit 8.0 GiB by RLIMIT_DATA" in err
    assert events(tmp_path)[0]["limit_by"] == "rlimit"


@pytest.mark.parametrize(
    ("flags", "trip_gib", "timeout"),
    [((), 12, 1800), (("--reserve-gib", "9"), 9, 1800), (("--profile", "owner"), 8, 0),
     (("--profile", "worker"), 12, 0),
     (("--profile", "owner", "--trip-gib", "5", "--timeout", "7"), 5, 7)],
)  # fmt: skip
def test_profiles_give_the_owner_the_lower_floor(
    start: Start, tmp_path: Path, flags: tuple[str, ...], trip_gib: int, timeout: int
) -> None:
    finish(start(*flags, "--", "true"))
    first = events(tmp_path)[0]
    assert (first["trip_bytes"], first["timeout_seconds"]) == (trip_gib << 30, timeout)


def test_an_allocation_over_the_limit_fails_inside_the_job(start: Start) -> None:
    code, _, err = finish(start("--max-gib", "0.1", "--", sys.executable, "-c", "bytes(1 << 30)"))
    assert code == 1
    assert "MemoryError" in err


def _falls(machine: Machine) -> None:
    machine.set_available(11.9)


def _stalls(machine: Machine) -> None:
    machine.set_available(15.9)
    machine.set_pressure(20.0)


def _disappears(machine: Machine) -> None:
    (machine.root / "proc/meminfo").unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_falls, "memory"), (_stalls, "pressure"), (_disappears, "memory unreadable")],
)
def test_a_trip_ends_every_process_of_a_stubborn_job(
    machine: Machine, start: Start, tmp_path: Path, change: Callable[[Machine], None], reason: str
) -> None:
    process = start("--grace-seconds", "0.2", "--", "sh", "-c", STUBBORN)
    expect(process, "up", times=3)
    change(machine)
    code, _, err = finish(process)
    assert code == 75
    assert f": {reason} (available memory" in err
    assert names(tmp_path) == ["start", "terminate", "kill", "exit"]
    assert {e["reason"] for e in events(tmp_path) if "reason" in e} == {reason}
    assert events(tmp_path)[-1]["job_status"] == 137


def test_a_kernel_without_pressure_is_watched_by_memory_alone(
    machine: Machine, start: Start
) -> None:
    (machine.root / "proc/pressure/memory").unlink()
    process = start("--", "sh", "-c", "echo up; exec sleep 1000")
    expect(process, "up")
    machine.set_available(11.0)
    code, _, err = finish(process)
    assert code == 75
    assert "reports no memory pressure" in err


def test_a_deadline_ends_the_job(start: Start, tmp_path: Path) -> None:
    assert finish(start("--timeout", "0.1", "--", "sleep", "1000"))[0] == 75
    assert events(tmp_path)[-1]["reason"] == "deadline"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_guard_lets_its_job_end_cleanly(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    script = 'trap "echo bye; exit 0" TERM; echo up; while :; do read -r _; done'
    process = start("--grace-seconds", "50", "--", "sh", "-c", script)
    expect(process, "up")
    process.send_signal(number)
    code, out, _ = finish_open(process)
    assert (code, out) == (75, "bye\n")
    assert names(tmp_path) == ["start", "terminate", "exit"]
    assert events(tmp_path)[-1]["job_status"] == 0


def finish_open(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """As finish, for a job that reads: its stdin stays open until it ended."""
    code = process.wait(DEADLINE_SECONDS)
    _, out, err = finish(process)
    return code, out, err


def test_a_suspended_job_hears_sigterm_too(start: Start, tmp_path: Path) -> None:
    process = start("--grace-seconds", "50", "--", "sh", "-c", "echo up; kill -STOP $$")
    expect(process, "up")
    process.terminate()
    assert finish(process)[0] == 75
    assert events(tmp_path)[-1]["job_status"] == 143


def test_a_signal_ignored_by_the_caller_stays_ignored(start: Start) -> None:
    process = start("--", "sh", "-c", "echo up; read -r _; exit 4", shell='trap "" HUP')
    expect(process, "up")
    process.send_signal(signal.SIGHUP)
    assert finish(process)[0] == 4


def test_what_a_finished_command_leaves_behind_is_ended(start: Start, tmp_path: Path) -> None:
    script = "(setsid sh -c 'echo up; exec sleep 1000' &) | head -n 1; exit 6"
    assert finish(start("--", "sh", "-c", script))[0] == 6
    assert names(tmp_path) == ["start", "terminate", "exit"]
    assert events(tmp_path)[-1]["reason"] == "leftovers"


def test_children_from_before_the_guard_are_not_its_job(start: Start) -> None:
    """A shell that ends in exec leaves its children to the guard's pid."""
    process = start("--", "sh", "-c", STUBBORN, shell="sleep 1000 >&- 2>&- & echo $!")
    assert process.stdout is not None
    stranger = int(process.stdout.readline())
    expect(process, "up", times=3)
    process.terminate()
    assert finish(process)[0] == 75
    os.kill(stranger, signal.SIGKILL)  # raises if the guard had ended it


def test_the_log_is_for_its_owner_only_and_grows(start: Start, tmp_path: Path) -> None:
    for _ in range(2):
        finish(start("--", "true"))
    assert names(tmp_path) == ["start", "exit"] * 2
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_written_refuses_the_job(start: Start) -> None:
    for path, words in (("/dev/full", "cannot write --log"), ("/no/log", "cannot open --log")):
        code, out, err = finish(start("--log", path, "--", "echo", "started"))
        assert (code, out) == (75, "")
        assert words in err


def test_a_disk_that_fills_up_under_the_log_ends_the_job(start: Start, tmp_path: Path) -> None:
    process = start("--", "sh", "-c", "echo up; exec sleep 1000")
    expect(process, "up")
    full = (tmp_path / "log").stat().st_size
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (full, full))
    code, _, err = finish(process)
    assert code == 75
    assert "log write failure" in err
    assert "is incomplete: File too large" in err


def test_descriptors_of_a_service_manager_are_for_the_job(start: Start) -> None:
    process = start(
        "--", "sh", "-c", 'read -r x <&3; echo "$x $LISTEN_FDS"; [ "$LISTEN_PID" = $$ ]',
        shell="echo passed >fd; exec 3<fd; rm fd; export LISTEN_FDS=1 LISTEN_PID=$$",
    )  # fmt: skip
    assert finish(process)[:2] == (0, "passed 1\n")
