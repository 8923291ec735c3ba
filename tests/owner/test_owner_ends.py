"""The ends of owners and their loaders as real processes, and what they leave."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds4_common import client, protocol
from ds4_common.errors import OwnerUnavailable
from ds4_common.manifest import read_manifest
from helpers.owner_processes import (
    flags,
    leftovers,
    start,
    start_stuck,
    wait_gone,
)
from helpers.stack import DEADLINE_SECONDS, process_environment
from helpers.stuck_owner import STEPS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_removes_sockets_and_manifest_and_exits_0(
    model: Path, run: Path, number: int
) -> None:
    program = start(model, run)
    program.wait_for("ready manifest=")
    assert leftovers(run) == {"w", "w.sock", "w.ctl"}
    assert program.stop(number) == 0
    assert leftovers(run) == set()


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_loader_is_reported_and_everything_is_cleaned_up(
    model: Path, run: Path, step: str
) -> None:
    names = set(os.listdir("/dev/shm"))
    program, pid, pidfd = start_stuck(step, model, run, "--backend", "shm")
    os.kill(pid, signal.SIGKILL)
    assert program.wait() == 1
    wait_gone(pidfd)
    doing = "planning" if step in ("start", "plan") else "loading"
    assert f"the loader (pid {pid}) died while {doing}: killed by signal 9 (SIGKILL)" in (
        program.text
    )
    assert leftovers(run) == set()
    assert set(os.listdir("/dev/shm")) <= names


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("step", ["plan", "blobs"])
def test_those_who_wait_for_a_load_hear_at_once_that_it_ended(
    model: Path, run: Path, step: str, number: int
) -> None:
    program, loader, pidfd = start_stuck(step, model, run)
    with client.connect(str(run / "w"), wait_seconds=None) as waiting:
        waiting._send(protocol.WaitReady(DEADLINE_SECONDS))
        with client.connect(str(run / "w"), "status") as operator:
            assert operator.status().state == "loading"
        os.kill(loader if number == signal.SIGKILL else program.process.pid, number)
        if number == signal.SIGKILL:
            reply, _ = waiting._receive()
            assert isinstance(reply, protocol.Welcome)
            assert (reply.state, f"loader (pid {loader}) died" in reply.reason) == ("failed", True)
        else:
            with pytest.raises(OwnerUnavailable):
                waiting._receive()
    assert program.wait() == (1 if number == signal.SIGKILL else 0)
    wait_gone(pidfd)
    assert leftovers(run) == set()


@pytest.mark.parametrize("step", STEPS)
def test_a_stop_during_loading_ends_the_loader_and_leaves_nothing(
    model: Path, run: Path, step: str
) -> None:
    program, _, pidfd = start_stuck(step, model, run)
    assert program.stop() == 0
    wait_gone(pidfd)
    assert "shutting down broker_requests=0" in program.text
    assert leftovers(run) == set()


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_owner_takes_its_loader_along_and_the_next_start_recovers(
    model: Path, run: Path, step: str
) -> None:
    program, _, pidfd = start_stuck(step, model, run)
    assert program.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_gone(pidfd)
    again = start(model, run)
    again.wait_for("ready manifest=")
    assert again.stop() == 0
    assert leftovers(run) == set()


def test_the_manifest_of_a_killed_owner_is_recognised_and_replaced(model: Path, run: Path) -> None:
    program = start(model, run)
    program.wait_for("ready manifest=")
    program.stop(signal.SIGKILL)
    stale = read_manifest(str(run / "w"))
    again = start(model, run)
    again.wait_for("ready manifest=")
    assert "stale manifest" in again.text
    assert read_manifest(str(run / "w")).owner.pid == again.process.pid != stale.owner.pid
    assert again.stop() == 0


def test_an_owner_stops_with_its_parent(model: Path, run: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        program = start(model, run, "--exit-on-parent-pid", str(parent.pid))
        program.wait_for("ready manifest=")
        parent.kill()
        assert program.wait() == 0
        assert f"parent pid {parent.pid} disappeared; shutting down" in program.text
        parent.communicate()
    gone = start(model, run, "--exit-on-parent-pid", str(parent.pid))
    assert gone.wait() == 0
    assert leftovers(run) == set()


def test_a_closed_log_reader_does_not_end_the_owner(model: Path, run: Path) -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "ds4_owner.cli", *flags(model, run)]
    process = subprocess.Popen(command, stderr=writer)
    os.close(writer)
    with open(reader) as lines:
        assert any("ready manifest=" in line for line in lines)
    process.terminate()  # its next line meets a closed pipe
    assert process.wait(DEADLINE_SECONDS) == 0


def test_the_loader_is_what_the_kernel_ends_when_memory_runs_out(model: Path, run: Path) -> None:
    program, loader, pidfd = start_stuck("fill", model, run)
    scores = [
        int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (program.process.pid, loader)
    ]
    assert scores[0] < scores[1] == 800
    assert program.stop() == 0
    wait_gone(pidfd)


# A full disk

FILL_AND_RUN = """
mount -t tmpfs -o size=64k none "$0" || exit 77
"$@" & pid=$!
read line < "$0.stuck"
head -c 100000 /dev/zero > "$0/full" 2>/dev/null
kill -USR1 "${line##* }"
wait $pid; code=$?
rm "$0/full"; echo "left: $(ls -A "$0")" >&2
exit $code
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare(1) to mount a small disk")
def test_a_disk_that_is_full_when_the_manifest_is_written_ends_the_owner_cleanly(
    model: Path, run: Path
) -> None:
    disk = run / "disk"
    disk.mkdir()
    os.mkfifo(f"{disk}.stuck")
    owner = [sys.executable, "-m", "helpers.stuck_owner", "blobs", *flags(model, run)]
    owner[owner.index("--manifest") + 1] = str(disk / "w")
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-Ur"]
    process = subprocess.Popen(
        [*namespace, "sh", "-c", FILL_AND_RUN, str(disk), *owner],
        stderr=subprocess.PIPE, text=True, env=process_environment(),
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if "stuck at blobs pid" in line:
                Path(f"{disk}.stuck").write_text(line)
        code = process.wait(DEADLINE_SECONDS)
    if code == 77 or "unshare" in said:
        pytest.skip(f"cannot mount a small disk here: {said}")
    assert code == 1, said
    assert f"{disk}/w: cannot write the manifest: No space left on device" in said
    assert said.endswith("left: \n")
