"""Private owners: found, started, shared, left running, and taken back by a command that fails."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ds4_common import client
from helpers import stack
from helpers.models import smollm2_path
from helpers.tiny_gguf import write_llama

TEXT = "/v1/completions"
STORY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0.8, "ignore_eos": True}


@pytest.fixture
def private_runtime() -> Iterator[Path]:
    """A run folder whose private owners are stopped afterwards."""
    with tempfile.TemporaryDirectory(prefix="ds4-") as folder:
        yield Path(folder)
        for node in (Path(folder) / "ds4").glob("*.ctl"):
            stop = ("ds4_owner.cli", "stop", "--manifest", str(node.with_suffix("")))
            assert stack.Program.start(stop[0], *stop[1:]).wait() == 0


def left_behind(runtime: Path) -> list[str]:
    return sorted(path.name for path in (runtime / "ds4").iterdir())


def test_a_private_owner_of_a_worker_without_an_address_goes_with_it(
    private_runtime: Path, tmp_path: Path
) -> None:
    environment = {"XDG_RUNTIME_DIR": str(private_runtime)}
    model = write_llama(tmp_path / "tiny.gguf")
    file = private_runtime / "file"
    file.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for address in (("--port", port), ("--host", f"unix:{file}"), ("--host", "no.such.host.")):
            worker = stack.Program.start(
                "ds4_worker.cli", "-m", str(model), *address, **environment
            )
            assert worker.wait() == 1
            assert "starting a private owner" in worker.lines[0]
            assert "stopped the private owner" in worker.lines[1]
            assert left_behind(private_runtime) == []


STARTER = """
import sys
from ds4_common.errors import AddressError
from ds4_worker import private_owner
found = private_owner.ensure_owner(sys.argv[1], "auto")
print(found.manifest, flush=True)
sys.stdin.readline()
with found.use:
    raise AddressError("no address")
