"""A worker as a process: signals, neighbours, owners that are late, wrong or private."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from helpers import stack
from helpers.tiny_gguf import write_llama

TEXT = "/v1/completions"
STORY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0.8, "ignore_eos": True}


@contextmanager
def streaming(port: int, max_tokens: int) -> Iterator[http.client.HTTPResponse]:
    """A stream whose first event has arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {**STORY, "max_tokens": max_tokens, "stream": True}
    try:
        connection.request("POST", TEXT, json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
        yield response
    finally:
        connection.close()


def test_sigterm_lets_streams_finish_and_ends_with_0(manifest: Path) -> None:
    port = stack.free_port()
    with stack.worker(manifest, port, "--drain-seconds", "60") as worker:
        with streaming(port, 60) as response:
            worker.process.send_signal(signal.SIGTERM)
            assert response.read().endswith(b"data: [DONE]\n\n")
        assert worker.wait() == 0


def test_streams_that_outlast_the_drain_are_cut(manifest: Path) -> None:
    port = stack.free_port()
    with stack.worker(manifest, port, "--drain-seconds", "0.05") as worker:
        with streaming(port, 8000) as response:
            worker.process.send_signal(signal.SIGTERM)
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                response.read()
        assert worker.wait() == 0
        assert "cut off" in worker.text


def test_a_second_sigterm_is_the_first_and_ctrl_c_ends_at_once(manifest: Path) -> None:
    port = stack.free_port()
    with stack.worker(manifest, port, "--drain-seconds", "600") as worker, streaming(port, 8000):
        worker.process.send_signal(signal.SIGTERM)
        worker.wait_for("stopping")
        for _ in range(3):
            worker.process.send_signal(signal.SIGTERM)
        while worker.process.poll() is None:
            worker.process.send_signal(signal.SIGINT)  # the first ones may still be echoes
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(0.1)
        assert worker.wait() == 130


def test_a_signal_to_the_whole_group_and_to_the_worker_lets_streams_finish(manifest: Path) -> None:
    port = stack.free_port()
    with stack.worker(manifest, port, "--drain-seconds", "600") as worker:
        with streaming(port, 40) as response:
            for _ in range(2):  # as `timeout` does
                worker.process.send_signal(signal.SIGTERM)
            assert response.read().rstrip().endswith(b"[DONE]")
        assert worker.wait() == 0


def test_clients_of_a_draining_worker_are_served_by_the_next(manifest: Path) -> None:
    port = stack.free_port()
    with stack.worker(manifest, port, "--drain-seconds", "60") as old:
        with streaming(port, 200) as response:
            old.process.send_signal(signal.SIGTERM)
            old.wait_for("stopping")
            with ThreadPoolExecutor(1) as pool:
                health = pool.submit(stack.request, port, "GET", "/health")
                with stack.worker(manifest, port) as new:
                    assert health.result(60)[1]["pid"] == new.process.pid
            assert response.read().endswith(b"data: [DONE]\n\n")
        assert old.wait() == 0


def test_an_answer_does_not_depend_on_what_else_runs(manifest: Path) -> None:
    """Bit-equal alone, in a full batch, beside long prompts, and with another chunking."""
    bodies = [
        {**STORY, "prompt": prompt, "seed": seed, "max_tokens": 12, "logprobs": 3}
        for seed, prompt in enumerate(("Once upon", "The sea " * 40, "def f(x):", "A"))
    ]
    port = stack.free_port()
    with stack.worker(manifest, port, "--max-seqs", "4") as worker:
        alone = [stack.request(port, "POST", TEXT, body)[1]["choices"] for body in bodies]
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(stack.request, port, "POST", TEXT, body) for body in bodies]
            assert [job.result(60)[1]["choices"] for job in jobs] == alone
        assert worker.stop() == 0
    other = ("--max-seqs", "2", "--prefill-chunk", "7", "--mixed-prefill-quantum", "3")
    with stack.worker(manifest, port, *other, "--threads", "1"), ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(stack.request, port, "POST", TEXT, body) for body in bodies]
        assert [job.result(60)[1]["choices"] for job in jobs] == alone


def test_a_long_prompt_does_not_stop_a_running_stream(manifest: Path) -> None:
    port = stack.free_port()
    flags = ("--mixed-prefill-quantum", "16", "--max-seqs", "2")
    with stack.worker(manifest, port, *flags), streaming(port, 4000) as response:
        done = threading.Event()
        long = {"prompt": [500] * 800, "max_tokens": 1}

        def ask() -> None:
            assert stack.request(port, "POST", TEXT, long)[0] == 200
            done.set()

        asking = threading.Thread(target=ask)
        asking.start()
        events = 0
        while not done.is_set():
            events += response.readline().startswith(b"data: ")
        asking.join()
        assert events >= 800 // 16 - 10  # one per step of the prompt, less what was under way


