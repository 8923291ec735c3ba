"""The demonstration behind `make run`: one owner, a worker that is killed, one that goes on.

Splits the real small model into three shards, starts an owner on them, asks a worker, kills it
with `kill -9`, and asks the next one. Every step prints what it took. On a terminal it then keeps
serving until Ctrl-C; without one it stops everything and exits 0.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.fetch_model import NAME, cache_folder
from helpers.split import split_gguf

BIN = Path(sys.executable).parent
QUESTION = "What is the capital of France? Answer in one sentence."
READY_SECONDS = 120.0


def say(text: str) -> None:
    print(text, flush=True)


def free_port() -> int:
    """8000 when nobody has it, else any free port."""
    for port in (8000, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise SystemExit("no free TCP port on 127.0.0.1")


@contextmanager
def owner_process(shard: Path, manifest: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts the weight owner and waits for its `ready` line; stops it with SIGTERM."""
    command = [str(BIN / "ds4-weight-server"), "--base", str(shard), "--manifest", str(manifest)]
    command += ["--scope", "base", "--lock-file", str(manifest.with_suffix(".lock"))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        for line in process.stderr:
            say(f"  owner | {line.rstrip()}")
            if line.startswith("ready manifest=") or " ready manifest=" in line:
                break
        else:
            raise SystemExit(f"the owner stopped before it was ready (exit {process.wait()})")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def start_worker(manifest: Path, port: int) -> subprocess.Popen[bytes]:
    command = [str(BIN / "ds4-server"), "--manifest", str(manifest), "--port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_health(port: int, worker: subprocess.Popen[bytes], start: float) -> float:
    """Seconds from `start` to the first 200 of /health."""
    while time.perf_counter() - start < READY_SECONDS:
        if worker.poll() is not None:
            raise SystemExit(f"the worker stopped with exit code {worker.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return time.perf_counter() - start
        except OSError:
            time.sleep(0.002)  # nobody listens yet: the very first worker creates the socket
        finally:
            connection.close()
    raise SystemExit(f"no 200 from /health within {READY_SECONDS:.0f} s")


def ask(port: int) -> tuple[str, float, float]:
    """Streams one answer; returns the text, seconds to its first token, and tokens per second."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 48,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"HTTP {response.status}: {response.read().decode()}")
    text, first, tokens = "", 0.0, 0
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            if piece := choice["delta"].get("content"):
                first = first or time.perf_counter() - start
                text += piece
    connection.close()
    return text, first, (tokens - 1) / (time.perf_counter() - start - first)


def serve_once(title: str, manifest: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a worker, asks it, reports; returns the running worker and its answer."""
    start = time.perf_counter()
    worker = start_worker(manifest, port)
    healthy = wait_for_health(port, worker, start)
    text, first, rate = ask(port)
    say(f"{title} (pid {worker.pid}): serving {healthy * 1e3:.0f} ms after exec, first token")
    say(f"  {first * 1e3:.0f} ms after the question, {rate:.0f} tokens/s: {text.strip()!r}")
    return worker, text


def main() -> int:
    # Short path: the broker's Unix socket lies beside the manifest.
    with tempfile.TemporaryDirectory(prefix="ds4-run-") as folder:
        run = Path(folder)
        model = cache_folder() / NAME
        start = time.perf_counter()
        shards = split_gguf(model, run / "smollm2", 3)
        say(f"split {model.name} into {len(shards)} shards: {time.perf_counter() - start:.1f} s")
        manifest = run / "w.manifest"
        port = free_port()

        start = time.perf_counter()
        with owner_process(shards[0], manifest) as owner:
            loaded = time.perf_counter() - start
            size = sum(shard.stat().st_size for shard in shards)
            say(f"owner (pid {owner.pid}): {size / 1e6:.0f} MB ready after {loaded * 1e3:.0f} ms")
            worker, before = serve_once("first worker", manifest, port)
            worker.kill()
            worker.wait()
            say(f"kill -9 {worker.pid}; the owner keeps the weights and the listening socket")
            worker, after = serve_once("second worker", manifest, port)
            if before != after:
                raise SystemExit("the second worker gave another answer; this is a bug")
            say("the same answer, byte for byte; the weights were not read again")
            try:
                if os.isatty(sys.stdin.fileno()) and os.isatty(sys.stdout.fileno()):
                    keep_serving(port)
            finally:
                worker.terminate()
                worker.wait(30)
    return 0


def keep_serving(port: int) -> None:
    say(f"\nserving until Ctrl-C; in a browser: http://127.0.0.1:{port}/ - or try:\n")
    say(
        f"curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        """  -d '{"messages":[{"role":"user","content":"Tell me a joke."}],"stream":true}'\n"""
    )
    try:
        signal.pause()
    except KeyboardInterrupt:
        say("stopping")


if __name__ == "__main__":
    sys.exit(main())
