"""Restarts: from `kill -9` and exec to the next HTTP answer and the next token.

Owns: the timing of a plain exec of the worker against a living owner. Clients connect before the
worker exists - the owner holds the listening socket - so no polling interval enters the figures.
"""

from __future__ import annotations

import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ds4_common.errors import Ds4Error
from ds4_worker.bench import processes
from ds4_worker.bench.report import Row, summarise

CHAT: dict[str, object] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
    "max_tokens": 16,  # a token may be half a character; the first piece of text ends the clock
    "ignore_eos": True,
    "stream": True,
}


def _killed(worker: subprocess.Popen[bytes]) -> float:
    """Kills and reaps a worker; returns the moment of the kill."""
    moment = time.perf_counter()
    worker.kill()
    worker.wait()
    return moment


def _first_content(connection_events: Iterator[tuple[float, dict[str, object]]]) -> float:
    for moment, event in connection_events:
        for choice in event["choices"]:  # type: ignore[attr-defined]
            if choice["delta"].get("content"):
                return moment
    raise Ds4Error("the stream ended without a token")


def measure(manifest: Path, runs: int, label: str = "", *flags: str) -> list[Row]:
    """Medians over `runs` restarts; each restart answers one /health and, separately, one chat.
    `flags`: further ones of the worker."""
    port = processes.free_port()
    exec_health, kill_health, exec_token = [], [], []
    worker = processes.start_worker(manifest, port, *flags)
    try:
        processes.wait_until_healthy(port)
        for _ in range(runs):
            killed = _killed(worker)
            started = time.perf_counter()
            worker = processes.start_worker(manifest, port, *flags)
            processes.wait_until_healthy(port)
            answered = time.perf_counter()
            exec_health.append((answered - started) * 1e3)
            kill_health.append((answered - killed) * 1e3)

            _killed(worker)
            with processes.connect(port) as connection:
                processes.send_post(connection, "/v1/chat/completions", CHAT)
                started = time.perf_counter()
                worker = processes.start_worker(manifest, port, *flags)
                first = _first_content(processes.stream_events(connection))
                exec_token.append((first - started) * 1e3)
    finally:
        _killed(worker)
    return [
        summarise(f"exec to /health 200{label}", "ms", exec_health, goal="<= 220"),
        summarise(f"kill -9 to /health 200{label}", "ms", kill_health),
        summarise(f"exec to first chat token{label}", "ms", exec_token, goal="<= 300"),
    ]


def write_ballast(path: Path, gigabytes: float) -> None:
    """A sparse, valid GGUF v3 file of f32 tensors of 1 GiB, or one smaller one: ranges that no
    worker needs."""
    n_bytes = max(4096, min(1 << 30, int(gigabytes * 1e9) // 4096 * 4096))
    count, elements = max(1, round(gigabytes * 1e9 / (1 << 30))), n_bytes // 4
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, count, 1))
    key, value = b"general.architecture", b"ballast"
    header += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    for index in range(count):
        name = f"ballast.{index}".encode()
        header += struct.pack("<Q", len(name)) + name
        header += struct.pack("<IQIQ", 1, elements, 0, index * n_bytes)
    start = -(-len(header) // 32) * 32
    with path.open("wb") as file:
        file.write(header)
        file.truncate(start + count * n_bytes)


@contextmanager
def owner_with_ballast(model: Path, gigabytes: float, *more: str) -> Iterator[Path]:
    """An owner whose manifest holds `gigabytes` of further ranges (0: none). `more`: flags."""
    with tempfile.TemporaryDirectory(prefix="ds4-bench-") as folder:
        run = Path(folder)
        flags: tuple[str, ...] = ()
        if gigabytes:
            ballast = run / "ballast.gguf"
            write_ballast(ballast, gigabytes)
            flags = ("--drafter", str(ballast))
        with processes.owner(model, run, *flags, *more) as manifest:
            yield manifest


def run(model: Path, runs: int, extra_gigabytes: float) -> list[Row]:
    """Restart figures alone and, when asked, again beside further ranges."""
    with owner_with_ballast(model, 0) as manifest:
        rows = measure(manifest, runs)
    if extra_gigabytes:
        with owner_with_ballast(model, extra_gigabytes) as manifest:
            label = f", {extra_gigabytes:g} GB more"
            rows += beside(measure(manifest, runs, label), rows, "without")
    return rows


def beside(rows: Sequence[Row], references: Sequence[Row], name: str) -> list[Row]:
    """The rows, each with the figure of `references` that it must not exceed by much."""
    return [
        replace(row, reference=base.median, reference_name=name, goal="<= 1.05")
        for row, base in zip(rows, references, strict=True)
    ]
