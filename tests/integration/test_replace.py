"""Models replaced under real owners and workers. Nothing is faked.

What a replacement started lives in sessions of its own; the fixture ends it through its manifests.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds4_owner.replace import processes
from helpers import stack
from helpers.replacing import QUICK, an_address, events, replace, served_by, tool
from helpers.stack import DEADLINE_SECONDS, Program


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_model_is_replaced_and_the_worker_comes_back_with_its_flags(
    models: dict[str, Path], run: Path, kind: str
) -> None:
    at = an_address(kind, run)
    other = run / "other"
    other.mkdir()
    with (
        stack.owner(models["a"], run, "--cpu-layout", "raw", "--served-id", "first") as old,
        stack.owner(models["a"], other) as stranger,
        stack.worker(run / "w", at, "--ctx", "64", "--max-seqs", "3",
                     "--model", str(models["a"])) as worker,
        stack.worker(other / "w", stack.free_port()) as strange_worker,
    ):  # fmt: skip
        seen = replace(run, str(models["b"]), "--prompt", "hello")
        assert seen.returncode == 0, seen.stdout
        assert old.wait() == 0
        assert worker.wait() == 0
        assert stranger.process.poll() is None
        assert strange_worker.process.poll() is None
        for bystander in (stranger, strange_worker):
            assert f"pid {bystander.process.pid} " in seen.stdout
            assert "weights of another owner" in seen.stdout
        assert served_by(other / "w")[0] == stranger.process.pid
    owner_pid, model, (worker_pid,) = served_by(run / "w")
    assert model == str(models["b"])
    owner_argv = processes.command_line(owner_pid)
    assert owner_argv[owner_argv.index("--cpu-layout") + 1] == "raw"
    assert "--served-id first" in seen.stdout  # as not taken over
    assert "first" not in owner_argv
    argv = processes.command_line(worker_pid)
    assert argv[argv.index("--ctx") + 1] == "64"
    assert argv[argv.index("--model") + 1] == str(models["b"])
    status, health = stack.request(at, "GET", "/health")
    assert (status, health["model"], health["pid"]) == (200, "b", worker_pid)
    done = [event["step"] for event in events(run) if event["kind"] == "done"]
    assert done == ["inspect", "stop-workers", "stop-owner", "clear-cache", "recheck", "budget",
                    "start-owner", "start-workers", "ask"]  # fmt: skip
    assert events(run)[-1]["kind"] == "end"
    assert (run / "w.replace.jsonl").stat().st_mode & 0o777 == 0o600


def test_preflight_and_dry_run_touch_nothing_and_say_what_would_happen(
    models: dict[str, Path], run: Path
) -> None:
    port = stack.free_port()
    with (
        stack.owner(models["a"], run) as owner,
        stack.worker(run / "w", port, "-m", str(models["a"])) as worker,
    ):
        before = sorted(path.name for path in run.iterdir())
        looked = tool("preflight", str(models["b"]), "--manifest", str(run / "w"), run=run)
        assert looked.returncode == 0, looked.stdout
        for expected in (
            f"pid {owner.process.pid} ", f"stop worker pid {worker.process.pid} (127.0.0.1:{port})",
            f"stop owner pid {owner.process.pid}", f"--base {models['b']}", "fits", "back",
        ):  # fmt: skip
            assert expected in looked.stdout, looked.stdout
        dry = replace(run, str(models["b"]), "--dry-run")
        assert dry.returncode == 0
        assert f"start {shlex.quote(sys.executable)} -m ds4_worker.cli" in dry.stdout
        told = tool("preflight", str(models["b"]), "--manifest", str(run / "w"), "--json",
                    "--reserve-gb", "1000000", run=run)  # fmt: skip
        assert told.returncode == 1
        document = json.loads(told.stdout)
        assert document["fits"] is False
        assert "refusing upload" in document["budget"]["refusal"]
        assert document["owner"]["pid"] == owner.process.pid
        assert [w["pid"] for w in document["workers"]] == [worker.process.pid]
        assert sorted(path.name for path in run.iterdir()) == before
        assert served_by(run / "w")[2] == [worker.process.pid]


def test_a_model_that_would_not_fit_is_refused_before_anything_is_stopped(
    models: dict[str, Path], run: Path
) -> None:
    with stack.owner(models["a"], run) as owner:
        seen = replace(run, str(models["b"]), "--reserve-gb", "1000000")
        assert seen.returncode == 1
        assert "nothing was stopped" in seen.stdout
        assert served_by(run / "w")[0] == owner.process.pid
        assert (run / "w.replace.jsonl").read_text() == ""


def test_a_private_owner_is_replaced_under_the_name_of_its_new_model(
    models: dict[str, Path], run: Path
) -> None:
    """So that `ds4-server -m NEW` finds it afterwards, and `-m OLD` does not."""
    port = stack.free_port()
    worker = Program.start("ds4_worker.cli", "-m", str(models["a"]), "--port", str(port),
                           XDG_RUNTIME_DIR=str(run))  # fmt: skip
    worker.wait_for("ready http")
    try:
        seen = tool("replace", str(models["b"]), *QUICK, run=run)
        assert seen.returncode == 0, seen.stdout
        assert worker.wait() == 0
    finally:
        if worker.process.poll() is None:
            worker.stop(signal.SIGKILL)
    (socket,) = (run / "ds4").glob("*.ctl")
    manifest = socket.with_suffix("")
    pid, model, leases = served_by(manifest)
    assert (model, len(leases)) == (str(models["b"]), 1)
    second = Program.start("ds4_worker.cli", "-m", str(models["b"]), "--port",
                           str(stack.free_port()), XDG_RUNTIME_DIR=str(run))  # fmt: skip
    second.wait_for("ready http")
    assert served_by(manifest)[0] == pid
    assert second.stop() == 0


def test_an_owner_with_a_manifest_of_its_own_name_keeps_it_among_private_ones(
    models: dict[str, Path], run: Path
) -> None:
    """As docs/operations.md has it: --manifest "$RUN/w", with the private owners' folder as RUN."""
    folder = run / "ds4"
    folder.mkdir(0o700)
    with stack.owner(models["a"], folder) as owner:
        seen = tool("replace", str(models["b"]), "--manifest", str(folder / "w"), *QUICK,
                    "--no-worker", run=run)  # fmt: skip
        assert seen.returncode == 0, seen.stdout
        assert owner.wait() == 0
    assert served_by(folder / "w")[1:] == (str(models["b"]), [])
    assert [path.name for path in folder.glob("*.ctl")] == ["w.ctl"]


