"""Decode, prompts and several streams, type by type, beside another engine on the very same files.

Owns: which files are made, what both are asked, and that they take turns: one run of ours, one of
the peer's, so that what others do to the machine meets both. The peer is two of its own programs,
one for a single sequence and one for several at once, that print a JSON object per measurement.
Without a peer the table holds our figures alone.

Far into a context a token costs more, because attention reads all positions before it. How much
more per 1000 positions is the slope: between the decode of a short context and that at `depth`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds4_common.errors import Ds4Error
from ds4_common.gguf import GgmlType
from ds4_worker.bench import processes, speed, synthetic
from ds4_worker.bench.report import Row, summarise
from ds4_worker.executor.api import ExecutorConfig, Slice
from ds4_worker.executor.cpu import CpuExecutor

SHORT = 16  # tokens before a decode of ours, of the peer's none
DECODE = "decode"
TYPES = ("Q8_0", "Q4_K_M", "Q5_0", "Q6_K", "Q4_0", "Q4_1", "Q2_K", "IQ2_XXS")
DENSE, EXPERTS = synthetic.SHAPES["dense-1b"], synthetic.SHAPES["moe-4b"]
GOALS = {DECODE: 1.8, "prompt": 3.0, "streams": 2.5}
BANDWIDTH_GOAL = {"Q8_0": ">= 0.80", "Q6_K": ">= 0.80"}


class _Mixed(synthetic.Types):
    """Q4_K, with Q6_K for the output and, in every second layer, for values and the last matrix."""

    def of(self, name: str, dims: tuple[int, ...]) -> GgmlType:
        part = name.split(".")
        second = part[0] == "blk" and int(part[1]) % 2 == 0 and part[2] in ("attn_v", "ffn_down")
        return GgmlType.Q6_K if second or name == "output.weight" else super().of(name, dims)


def _model(name: str) -> tuple[synthetic.Shape, synthetic.Types]:
    if name == "IQ2_XXS":  # as published: experts in it and Q2_K, the rest in Q8_0
        return EXPERTS, synthetic.types("Q8_0,IQ2_XXS,Q2_K")
    if name == "Q4_K_M":
        return DENSE, _Mixed(GgmlType.Q4_K)
    return DENSE, synthetic.types(name)


@dataclass(frozen=True, slots=True)
class Peer:
    """`single`: a program for one sequence; `batched`: for several. Empty: not measured."""

    single: str = ""
    batched: str = ""

    def rates(
        self, path: Path, threads: int, steps: int, prompts: Sequence[int]
    ) -> dict[str, float]:
        """Tokens per second of a prompt of each length and of one decode."""
        if not self.single:
            return {}
        found = {}
        for item in self._run(
            self.single, "-m", str(path), "-t", str(threads), "-p", ",".join(map(str, prompts)),
            "-n", str(steps), "-r", "1", "-o", "jsonl",
        ):  # fmt: skip
            length = int(item["n_prompt"])
            found[_of(length) if length else DECODE] = float(item["avg_ts"])
        return found

    def deep(self, path: Path, threads: int, steps: int, depth: int) -> dict[str, float]:
        """Tokens per second of a decode that begins `depth` tokens into a context."""
        if not (self.single and depth):
            return {}
        items = self._run(
            self.single, "-m", str(path), "-t", str(threads), "-p", "0", "-n", str(steps),
            "-d", str(depth), "-r", "1", "-o", "jsonl",
        )  # fmt: skip
        return {_at(depth): float(item["avg_ts"]) for item in items}

    def together(
        self, path: Path, threads: int, steps: int, streams: Sequence[int]
    ) -> dict[str, float]:
        """Tokens per second of so many sequences that decode at once."""
        if not self.batched:
            return {}
        context = max(streams) * (SHORT + steps + 1)
        items = self._run(
            self.batched, "-m", str(path), "-t", str(threads), "-c", str(context),
            "-npp", str(SHORT), "-ntg", str(steps), "-npl", ",".join(map(str, streams)),
            "--output-format", "jsonl",
        )  # fmt: skip
        return {f"{item['pl']} streams": float(item["speed_tg"]) for item in items}

    def _run(self, *command: str) -> Iterator[dict[str, float]]:
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise Ds4Error(
                f"peer: {' '.join(command)}: exit {done.returncode} and {len(lines)} figures: "
                f"{done.stderr[-500:]}; run it by hand"
            )
        return (json.loads(line) for line in lines)


def _of(length: int) -> str:
    return f"prompt {length}"


def _at(depth: int) -> str:
    return f"{DECODE} at depth {depth}"


def _decode(executor: CpuExecutor, banks: Sequence[int], steps: int, depth: int = SHORT) -> float:
    tokens = [0] * len(banks)
    start = time.perf_counter()
    for step in range(steps):
        results = executor.step(
            [
                Slice(bank, depth + step, [token], speed.GREEDY)
                for bank, token in zip(banks, tokens, strict=True)
            ]
        )
        tokens = [result.token for result in results if result]
    return steps * len(banks) / (time.perf_counter() - start)


def _prompt(executor: CpuExecutor, length: int) -> float:
    tokens = [7 * i % executor.vocabulary for i in range(length)]
    chunk, start = executor.config.batch_tokens, time.perf_counter()
    for first in range(0, length, chunk):
        part = tokens[first : first + chunk]
        wanted = speed.GREEDY if first + len(part) == length else None
        executor.step([Slice(0, first, part, wanted)])
    return length / (time.perf_counter() - start)


@dataclass(slots=True)
class _Samples:
    ours: dict[str, list[float]] = field(default_factory=dict)
    peer: dict[str, list[float]] = field(default_factory=dict)
    limits: list[float] = field(default_factory=list)  # tokens/s at the read bandwidth

    def add(self, side: dict[str, list[float]], rates: dict[str, float]) -> None:
        for name, rate in rates.items():
            side.setdefault(name, []).append(rate)


def _slopes(rates: dict[str, list[float]], depth: int, start: int) -> list[float]:
    """Microseconds per token and 1000 positions of each run, between `start` and `depth`."""
    pairs = zip(rates.get(DECODE, ()), rates.get(_at(depth), ()), strict=False)
    return [1e9 * (1 / deep - 1 / short) / (depth - start) for short, deep in pairs]


def _slope_row(name: str, samples: _Samples, depth: int) -> Row:
    peer = _slopes(samples.peer, depth, 0)
    return summarise(
        f"{name}: cost of 1000 positions before a token",
        "us",
        _slopes(samples.ours, depth, SHORT),
        reference=statistics.median(peer) if peer else None,
        reference_name="peer" if peer else "",
        goal="<= 1.00" if peer else "",
    )


def _rows(name: str, samples: _Samples, depth: int) -> Iterator[Row]:
    for what, rates in samples.ours.items():
        peer = samples.peer.get(what)
        goal = next(goal for word, goal in GOALS.items() if word in what)
        wanted = f">= {goal:.2f}" if peer and what != _at(depth) else ""
        yield summarise(
            f"{name}: {what}",
            "tokens/s",
            rates,
            reference=statistics.median(peer) if peer else None,
            reference_name="peer" if peer else "",
            goal=wanted,
        )
    if depth:
        yield _slope_row(name, samples, depth)
    yield summarise(
        f"{name}: decode, share of read bandwidth",
        "tokens/s",
        samples.ours[DECODE],
        reference=statistics.median(samples.limits),
        reference_name="bandwidth",
        goal=BANDWIDTH_GOAL.get(name, ""),
    )


def _measure_model(
    name: str,
    path: Path,
    peer: Peer,
    threads: int,
    steps: int,
    streams: Sequence[int],
    prompts: Sequence[int],
    depth: int,
    runs: int,
    bandwidth: Callable[[], float],
) -> list[Row]:
    short, deep = range(max(streams)), max(streams)
    config = ExecutorConfig(
        threads=threads,
        banks=len(short) + 1,
        context_tokens=max(*prompts, SHORT, depth) + steps,
    )
    samples = _Samples()
    with (
        tempfile.TemporaryDirectory(prefix="ds4-bench-") as folder,
        processes.owner(path, Path(folder)) as manifest,
        speed.mapped(manifest, config) as model,
    ):
        executor = model.executor
        for bank in short:
            speed.fill(executor, bank, SHORT)
        speed.fill(executor, deep, depth)
        for _ in range(runs):
            samples.limits.append(bandwidth() / model.work.bytes_per_token)
            ours = {_of(length): _prompt(executor, length) for length in prompts}
            ours[DECODE] = _decode(executor, short[:1], steps)
            if depth:
                ours[_at(depth)] = _decode(executor, [deep], steps, depth)
            ours |= {f"{n} streams": _decode(executor, short[:n], steps) for n in streams}
            samples.add(samples.ours, ours)
            samples.add(samples.peer, peer.rates(path, threads, steps, prompts))
            samples.add(samples.peer, peer.deep(path, threads, steps, depth))
            samples.add(samples.peer, peer.together(path, threads, steps, streams))
    return list(_rows(name, samples, depth))


def measure(
    names: Sequence[str],
    words: Path,
    peer: Peer,
    threads: int,
    steps: int,
    prompts: Sequence[int],
    depth: int,
    runs: int,
    bandwidth: Callable[[], float],
    tell: Callable[[list[Row]], None],
) -> None:
    """Makes a model per name, measures it and deletes it; `words` gives the vocabulary. A `depth`
    of 0 leaves the decode far into a context out."""
    if 0 < depth <= SHORT:
        raise Ds4Error(f"--depth: got {depth}, expected 0 or more than {SHORT}")
    for name in names:
        if name not in TYPES:
            raise Ds4Error(f"--compare: got {name!r}, expected names of {', '.join(TYPES)}")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ds4-bench-") as folder:
            path = Path(folder) / f"{name}.gguf"
            synthetic.write(path, *_model(name), words)
            tell(
                _measure_model(
                    name, path, peer, threads, steps, (4, 8), prompts, depth, runs, bandwidth
                )
            )
