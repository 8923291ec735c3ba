"""Every way in which a replacement is refused or killed halfway, and resumed.

Nothing is faked but the workers that misbehave on purpose.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds4_common.gguf import GgmlType
from helpers import replacing, stack
from helpers.replacing import end, events, replace, served_by
from helpers.stack import Program
from helpers.tiny_gguf import RawTensor, gguf_bytes


def fake_worker(run: Path, script: str) -> Program:
    """A process that leases the owner's memory, then runs `script`."""
    code = (
        "import os, signal, sys\nfrom ds4_common import client\n"
        f"owner = client.connect({str(run / 'w')!r}, 'worker')\n"
        "def say(text): print(text, file=sys.stderr, flush=True)\n" + script
    )
    path = run / "fake_worker.py"
    path.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(path)], stderr=subprocess.PIPE, text=True,
        env=stack.process_environment(),
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "attached\n"
    return Program(process)


WAIT = "say('attached')\nsignal.pause()\n"
STUBBORN = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WAIT}"


def huge_model(path: Path) -> Path:
    """A file of a TiB on paper and a few KiB on disk."""
    tensor = RawTensor("token_embd.weight", (1 << 20, 1 << 18), GgmlType.F32, data=b"")
    path.write_bytes(gguf_bytes([("general.architecture", 8, "unheard")], [tensor]))
    os.truncate(path, path.stat().st_size + (1 << 40))
    return path


def test_a_budget_refused_halfway_explains_the_machine_and_can_be_resumed(
    models: dict[str, Path], run: Path
) -> None:
    """The new file grows between preflight and start: the command that clears caches does it."""
    model, huge = run / "new.gguf", huge_model(run / "huge.gguf")
    model.write_bytes(models["b"].read_bytes())
    swap = f"mv {shlex.quote(str(huge))} {shlex.quote(str(model))}"
    with stack.owner(models["a"], run) as owner:
        seen = replace(run, str(model), "--clear-cache-cmd", swap)
        assert seen.returncode == 1
        assert owner.wait() == 0
    assert "the next owner does not fit" in seen.stdout
    assert "--resume" in seen.stdout
    assert [e["step"] for e in events(run) if e["kind"] == "refused"] == ["budget"]
    again = replace(run, str(models["b"]))
    assert again.returncode == 2
    assert "unfinished replacement" in again.stdout
    resumed = replace(run, str(models["a"]), "--resume")  # going back
    assert resumed.returncode == 0, resumed.stdout
    assert served_by(run / "w")[1] == str(models["a"])
    nothing = replace(run, "--resume")
    assert nothing.returncode == 2
    assert "no unfinished replacement" in nothing.stdout


def test_a_failing_clear_cache_command_stops_the_replacement(
    models: dict[str, Path], run: Path
) -> None:
    with stack.owner(models["a"], run) as owner:
        seen = replace(run, str(models["b"]), "--clear-cache-cmd", "sh -c 'echo no root; exit 3'")
        assert owner.wait() == 0
    assert seen.returncode == 1
    assert "exit code 3: no root" in seen.stdout
    resumed = replace(run, "--resume", "--clear-cache-cmd", "")
    assert resumed.returncode == 0, resumed.stdout
    assert served_by(run / "w")[1] == str(models["b"])


def test_a_worker_that_ignores_sigterm_leaves_the_owner_alone_until_it_may_be_killed(
    models: dict[str, Path], run: Path
) -> None:
    with stack.owner(models["a"], run) as owner:
        worker = fake_worker(run, STUBBORN)
        seen = replace(run, str(models["b"]), "--worker-seconds", "0.2")
        assert seen.returncode == 1
        assert f"kill -9 {worker.process.pid}" in seen.stdout
        assert served_by(run / "w")[0] == owner.process.pid
        resumed = replace(run, "--resume", "--kill")
        assert resumed.returncode == 0, resumed.stdout
        assert worker.wait() == -signal.SIGKILL
        assert owner.wait() == 0
    assert "not started again, being no ds4-server" in resumed.stdout
    assert served_by(run / "w")[1:] == (str(models["b"]), [])


def test_an_owner_that_does_not_die_is_named_with_its_state_and_never_killed(
    models: dict[str, Path], run: Path
) -> None:
    with stack.owner(models["a"], run) as owner:
        stopper = (
            f"""
def last(*_):
    os.kill({owner.process.pid}, signal.SIGSTOP)
    os._exit(0)
signal.signal(signal.SIGTERM, last)
"""
            + WAIT
        )
        worker = fake_worker(run, stopper)
        seen = replace(run, str(models["b"]), "--owner-seconds", "0.2")
        assert worker.wait() == 0
        assert seen.returncode == 1
        assert f"owner pid {owner.process.pid} still lives" in seen.stdout
        assert f"kill -CONT {owner.process.pid}" in seen.stdout
        os.kill(owner.process.pid, signal.SIGCONT)
        resumed = replace(run, "--resume")
        assert resumed.returncode == 0, resumed.stdout
        assert owner.wait() == 0
    assert served_by(run / "w")[1] == str(models["b"])


