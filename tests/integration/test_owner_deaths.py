"""Owners die, come back and replace themselves while workers serve; several live side by side."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ds4_common import client
from helpers import stack
from helpers.service_manager import ServiceManager, service_manager
from helpers.stack import Program
from helpers.tiny_gguf import TinyLlama, write_llama

ASK = {"prompt": "Once", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ds4-") as folder:
        yield Path(folder)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack_:
        yield stack_


def start_worker(cleanup: ExitStack, run: Path, port: int, *flags: str, until: str) -> Program:
    program = Program.start(
        "ds4_worker.cli", "--manifest", str(run / "w"), "--port", str(port), *flags
    )

    def end() -> None:
        if program.process.poll() is None:
            program.process.kill()
        program.wait()

    cleanup.callback(end)
    program.wait_for(until)
    return program


def health(port: int) -> dict[str, Any]:
    status, body = stack.request(port, "GET", "/health")
    assert status == 200
    assert isinstance(body, dict)
    return body


def pid_seen_by(client: http.client.HTTPConnection) -> int:
    client.request("GET", "/health")
    pid: int = json.loads(client.getresponse().read())["pid"]
    return pid


def wait_until(port: int, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Asks /health until it says so; the test's time limit is the deadline."""
    while not found(body := health(port)):
        pass
    return body


def answers(port: int) -> object:
    status, body = stack.request(port, "POST", "/v1/completions", ASK)
    assert status == 200, body
    return body["choices"]


def test_workers_serve_on_and_say_so_while_no_owner_lives(
    cleanup: ExitStack, run: Path, tmp_path: Path
) -> None:
    model, port = write_llama(tmp_path / "tiny.gguf"), stack.free_port()
    with stack.owner(model, run) as owner:
        first = start_worker(cleanup, run, port, until="ready http")
        standby = start_worker(cleanup, run, port, "--standby", until="standby for")
        before = answers(port)
        assert health(port)["owner"] == "alive"
        owner.stop(signal.SIGKILL)
        first.wait_for("the owner is gone")
        body = wait_until(port, lambda body: body["owner"] == "gone")
        assert "mapped already" in body["detail"]
        assert answers(port) == before
        # The place changes hands without an owner, clients and all.
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
            assert pid_seen_by(client) == first.process.pid
            client.auto_open = 0  # the same connection, or none
            first.process.kill()
            assert pid_seen_by(client) == standby.process.pid
        assert answers(port) == before
        wait_until(port, lambda body: body["owner"] == "gone")


def test_another_owner_is_not_taken_for_the_one_that_died(
    cleanup: ExitStack, run: Path, tmp_path: Path
) -> None:
    model, port = write_llama(tmp_path / "tiny.gguf"), stack.free_port()
    with stack.owner(model, run) as owner:
        worker = start_worker(cleanup, run, port, until="ready http")
        before = answers(port)
        owner.stop(signal.SIGKILL)
        worker.wait_for("the owner is gone")
    other = write_llama(tmp_path / "other.gguf", TinyLlama(seed=5))
    with stack.owner(other, run) as owner:
        body = wait_until(port, lambda body: body["owner"] == "replaced")
        assert f"another owner, pid {owner.process.pid}, has other weights" in body["detail"]
        assert answers(port) == before
        assert worker.stop() == 0


def test_a_worker_notices_nothing_of_an_owner_that_replaces_itself(
    cleanup: ExitStack, run: Path, tmp_path: Path
) -> None:
    model, port = write_llama(tmp_path / "tiny.gguf"), stack.free_port()
    with stack.owner(model, run) as owner:
        old = start_worker(cleanup, run, port, until="ready http")
        owner.process.send_signal(signal.SIGUSR2)
        owner.wait_for("reexec")
        with client.connect(str(run / "w"), role="status") as connection:
            assert [lease.pid for lease in connection.status().leases] == [old.process.pid]
        assert health(port)["owner"] == "alive"
        assert "the owner is gone" not in old.text
        # The seat is the same: the next worker takes over instead of serving beside.
        new = start_worker(cleanup, run, port, until="ready http")
        assert old.wait() == 0
        assert health(port)["pid"] == new.process.pid


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with service_manager(tmp_path) as made:
        yield made


def test_a_worker_registers_with_the_owner_that_adopted_its_memory(
    cleanup: ExitStack, run: Path, tmp_path: Path, manager: ServiceManager
) -> None:
    model, port = write_llama(tmp_path / "tiny.gguf"), stack.free_port()
    command = ["ds4_owner.cli", "--base", str(model), "--manifest", str(run / "w")]
    command += ["--scope", "base", "--lock-file", str(run / "lock")]
    manager.start(*command)
    manager.wait_ready()
    old = start_worker(cleanup, run, port, until="ready http")
    manager.wait_for(lambda: any("seat" in name for name in manager.names()), "a stored seat")
    manager.wait_for(lambda: "ds4.state.2" in manager.names(), "the record of a listener")
    assert manager.program is not None
    manager.program.stop(signal.SIGKILL)
    old.wait_for("the owner is gone")
    manager.start(*command)
    manager.wait_ready(2)
    old.wait_for("registered with the owner again")
    assert health(port)["owner"] == "alive"
    with client.connect(str(run / "w"), role="status") as connection:
        assert [lease.pid for lease in connection.status().leases] == [old.process.pid]
    new = start_worker(cleanup, run, port, until="ready http")
    assert old.wait() == 0
    assert health(port)["pid"] == new.process.pid
    manager.program.stop()


def test_two_owners_on_one_host_have_workers_of_their_own(
    cleanup: ExitStack, run: Path, tmp_path: Path
) -> None:
    texts = []
    ports = [stack.free_port(), stack.free_port()]
    for number, port in enumerate(ports):
        folder = run / str(number)
        os.mkdir(folder)
        model = write_llama(tmp_path / f"model{number}.gguf", TinyLlama(seed=number + 1))
        cleanup.enter_context(stack.owner(model, folder))
        start_worker(cleanup, folder, port, "--name", "same", until="ready http")
        texts.append(answers(port))
        assert health(port)["model"] == f"model{number}"
    assert texts[0] != texts[1]
    # The address of one is not to be had from the other.
    stranger = start_worker(cleanup, run / "0", ports[1], until="in use")
    assert stranger.wait() == 1
    assert answers(ports[1]) == texts[1]
