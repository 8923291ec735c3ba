"""Two hundred streaming clients, most of whom hang up: nothing leaks, and nothing mixes."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import stack
from helpers.descriptors import open_fds
from helpers.tiny_gguf import TinyLlama, write_llama

CLIENTS = 200
TOKENS = 40
BODIES: list[dict[str, Any]] = [
    {
        "prompt": f"Number {i}: once upon a time {'x ' * (i * 7 % 40)}",
        "max_tokens": TOKENS,
        "temperature": 0.9,
        "seed": i,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    for i in range(12)
]


async def stream(port: int, body: dict[str, Any], hang_up_after: int | None = None) -> list[int]:
    """The ids of a whole stream; none of one that was left after so many events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(data)
        writer.write(head + data)
        if hang_up_after == 0:
            writer.transport.abort()
            return []
        assert (await reader.readline()).split()[1] == b"200"
        events: list[bytes] = []
        async for line in reader:
            if line.startswith(b"data: "):
                events.append(line[6:])
            if len(events) == hang_up_after:
                writer.transport.abort()
                return []
        assert events.pop() == b"[DONE]\n"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return [token for choice in choices for token in choice.get("token_ids") or ()]
    finally:
        writer.close()


async def storm(port: int) -> None:
    alone = [await stream(port, body) for body in BODIES]
    assert [len(ids) for ids in alone] == [TOKENS] * len(BODIES)
    draw = random.Random(5)

    async def client() -> None:
        which = draw.randrange(len(BODIES))
        leaves = draw.choice([None, 0, 1, draw.randrange(2, TOKENS)])
        ids = await stream(port, BODIES[which], leaves)
        assert ids == ([] if leaves is not None else alone[which])

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def figures(port: int) -> dict[str, float]:
    _, text = stack.request(port, "GET", "/metrics")
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_llama(path, TinyLlama(context=512))


@pytest.fixture
def private_run() -> Iterator[Path]:
    """A folder with a short path: the broker's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ds4-") as folder:
        yield Path(folder)


def test_streams_in_a_storm_equal_those_alone_and_leave_nothing_behind(
    model: Path, private_run: Path
) -> None:
    port = stack.free_port()
    capacity = ("--max-seqs", "8", "--max-queue", str(CLIENTS))
    with (
        stack.owner(model, private_run) as owner,
        stack.worker(private_run / "w", port, *capacity) as worker,
    ):
        before = figures(port)
        programs = (owner.process.pid, worker.process.pid)
        held = [len(open_fds(pid)) for pid in programs]
        asyncio.run(storm(port))
        while (now := figures(port))["ds4_permits_free"] < before["ds4_permits_free"]:
            continue  # clients that went away a moment ago
        for name in ("ds4_sequences_running", "ds4_sequences_waiting", "ds4_kv_pages_used"):
            assert now[name] == 0
        assert now['ds4_sequences_finished_total{reason="failed"}'] == 0
        assert now['ds4_sequences_finished_total{reason="cancelled"}'] > 0
        while [len(open_fds(pid)) for pid in programs] != held:
            assert stack.request(port, "GET", "/health")[0] == 200
        assert worker.stop() == 0