def test_a_hanging_owner_is_not_replaced(models: dict[str, Path], run: Path) -> None:
    with stack.owner(models["a"], run) as owner:
        os.kill(owner.process.pid, signal.SIGSTOP)
        try:
            seen = replace(run, str(models["b"]))
        finally:
            os.kill(owner.process.pid, signal.SIGCONT)
        assert seen.returncode == 1
        assert f"Process {owner.process.pid} lives and does not answer" in seen.stdout
        assert owner.process.poll() is None


def test_memory_that_somebody_still_maps_is_not_gone(models: dict[str, Path], run: Path) -> None:
    """A process that keeps its mapping and its lease's memory, but no lease."""
    keeper = "kept = owner.map_allocations()\nowner.close()\n" + WAIT
    with stack.owner(models["a"], run) as owner:
        holder = fake_worker(run, keeper)
        seen = replace(run, str(models["b"]), "--memory-seconds", "0.3")
        assert owner.wait() == 0
        assert seen.returncode == 1
        assert f"memory is still in use by pid {holder.process.pid}" in seen.stdout
        assert holder.process.poll() is None
        holder.stop()
        resumed = replace(run, "--resume")
        assert resumed.returncode == 0, resumed.stdout


def test_a_worker_that_somebody_starts_again_stops_the_replacement(
    models: dict[str, Path], run: Path
) -> None:
    respawning = (
        """
def again(*_):
    child = os.fork()
    if child == 0:
        new = client.connect(owner.manifest_path, 'worker')
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        open('/proc/self/comm')
        os.write(write, b'x')
        while True: signal.pause()
    os.read(read, 1)
    os._exit(0)
read, write = os.pipe()
signal.signal(signal.SIGTERM, again)
"""
        + WAIT
    )
    with stack.owner(models["a"], run) as owner:
        worker = fake_worker(run, respawning)
        seen = replace(run, str(models["b"]))
        assert worker.wait() == 0
        assert seen.returncode == 1
        assert "the owner has users again" in seen.stdout
        pid, _, leases = served_by(run / "w")
        assert pid == owner.process.pid
        for lease in leases:
            end(lease)


@pytest.mark.parametrize("step", ["stop-workers", "stop-owner", "recheck", "start-owner",
                                  "start-workers", "ask"])  # fmt: skip
def test_a_replacement_killed_in_any_step_is_finished_by_resume(
    models: dict[str, Path], run: Path, step: str
) -> None:
    """Killed the moment that the step's first line is in the journal."""
    port = stack.free_port()
    with stack.owner(models["a"], run) as owner, stack.worker(run / "w", port) as worker:
        killed = replacing.killed_replace(run, step, models["b"])
        assert killed.returncode == -signal.SIGKILL, killed.stdout
        resumed = replace(run, "--resume")
        assert resumed.returncode == 0, resumed.stdout
        assert owner.wait() == 0
        assert worker.wait() == 0
    _, model, leases = served_by(run / "w")
    assert model == str(models["b"])
    assert len(leases) == 1, "a worker was started twice"
    status, health = stack.request(port, "GET", "/health")
    assert (status, health["pid"]) == (200, leases[0])


@pytest.mark.parametrize("step", ["start-workers", "ask"])
def test_a_next_owner_that_died_after_it_was_ready_is_started_again_without_its_workers(
    models: dict[str, Path], run: Path, step: str
) -> None:
    """Its worker, where there was one already, still has the memory and the socket."""
    port = stack.free_port()
    with stack.owner(models["a"], run) as owner, stack.worker(run / "w", port) as worker:
        killed = replacing.killed_replace(run, step, models["b"])
        assert killed.returncode == -signal.SIGKILL, killed.stdout
        assert (owner.wait(), worker.wait()) == (0, 0)
    dead, _, orphans = served_by(run / "w")
    end(dead)
    resumed = replace(run, "--resume")
    assert resumed.returncode == 0, resumed.stdout
    assert f"pid {dead}, is gone: it is started again" in resumed.stdout
    pid, model, (new,) = served_by(run / "w")
    assert (pid != dead, model) == (True, str(models["b"]))
    assert new not in orphans
    assert len(orphans) == (step == "ask")
    status, health = stack.request(port, "GET", "/health")
    assert (status, health["pid"]) == (200, new)


def test_a_resume_killed_while_it_starts_the_owner_again_is_resumed_with_that_owner(
    models: dict[str, Path], run: Path
) -> None:
    """Memory says nothing then: the owner that is there has it."""
    with stack.owner(models["a"], run) as owner:
        assert replacing.killed_replace(run, "ask", models["b"]).returncode == -signal.SIGKILL
        assert owner.wait() == 0
    dead = served_by(run / "w")[0]
    end(dead)
    killed = replacing.killed_replace(run, "start-owner", Path("--resume"))
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    assert f"pid {dead}, is gone: it is started again" in killed.stdout
    resumed = replace(run, "--resume")
    assert resumed.returncode == 0, resumed.stdout
    assert "is gone" not in resumed.stdout
    assert "going on with owner pid" in resumed.stdout
    told = [line for line in resumed.stdout.splitlines() if "done before" in line]
    assert any("budget" in line or "fit" in line for line in told), resumed.stdout
    assert served_by(run / "w")[1] == str(models["b"])
