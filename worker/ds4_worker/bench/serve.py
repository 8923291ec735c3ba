"""What serving costs: the same answers from the engine alone and over HTTP, alternating in one run.

Owns: a client that does as little as a client can, so that what is measured beside the engine is
the server. Engine and worker map the same owner's weights and compute with as many threads; only
one of them computes at a time.
"""

from __future__ import annotations

import json
import selectors
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from ds4_common.errors import Ds4Error
from ds4_common.tokenizer.encoder import StreamDetokenizer
from ds4_worker.bench import processes, speed
from ds4_worker.bench.peer import server
from ds4_worker.bench.report import Row, summarise
from ds4_worker.engine.api import Generation
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import ExecutorConfig

CHAT = "/v1/chat/completions"
_ANSWER_SECONDS = 600.0
_WORDS = "river stone cloud lamp market violin garden winter copper signal "
_LONG_WORDS = 3960  # about 4000 tokens
_LONG_TURNS = 40
_CONTEXT_TOKENS = 8192
# Goals: the share of the engine's rate that is left, and milliseconds to the engine's queue.
_GOALS = {1: ">= 0.95", 8: ">= 0.90"}
_ENQUEUE_GOAL = "<= 2"
_CONSTRAINED_GOAL = ">= 0.90"
# An answer that goes on for longer than anybody waits: its end is the limit, not the grammar.
_SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "words", "schema": _SCHEMA}}


def chat(text: str, tokens: int, **fields: object) -> dict[str, object]:
    """A chat request with a greedy answer of exactly `tokens` tokens, unless `fields` say else."""
    messages = [{"role": "user", "content": text}]
    fixed = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"messages": messages, **fixed, **fields}


def ask(port: int, body: dict[str, object]) -> dict[str, object]:
    """One whole answer."""
    with processes.connect(port) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        processes.send_post(connection, CHAT, body)
        with connection.makefile("rb") as reply:
            head, _, payload = reply.read().partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if status != 200:
        raise Ds4Error(f"HTTP {status} from the server: {payload[:500]!r}")
    answer: dict[str, object] = json.loads(payload)
    return answer


def streamed_seconds(port: int, bodies: Sequence[dict[str, object]]) -> float:
    """From sending all requests to the end of the last answer, each on its own connection."""
    selector = selectors.DefaultSelector()
    tails: dict[socket.socket, bytes] = {}
    connections = [processes.connect(port) for _ in bodies]
    start = time.perf_counter()
    try:
        for connection, body in zip(connections, bodies, strict=True):
            processes.send_post(connection, CHAT, {**body, "stream": True})
            selector.register(connection, selectors.EVENT_READ, connection)
            tails[connection] = b""
        scratch = bytearray(1 << 16)
        while selector.get_map():
            ready = selector.select(_ANSWER_SECONDS)
            if not ready:
                raise Ds4Error(f"the server was silent for {_ANSWER_SECONDS:.0f} s")
            for key, _ in ready:
                connection = key.data
                count = connection.recv_into(scratch)
                tails[connection] = (tails[connection] + scratch[:count])[-40:]
                if not count:
                    selector.unregister(connection)
        seconds = time.perf_counter() - start
    finally:
        selector.close()
        for connection in connections:
            connection.close()
    for tail in tails.values():
        if b"data: [DONE]" not in tail:
            raise Ds4Error(f"a stream ended early: {bytes(tail)!r}")
    return seconds


