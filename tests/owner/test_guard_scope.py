"""What limits a job: systemd scopes, cgroups of our own, and when each is passed over.

systemd-run and /sys/fs/cgroup are presented below a root folder; the kernel's own cgroup.kill is
tried where the machine lets the test create a cgroup.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4_common.errors import BackendError
from ds4_owner.guard import scope as scopes
from ds4_owner.guard.policy import GIB, Limits
from helpers.machines import Machine
from helpers.stack import process_environment

LIMITS = Limits(4 * GIB, 3 * GIB)
DEADLINE_SECONDS = 60
# Does what systemd-run --scope does: creates the unit's cgroup, enters it, becomes the command.
SYSTEMD_RUN = """#!/bin/sh
[ "$1" = --version ] && { echo "systemd ${VERSION:-252} (test)"; exit; }
echo "$*" >> "$ROOT/calls"
[ -n "$REFUSAL" ] && { echo "$REFUSAL" >&2; exit 1; }
while [ "$1" != -- ]; do
    case $1 in
        --unit=*) unit=${1#*=} ;;
        --property=MemoryMax=*) max=${1##*=} ;;
    esac
    shift
done
shift
folder="$ROOT/sys/fs/cgroup/ds4guard.slice/$unit.scope"
mkdir -p "$folder" "$ROOT/proc/$$"
[ -n "$NO_LIMIT" ] || echo "$max" > "$folder/memory.max"
echo "0::/ds4guard.slice/$unit.scope" > "$ROOT/proc/$$/cgroup"
exec "$@"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path / "machine")
    (machine.root / "run/systemd/system").mkdir(parents=True)
    machine.write("bin/systemd-run", SYSTEMD_RUN).chmod(0o755)
    return machine


def guard(machine: Machine, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{machine.root}/bin:{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "ds4_owner.guard.cli", "--root", str(machine.root), *arguments],
        env=process_environment(PATH=path, ROOT=str(machine.root), **env),
        text=True, capture_output=True, timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip


def test_a_job_runs_in_a_scope_that_was_seen_to_limit(machine: Machine) -> None:
    log = machine.root / "log"
    done = guard(machine, "--max-gib", "4", "--log", str(log), "--", "sh", "-c", "exit 9")
    assert (done.returncode, done.stdout) == (9, "")
    probe, job = (machine.root / "calls").read_text().splitlines()
    manager = "--system" if os.geteuid() == 0 else "--user"
    for call in (probe, job):
        assert call.startswith(f"{manager} --scope --quiet --collect --slice=ds4guard.slice ")
        assert f"MemoryMax={4 * GIB} " in call
        assert f"MemoryHigh={4 * GIB - 4 * GIB // 10} " in call
        assert "MemorySwapMax=0" in call
        assert "--expand-environment" not in call
    assert job.endswith("-- sh -c exit 9")
    assert json.loads(log.read_text().splitlines()[0])["limit_by"] == "systemd"


def test_a_deadline_ends_a_job_in_a_scope_without_cgroup_kill(machine: Machine) -> None:
    script = 'trap "" TERM; setsid sleep 1000 & sleep 1000'
    flags = ("--timeout", "0.1", "--grace-seconds", "0", "--limit-by", "systemd")
    assert guard(machine, *flags, "--", "sh", "-c", script).returncode == 75


def test_newer_systemd_is_told_not_to_expand_variables(machine: Machine) -> None:
    guard(machine, "--", "echo", "$x", VERSION="257")
    assert "--expand-environment=no --unit=" in (machine.root / "calls").read_text()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"REFUSAL": "Failed to connect to bus"}, "systemd-run failed: Failed to connect to bus"),
        ({"NO_LIMIT": "1"}, "a scope does not limit memory here: memory.max is None"),
    ],
)
def test_a_scope_that_does_not_limit_is_passed_over_loudly(
    machine: Machine, env: dict[str, str], words: str
) -> None:
    done = guard(machine, "--", "echo", "ran", **env)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert words in done.stderr
    assert "by RLIMIT_DATA" in done.stderr
    only = guard(machine, "--limit-by", "systemd", "--", "echo", "ran", **env)
    assert (only.returncode, only.stdout) == (75, "")


def cgroups(machine: Machine, path: str = "/user.slice/session.scope") -> Path:
    """A cgroup v2 tree whose user.slice hands the memory controller down."""
    mount = machine.root / "sys/fs/cgroup"
    machine.write("sys/fs/cgroup/cgroup.controllers", "memory pids\n")
    machine.write("proc/self/cgroup", f"0::{path}\n")
    for level, handed in (("user.slice", "memory pids"), ("user.slice/session.scope", "")):
        machine.write(f"sys/fs/cgroup/{level}/cgroup.subtree_control", handed + "\n")
        machine.write(f"sys/fs/cgroup/{level}/cgroup.procs", "")
        machine.write(f"sys/fs/cgroup/{level}/memory.max", "max\n")
    return mount


