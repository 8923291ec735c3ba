"""The same HTTP requests against our worker and another server, alternating in one run.

Owns: prompts, timing and comparison over HTTP only - nothing of either server's inside is used. The
peer is any command that serves OpenAI-compatible completions on the port named `{port}` in it.
"""

from __future__ import annotations

import shlex
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds4_worker.bench import processes
from ds4_worker.bench.report import Row, summarise

WORDS = "river stone cloud lamp market violin garden winter copper signal "


@contextmanager
def server(process: subprocess.Popen[bytes], port: int) -> Iterator[int]:
    """Yields the port once /health answers 200; kills the server afterwards."""
    try:
        processes.wait_until_healthy(port)
        yield port
    finally:
        process.kill()
        process.wait()


def _timed(port: int, prompt: str, tokens: int) -> tuple[float, float]:
    """(seconds to the first token, decode tokens per second) of one streamed completion."""
    body: dict[str, object] = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    with processes.connect(port) as connection:
        start = time.perf_counter()
        processes.send_post(connection, "/v1/completions", body)
        moments = [moment for moment, _ in processes.stream_events(connection)]
    return moments[0] - start, (len(moments) - 1) / (moments[-1] - moments[0])


def measure(manifest: Path, peer_command: str, runs: int) -> list[Row]:
    """Prefill time of about 512 tokens and decode rate of 64, ours and the peer's in turn."""
    ours_port, peer_port = processes.free_port(), processes.free_port()
    peer = subprocess.Popen(
        shlex.split(peer_command.replace("{port}", str(peer_port))),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first: dict[str, list[float]] = {"ours": [], "peer": []}
    rate: dict[str, list[float]] = {"ours": [], "peer": []}
    with (
        server(processes.start_worker(manifest, ours_port, "--speculate", "off"), ours_port),
        server(peer, peer_port),
    ):
        for run in range(runs + 1):
            for name, port in (("ours", ours_port), ("peer", peer_port)):
                seconds, _ = _timed(port, f"{run} " + WORDS * 51, 1 + 1)
                _, tokens = _timed(port, f"{run} Once upon a time", 64)
                if run:  # the first round warms both servers up
                    first[name].append(seconds * 1e3)
                    rate[name].append(tokens)
    return [
        summarise("peer: 512-token prompt to first token", "ms", first["peer"]),
        summarise(
            "ours: 512-token prompt to first token",
            "ms",
            first["ours"],
            reference=statistics.median(first["peer"]),
            reference_name="peer",
        ),
        summarise("peer: decode over HTTP", "tokens/s", rate["peer"]),
        summarise(
            "ours: decode over HTTP",
            "tokens/s",
            rate["ours"],
            reference=statistics.median(rate["peer"]),
            reference_name="peer",
        ),
    ]