class Alone:
    """The engine without HTTP, driven as the engine thread drives it."""

    def __init__(self, model: speed.Mapped) -> None:
        tokenizer = model.tokenizer
        self._core = EngineCore(
            model.executor, lambda: StreamDetokenizer(tokenizer, text_start=False)
        )

    def seconds(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        core = self._core
        start = time.perf_counter()
        for prompt in prompts:
            generation = Generation(prompt=prompt, max_tokens=tokens, temperature=0.0)
            core.submit(core.sequence(generation))
        while core.step() is not None:
            pass
        return time.perf_counter() - start


def loop_seconds(pid: int) -> float:
    """CPU time of a process's first thread so far: in a worker, the event loop's."""
    with open(f"/proc/{pid}/task/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def _text(stream: int, run: int) -> str:
    return f"Tell me story {stream} of evening {run}."


def overhead(
    worker: tuple[int, int], alone: Alone, streams: int, tokens: int, runs: int
) -> list[Row]:
    """Tokens per second of `streams` chats at once, engine and server in turn. `worker`: its port
    and process."""
    port, pid = worker
    rates: dict[str, list[float]] = {"engine": [], "server": []}
    loop: list[float] = []
    for run in range(runs + 1):
        texts = [_text(stream, run) for stream in range(streams)]
        prompts = [
            ask(port, chat(text, 1, return_token_ids=True))["prompt_token_ids"] for text in texts
        ]
        engine = alone.seconds([p for p in prompts if isinstance(p, list)], tokens)
        # Other texts, of the same length: nothing of a prompt may be remembered.
        before = loop_seconds(pid)
        served = streamed_seconds(
            port, [chat(_text(stream, run + 500), tokens) for stream in range(streams)]
        )
        if run:  # the first round warms both up
            rates["engine"].append(streams * tokens / engine)
            rates["server"].append(streams * tokens / served)
            loop.append((loop_seconds(pid) - before) / (streams * tokens) * 1e6)
    name = "1 stream" if streams == 1 else f"{streams} streams"
    reference = statistics.median(rates["engine"])
    shares = [s / e for s, e in zip(rates["server"], rates["engine"], strict=True)]
    return [
        summarise(f"{name}: the engine alone", "tokens/s", rates["engine"]),
        summarise(
            f"{name}: over HTTP",
            "tokens/s",
            rates["server"],
            reference=reference,
            reference_name="engine",
            goal=_GOALS.get(streams, ""),
        ),
        summarise(f"{name}: over HTTP, pair by pair", "share", shares),
        summarise(f"{name}: event loop, CPU per token", "us", loop),
    ]


def constrained(port: int, streams: int, tokens: int, runs: int) -> list[Row]:
    """Tokens per second of chats under a JSON schema and without, in turn."""
    rates: dict[str, list[float]] = {"free": [], "constrained": []}
    for run in range(runs + 1):
        for number, (name, fields) in enumerate(
            (("free", {}), ("constrained", {"response_format": _FORMAT}))
        ):
            texts = [_text(stream, 1000 + 2 * run + number) for stream in range(streams)]
            seconds = streamed_seconds(port, [chat(text, tokens, **fields) for text in texts])
            if run:  # the first round loads the library and builds its view of the vocabulary
                rates[name].append(streams * tokens / seconds)
    name = "1 stream" if streams == 1 else f"{streams} streams"
    return [
        summarise(
            f"{name}: under a JSON schema",
            "tokens/s",
            rates["constrained"],
            reference=statistics.median(rates["free"]),
            reference_name="free",
            goal=_CONSTRAINED_GOAL,
        ),
        summarise(
            f"{name}: under a JSON schema, pair by pair",
            "share",
            [c / f for c, f in zip(rates["constrained"], rates["free"], strict=True)],
        ),
    ]


def _long_chat(run: int, turns: int) -> dict[str, object]:
    words = (_WORDS * (_LONG_WORDS // 10 + 1)).split()
    share = _LONG_WORDS // turns
    roles = ("user", "assistant")
    messages = [
        {"role": roles[i % 2], "content": f"{run} " + " ".join(words[i * share : (i + 1) * share])}
        for i in range(turns)
    ]
    return {**chat("", 1), "messages": messages}


def enqueue(port: int, turns: int, runs: int) -> list[Row]:
    """Milliseconds from a decoded body to the engine's queue, for a chat of about 4000 tokens."""
    samples, sizes = [], []
    for run in range(runs + 1):
        body = _long_chat(run, turns)
        body |= {"return_token_ids": True, "return_token_timestamps": True}
        answer = ask(port, body)
        performance, prompt = answer["performance"], answer["prompt_token_ids"]
        assert isinstance(performance, dict)
        assert isinstance(prompt, list)
        if run:
            samples.append((performance["enqueue_ns"] - performance["ingress_ns"]) / 1e6)
            sizes.append(len(prompt))
    shape = "1 turn" if turns == 1 else f"{turns} turns"
    name = f"chat of {statistics.median(sizes):.0f} tokens, {shape}: body to queue"
    return [summarise(name, "ms", samples, goal=_ENQUEUE_GOAL)]


def measure(
    manifest: Path, threads: int, streams: Sequence[int], tokens: int, runs: int
) -> list[Row]:
    """All of it, with one worker."""
    port, rows = processes.free_port(), []
    banks = max(streams)
    flags = [
        *("--max-seqs", str(banks), "--threads", str(threads), "--ctx", str(_CONTEXT_TOKENS)),
        *("--speculate", "off"),  # the engine alone does without, too
    ]
    config = ExecutorConfig(threads=threads, banks=banks, context_tokens=_CONTEXT_TOKENS)
    worker = processes.start_worker(manifest, port, *flags)
    with server(worker, port), speed.mapped(manifest, config) as model:
        alone = Alone(model)
        for count in streams:
            rows += overhead((port, worker.pid), alone, count, tokens, runs)
            rows += constrained(port, count, tokens, runs)
        rows += enqueue(port, 1, runs)
        rows += enqueue(port, _LONG_TURNS - 1, runs)
    return rows