def test_another_model_than_the_owners_is_refused(manifest: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "tiny.gguf")
    worker = stack.Program.start("ds4_worker.cli", "--manifest", str(manifest), "-m", str(other))
    assert worker.wait() == 1
    assert "CONTENT IDENTITY MISMATCH for base" in worker.text


def test_a_context_beyond_the_models_is_refused(manifest: Path) -> None:
    worker = stack.Program.start(
        "ds4_worker.cli", "--manifest", str(manifest), "--ctx", "100000", "--port", "0"
    )
    assert worker.wait() == 2
    assert "has a context of 8192 tokens" in worker.text


@contextmanager
def loading_owner(tmp_path: Path) -> Iterator[tuple[stack.Program, stack.Program, int]]:
    """An owner stuck while loading, a worker that listens already, and its port."""
    model = write_llama(tmp_path / "tiny.gguf")
    with tempfile.TemporaryDirectory(prefix="ds4-") as run:
        flags = ("--base", str(model), "--manifest", f"{run}/w", "--scope", "base")
        owner = stack.Program.start(
            "helpers.stuck_owner", "blobs", *flags, "--lock-file", f"{run}/lock"
        )
        try:
            owner.wait_for("stuck at blobs")
            port = stack.free_port()
            flags = ("--manifest", f"{run}/w", "--port", str(port), "--wait-owner", "60")
            worker = stack.Program.start("ds4_worker.cli", *flags)
            worker.wait_for("listening")
            yield owner, worker, port
        finally:
            if owner.process.poll() is None:
                owner.stop(signal.SIGKILL)


def test_a_worker_listens_while_its_owner_is_still_loading(tmp_path: Path) -> None:
    with loading_owner(tmp_path) as (owner, worker, port):
        status, health = stack.request(port, "GET", "/health")
        assert (status, health["status"]) == (503, "loading")
        assert stack.request(port, "POST", TEXT, STORY)[0] == 503
        os.kill(int(owner.wait_for("stuck at blobs").rsplit(" ", 1)[1]), signal.SIGUSR1)
        worker.wait_for("ready http")
        assert stack.request(port, "GET", "/health")[0] == 200
        assert stack.request(port, "POST", TEXT, {**STORY, "max_tokens": 2})[0] == 200
        owner.stop(signal.SIGKILL)
        worker.wait_for("the owner is gone")
        assert stack.request(port, "POST", TEXT, {**STORY, "max_tokens": 2})[0] == 200
        assert worker.stop() == 0


def test_a_worker_told_to_stop_does_not_wait_for_a_loading_owner(tmp_path: Path) -> None:
    with loading_owner(tmp_path) as (owner, worker, _):
        assert worker.stop() == 0
        assert owner.process.poll() is None


def test_an_owner_that_dies_while_loading_ends_the_worker_with_1(tmp_path: Path) -> None:
    with loading_owner(tmp_path) as (owner, worker, _):
        owner.stop(signal.SIGKILL)
        assert worker.wait() == 1


def test_an_address_of_another_program_is_one_clear_message(manifest: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("--manifest", str(manifest), "--port", str(port))
        worker = stack.Program.start("ds4_worker.cli", *flags)
        assert worker.wait() == 1
    assert len(worker.lines) == 1
    assert str(port) in worker.text


def test_a_worker_with_32_descriptors_turns_clients_away_and_stays_whole(manifest: Path) -> None:
    port = stack.free_port()
    command = [sys.executable, "-m", "ds4_worker.cli", "--manifest", str(manifest)]
    worker = stack.Program.following(
        subprocess.Popen(
            ["sh", "-c", 'ulimit -n 32 && exec "$@"', "sh", *command, "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=stack.process_environment(),
        )
    )
    clients: list[socket.socket] = []
    try:
        worker.wait_for("ready http")
        clients = [stack.connected(port) for _ in range(40)]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        statuses: set[bytes] = set()
        while not statuses >= {b"200", b"503"}:
            readable, _, _ = select.select(clients, [], [], 60)
            assert readable
            statuses |= {client.recv(1000)[9:12] for client in readable}
            for client in readable:
                clients.remove(client)
                client.close()
        for client in clients:
            client.close()
        while stack.request(port, "GET", "/health")[0] == 503:
            continue  # it has not noticed yet that all of them are gone
        # Both read modules that were not needed before, so both need descriptors to spare.
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert stack.request(port, "POST", "/v1/chat/completions", chat)[0] == 200
        assert stack.request(port, "GET", "/metrics")[0] == 200
    finally:
        for client in clients:
            client.close()
        assert worker.stop() == 0
    assert "Traceback" not in worker.text