def test_our_own_cgroup_lies_beside_the_guard_and_holds_the_limits(machine: Machine) -> None:
    mount = cgroups(machine)
    scope = scopes.choose(LIMITS, str(machine.root), "cgroup")
    folder = mount / "user.slice" / f"ds4guard-{os.getpid()}"
    assert scope.folder == folder
    assert (folder / "memory.max").read_text() == str(4 * GIB)
    assert (folder / "memory.high").read_text() == str(3 * GIB)


def test_a_job_enters_its_cgroup_before_it_is_executed(machine: Machine) -> None:
    mount = cgroups(machine)
    done = guard(machine, "--limit-by", "cgroup", "--", "sh", "-c", "echo $$")
    (entered,) = mount.glob("user.slice/ds4guard-*/cgroup.procs")
    assert (done.returncode, done.stdout.strip()) == (0, entered.read_text())


def test_a_job_never_leaves_a_limit_that_the_guard_lives_in(machine: Machine) -> None:
    cgroups(machine)
    machine.write("sys/fs/cgroup/user.slice/session.scope/memory.max", str(8 * GIB))
    with pytest.raises(BackendError, match="would escape the memory limit"):
        scopes.choose(LIMITS, str(machine.root), "cgroup")


@pytest.mark.parametrize(
    ("path", "words"),
    [("/other.slice/x", "no cgroup above"), ("/../host", "lies outside")],
)
def test_a_cgroup_that_is_not_ours_is_passed_over(machine: Machine, path: str, words: str) -> None:
    cgroups(machine, path)
    with pytest.raises(BackendError, match=words):
        scopes.choose(LIMITS, str(machine.root), "cgroup")


def test_a_machine_without_cgroup_v2_is_passed_over(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/\n")
    with pytest.raises(BackendError, match="no cgroup v2"):
        scopes.choose(LIMITS, str(machine.root), "cgroup")


def test_only_the_named_scope_is_ever_taken_for_the_jobs(machine: Machine) -> None:
    machine.write("proc/7/cgroup", "0::/user.slice/ds4guard-1.scope\n")
    root = str(machine.root)
    assert scopes.locate(root, 7, "ds4guard-1") == (
        machine.root / "sys/fs/cgroup/user.slice/ds4guard-1.scope"
    )
    assert scopes.locate(root, 7, "guard-1") is None
    assert scopes.locate(root, 8, "ds4guard-1") is None


def test_kills_at_the_limit_are_counted(machine: Machine) -> None:
    folder = machine.root / "sys/fs/cgroup/x"
    assert scopes.oom_kills(folder) == 0
    machine.write("sys/fs/cgroup/x/memory.events", "high 9\nmax 4\noom 3\noom_kill 2\n")
    machine.write("sys/fs/cgroup/x/memory.current", "4096\n")
    assert (scopes.oom_kills(folder), scopes.memory_used(folder)) == (2, 4096)


@pytest.fixture
def real_cgroup() -> Iterator[Path]:
    for mount in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        if (mount / "cgroup.procs").exists() and os.access(mount, os.W_OK):
            folder = mount / f"ds4guard-test-{uuid.uuid4().hex}"
            try:
                folder.mkdir()
            except OSError:
                continue
            if (folder / "cgroup.kill").exists():
                yield folder
                scopes.remove_cgroup(folder)
                return
            folder.rmdir()
    pytest.skip("no cgroup v2 with cgroup.kill that this user may create groups in")


def test_the_kernel_kills_a_cgroup_whole_and_nothing_else(real_cgroup: Path) -> None:
    script = 'echo $$ > "$0/cgroup.procs"; mkdir "$0/below"; setsid sleep 1000 & echo up; wait'
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bystander:
        job = subprocess.Popen(["sh", "-c", script, str(real_cgroup)], stdout=subprocess.PIPE)
        with job:
            assert job.stdout is not None
            assert job.stdout.readline() == b"up\n"
            assert scopes.kill_cgroup(real_cgroup)
            assert job.stdout.read() == b""  # ends when the sleep is gone as well
            assert job.wait() == -9
        assert bystander.communicate(b"alive", timeout=DEADLINE_SECONDS)[0] == b"alive"


def test_a_kernel_without_cgroup_kill_says_so(tmp_path: Path) -> None:
    assert not scopes.kill_cgroup(tmp_path)