def test_a_worker_that_cannot_serve_the_new_model_is_refused_with_its_words(
    models: dict[str, Path], run: Path
) -> None:
    port = stack.free_port()
    with stack.owner(models["a"], run) as owner, stack.worker(run / "w", port) as worker:
        command = f"{shlex.quote(sys.executable)} -m ds4_worker.cli --kv-dtype f64"
        seen = replace(run, str(models["b"]), "--worker-cmd", command)
        assert owner.wait() == 0
        assert worker.wait() == 0
        assert seen.returncode == 1
        assert "--kv-dtype: got 'f64'" in seen.stdout
        resumed = replace(run, "--resume", "--no-worker")
        assert resumed.returncode == 0, resumed.stdout
    assert served_by(run / "w")[1:] == (str(models["b"]), [])


def test_two_replacements_at_once_are_refused(models: dict[str, Path], run: Path) -> None:
    fifo = run / "go"
    os.mkfifo(fifo)
    waiting = f"sh -c 'echo x > {shlex.quote(str(fifo))}; cat {shlex.quote(str(fifo))}'"
    with stack.owner(models["a"], run) as owner:
        first = subprocess.Popen(
            [sys.executable, "-m", "ds4_owner.cli", "replace", str(models["b"]), "--manifest",
             str(run / "w"), *QUICK, "--clear-cache-cmd", waiting],
            stdout=subprocess.PIPE, text=True, env=stack.process_environment(),
        )  # fmt: skip
        assert fifo.read_text() == "x\n"  # it is in the middle of its steps
        second = replace(run, str(models["b"]))
        assert second.returncode == 1
        assert "another replacement is running" in second.stdout
        fifo.write_text("go\n")
        output, _ = first.communicate(timeout=DEADLINE_SECONDS)
        assert first.returncode == 0, output
        assert owner.wait() == 0