"""


def test_a_private_owner_that_another_process_uses_outlives_its_starter(
    private_runtime: Path, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=stack.process_environment(XDG_RUNTIME_DIR=str(private_runtime)),
    )
    assert starter.stdout is not None
    manifest = Path(starter.stdout.readline().strip())
    with stack.worker(manifest, stack.free_port()) as worker:
        _, said = starter.communicate("\n")
        assert f"not stopped: pid {worker.process.pid} (worker) uses this owner" in said
        with client.connect(str(manifest), "status") as operator:
            assert len(operator.status().leases) == 1


@pytest.mark.parametrize("program", ["ds4_worker.cli", "ds4_worker.oneshot"])
def test_a_failed_load_leaves_no_file_behind(
    program: str, private_runtime: Path, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    os.truncate(model, model.stat().st_size - 64)
    flags = ("-m", str(model), *(("-p", "x") if program.endswith("oneshot") else ("--port", "0")))
    failed = stack.Program.start(program, *flags, XDG_RUNTIME_DIR=str(private_runtime))
    assert failed.wait() == 1
    assert "tiny.gguf" in failed.lines[-1]
    assert left_behind(private_runtime) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_only_a_killed_private_owner_leaves_its_log(
    number: signal.Signals, private_runtime: Path, tmp_path: Path
) -> None:
    environment = {"XDG_RUNTIME_DIR": str(private_runtime)}
    model = write_llama(tmp_path / "tiny.gguf")
    command = ("-m", str(model), "--port", str(stack.free_port()))
    worker = stack.Program.start("ds4_worker.cli", *command, **environment)
    worker.wait_for("ready http")
    (log,) = (private_runtime / "ds4").glob("*.log")
    with client.connect(str(log.with_suffix("")), "status") as operator:
        pidfd = os.pidfd_open(operator.owner_pid)
    signal.pidfd_send_signal(pidfd, number)
    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)
    assert log.exists() == (number == signal.SIGKILL)
    assert worker.stop() == 0
    if number == signal.SIGTERM:
        assert left_behind(private_runtime) == []


@contextmanager
def served(model: Path, runtime: Path) -> Iterator[tuple[stack.Program, Path]]:
    """A worker that serves, and the log of its private owner."""
    worker = stack.Program.start(
        *("ds4_worker.cli", "-m", str(model), "--port", str(stack.free_port())),
        XDG_RUNTIME_DIR=str(runtime),
    )
    try:
        worker.wait_for("ready http")
        (log,) = (runtime / "ds4").glob("*.log")
        yield worker, log
    finally:
        assert worker.stop() == 0


def stop_owner(log: Path) -> None:
    """Of a private owner by the name of its log; it has ended afterwards."""
    with client.connect(str(log.with_suffix("")), "stop") as operator:
        pidfd = os.pidfd_open(operator.owner_pid)
        operator.request_stop()
    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)


@pytest.mark.parametrize("held", [False, True], ids=["interrupted", "under way"])
def test_the_lock_of_a_start_goes_with_the_owner_unless_somebody_holds_it(
    held: bool, private_runtime: Path, tmp_path: Path
) -> None:
    with served(write_llama(tmp_path / "tiny.gguf"), private_runtime) as (_, log):
        with open(log.with_suffix(".start"), "wb") as lock:
            if held:
                fcntl.flock(lock, fcntl.LOCK_EX)
            stop_owner(log)
            assert left_behind(private_runtime) == [f"{log.stem}.start"] * held
    assert left_behind(private_runtime) == []


def test_a_worker_leaves_the_log_of_the_owner_after_its_own(
    private_runtime: Path, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    with ExitStack() as second:
        with served(model, private_runtime) as (_, log):
            stop_owner(log)
            assert not log.exists()
            worker, log = second.enter_context(served(model, private_runtime))
            assert "starting a private owner" in worker.text
        assert log.exists()


def test_an_api_key_reaches_no_log_and_no_owner_that_outlives_the_worker(
    private_runtime: Path, tmp_path: Path
) -> None:
    environment = {"XDG_RUNTIME_DIR": str(private_runtime), "DS4_API_KEY": "sesame-open"}
    port = stack.free_port()
    model = write_llama(tmp_path / "tiny.gguf")
    worker = stack.Program.start(
        "ds4_worker.cli", "-m", str(model), "--port", str(port), **environment
    )
    try:
        worker.wait_for("ready http")
        body = {**STORY, "max_tokens": 2}
        for key, status in (("sesame-shut", 401), ("sesame-open", 200)):
            bearer = {"Authorization": f"Bearer {key}"}
            assert stack.request(port, "POST", TEXT, body, **bearer)[0] == status
        _, metrics = stack.request(port, "GET", "/metrics", Authorization="Bearer sesame-open")
    finally:
        worker.stop(signal.SIGKILL)
    (log,) = (private_runtime / "ds4").glob("*.log")
    with client.connect(str(log.with_suffix("")), "status") as operator:
        owner = operator.owner_pid
    for text in (worker.text, metrics, log.read_text()):
        assert "sesame" not in text
    for place in ("environ", "cmdline"):
        assert b"sesame" not in Path(f"/proc/{owner}/{place}").read_bytes()


def test_workers_started_at_once_share_one_private_owner(private_runtime: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(private_runtime)}
    ports = [stack.free_port() for _ in range(3)]
    model = str(smollm2_path())
    workers = [
        stack.Program.start("ds4_worker.cli", "-m", model, "--port", str(port), **environment)
        for port in ports
    ]
    try:
        for worker, port in zip(workers, ports, strict=True):
            worker.wait_for("ready http")
            assert stack.request(port, "POST", TEXT, {**STORY, "max_tokens": 2})[0] == 200
    finally:
        for worker in workers:
            worker.stop(signal.SIGKILL)
    assert sum("starting a private owner" in worker.text for worker in workers) == 1
    assert len(list((private_runtime / "ds4").glob("*.log"))) == 1
    assert (private_runtime / "ds4").stat().st_mode & 0o777 == 0o700
    # The owner stays: the next program finds the weights loaded.
    done = subprocess.run(
        [sys.executable, "-m", "ds4_worker.oneshot", "-m", model, "-p", "Hello", "--temp", "0"],
        capture_output=True,
        text=True,
        env=stack.process_environment(**environment),
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Hello! How can I assist you today?\n"
