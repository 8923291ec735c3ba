"""Models replaced under real owners and workers, and every way in which that is refused halfway.

Nothing is faked but the workers that misbehave on purpose. What a replacement started lives in
sessions of its own; the fixture ends it through its manifests.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4_common.gguf import GgmlType
from ds4_owner.replace import processes
from helpers import replacing, stack
from helpers.replacing import QUICK, end, events, replace, served_by, tool
from helpers.stack import DEADLINE_SECONDS, Program
from helpers.tiny_gguf import RawTensor, TinyLlama, gguf_bytes, write_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_llama(folder / f"{name}.gguf", TinyLlama(seed=seed))
        for seed, name in enumerate("ab")
    }


@pytest.fixture
def run() -> Iterator[Path]:
    with replacing.folder() as made:
        yield made


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


def an_address(kind: str, run: Path) -> int | Path:
    return stack.free_port() if kind == "tcp" else run / "http.sock"


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


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_top_shows_memory_workers_and_rates_once_when_piped(
    models: dict[str, Path], run: Path, kind: str
) -> None:
    at = an_address(kind, run)
    with stack.owner(models["a"], run) as owner, stack.worker(run / "w", at) as worker:
        body = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
        assert stack.request(at, "POST", "/v1/completions", body)[0] == 200
        seen = tool("top", "--manifest", str(run / "w"), "--interval", "0.1", run=run)
        assert seen.returncode == 0, seen.stdout
        rows = {line.split()[0]: line.split() for line in seen.stdout.splitlines() if line.strip()}
        assert str(models["a"].name) in rows[str(owner.process.pid)]
        shown = rows[str(worker.process.pid)]
        assert shown[2] == (f"127.0.0.1:{at}" if kind == "tcp" else f"unix:{at}")
        assert "-" not in shown, "the worker's counters were not read"
        assert "available" in seen.stdout


def test_top_on_a_terminal_is_left_with_q(models: dict[str, Path], run: Path) -> None:
    with stack.owner(models["a"], run) as owner:
        terminal, inside = os.openpty()
        import fcntl
        import termios

        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "ds4_owner.cli", "top", "--manifest", str(run / "w")],
            stdin=inside, stdout=inside, stderr=inside,
            env=stack.process_environment(TERM="xterm"),
        )  # fmt: skip
        os.close(inside)
        shown = b""
        while str(owner.process.pid).encode() not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, b"q")
        while process.poll() is None:
            try:
                os.read(terminal, 4096)
            except OSError:
                break
        assert process.wait(DEADLINE_SECONDS) == 0
        os.close(terminal)
