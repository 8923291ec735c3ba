"""Decode and prefill rates of the executor, as shares of what the machine can do in the same run.

Owns: timing steps of a mapped model without HTTP in the way. Decode is compared with the read
bandwidth divided by the bytes of weights that one token reads; prefill is given as arithmetic in
the weight matrices (two operations per weight and token).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ds4_common import client
from ds4_common.contract import image as im
from ds4_common.contract.image import load_image, read_header
from ds4_common.tokenizer.encoder import StreamDetokenizer, Tokenizer
from ds4_worker.bench.report import Row, summarise
from ds4_worker.engine.api import Generation, Grammar, Output
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import Executor, ExecutorConfig, Sampling, Slice
from ds4_worker.executor.cpu import CpuExecutor

GREEDY = Sampling(temperature=0.0)
PEOPLE = {
    "type": "array",
    "minItems": 50,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class WeightWork:
    """What the weight matrices of a program cost."""

    bytes_per_token: int  # read once per decode step
    weights_per_prompt_token: int  # multiplied for every token of a prompt
    weights_per_output: int  # multiplied for rows whose logits are wanted


class TimedExecutor(CpuExecutor):
    """Knows how much CPU time its caller has spent in native calls."""

    native_seconds = 0.0

    def _run(self, slices: int, outputs: int, flags: int = 0) -> None:
        start = time.thread_time()
        super()._run(slices, outputs, flags)
        self.native_seconds += time.thread_time() - start


class PagedExecutor(Executor, Protocol):
    def map_own_pages(self) -> None:
        """Gives every bank its own consecutive pages."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A model in an executor, on whatever machine."""

    executor: PagedExecutor
    work: WeightWork


@dataclass(frozen=True, slots=True)
class Mapped:
    executor: TimedExecutor
    tokenizer: Tokenizer
    work: WeightWork
    contract: memoryview


def weight_work(contract: memoryview) -> WeightWork:
    """Reads the weight matrices of the program out of the contract blob: of experts, as many as a
    token uses."""
    from ds4_common.contract.lower import lower_image
    from ds4_common.contract.validate import parse_bundle

    return image_work(lower_image(parse_bundle(bytes(contract))))


def image_work(image: im.Image) -> WeightWork:
    """The same, of a program."""
    n_bytes = prompt = output = 0
    for section in image.sections:
        for op in section.ops:
            if op.kind not in (im.OP_MATMUL, im.OP_MATMUL_EXPERTS):
                continue
            weight = image.weights[op.weight]
            routed = op.kind == im.OP_MATMUL_EXPERTS and len(op.inputs) > 1
            used = image.slots[op.inputs[1]].width // 2 if routed else weight.experts
            n_bytes += weight.n_bytes * used // weight.experts
            if section.space == im.SPACE_TOKENS:
                prompt += weight.rows * weight.cols * used
            else:
                output += weight.rows * weight.cols * used
    return WeightWork(n_bytes, prompt, output)


@contextmanager
def mapped(manifest: Path, config: ExecutorConfig) -> Iterator[Mapped]:
    """The owner's model, attached as a worker attaches it."""
    with client.connect(str(manifest), role="worker", wait_seconds=60) as connection:
        blobs = connection.map_blobs(("image.cpu", "contract", "tokenizer"))
        image, _ = load_image(blobs["image.cpu"].view, blobs["contract"].view)
        weights = connection.map_allocations(read_header(image).allocations)
        sources = {number: (m.address, m.n_bytes) for number, m in weights.items()}
        executor = TimedExecutor(image, sources, config)
        try:
            tokenizer = Tokenizer(blobs["tokenizer"].view)
            contract = blobs["contract"].view
            yield Mapped(executor, tokenizer, weight_work(contract), contract)
        finally:
            executor.close()


def _random_tokens(executor: PagedExecutor, count: int) -> list[int]:
    return [random.randrange(executor.vocabulary) for _ in range(count)]


def fill(executor: PagedExecutor, bank: int, depth: int) -> None:
    """Brings a bank to `depth` tokens by prefill."""
    executor.map_own_pages()
    chunk = executor.config.batch_tokens
    for start in range(0, depth, chunk):
        tokens = _random_tokens(executor, min(chunk, depth - start))
        executor.step([Slice(bank, start, tokens)])


def decode(
    model: Mapped | Runnable,
    depths: Sequence[int],
    steps: int,
    runs: int,
    bandwidth: Callable[[], float],
    banks: int = 1,
) -> list[Row]:
    """Tokens per second at each depth; `banks` sequences decode together. The read bandwidth is
    taken before every run: where others share the memory, it changes within seconds."""
    executor, rows = model.executor, []
    for depth in depths:
        for bank in range(banks):
            fill(executor, bank, depth)
        rates, limits = [], []
        for _ in range(runs):
            limits.append(bandwidth() / model.work.bytes_per_token)
            tokens = [0] * banks
            start = time.perf_counter()
            for step in range(steps):
                results = executor.step(
                    [Slice(b, depth + step, [tokens[b]], GREEDY) for b in range(banks)]
                )
                tokens = [result.token for result in results if result]
            rates.append(steps * banks / (time.perf_counter() - start))
        streams = "" if banks == 1 else f", {banks} streams"
        rows.append(
            summarise(
                f"decode at depth {depth}{streams}",
                "tokens/s",
                rates,
                reference=statistics.median(limits),
                reference_name="bandwidth / bytes per token =",
                goal=">= 0.60" if banks == 1 else "",
            )
        )
    return rows


def prefill(
    model: Mapped | Runnable, lengths: Sequence[int], runs: int, depth: int = 0
) -> list[Row]:
    """Tokens per second and arithmetic rate of prompts, of all but the first `depth` tokens."""
    executor, rows = model.executor, []
    for length in lengths:
        rates, arithmetic = [], []
        tokens = _random_tokens(executor, length)
        fill(executor, 0, depth)
        operations = 2 * (
            model.work.weights_per_prompt_token * length + model.work.weights_per_output
        )
        for _ in range(runs):
            start = time.perf_counter()
            chunk = executor.config.batch_tokens
            for first in range(0, length, chunk):
                part = tokens[first : first + chunk]
                last = first + len(part) == length
                executor.step([Slice(0, depth + first, part, GREEDY if last else None)])
            seconds = time.perf_counter() - start
            rates.append(length / seconds)
            arithmetic.append(operations / seconds / 1e9)
        name = f"prefill {length}" + (f" at depth {depth}" if depth else "")
        rows.append(summarise(name, "tokens/s", rates))
        rows.append(summarise(f"{name}, weight matrices", "GOP/s", arithmetic, goal=">= 150"))
    return rows


def constrained(model: Mapped, steps: int, runs: int) -> Row:
    """Tokens per second of one stream under a JSON schema, beside the same stream without; the two
    take turns."""
    from ds4_worker.grammar.compiler import Compiler
    from ds4_worker.grammar.source import answer_grammar, whole_answer

    tokenizer = model.tokenizer
    core = EngineCore(model.executor, lambda: StreamDetokenizer(tokenizer, text_start=False))
    compiler = Compiler(tokenizer, tokenizer.n_vocab, tokenizer.eog_ids)
    schema = whole_answer("start: @answer", answer_grammar("json_schema", PEOPLE))
    grammar = compiler.compile(schema)
    prompt = tokenizer.encode("People as JSON:\n", add_special=True, parse_special=True)

    def rate(wanted: Grammar | None) -> float:
        generation = Generation(prompt=prompt, max_tokens=steps + 1, seed=1, grammar=wanted)
        core.submit(core.sequence(generation))
        core.step()  # the prompt
        tokens, start = 0, time.perf_counter()
        while (events := core.step()) is not None:
            tokens += sum(isinstance(event, Output) for _, event in events)
        return tokens / (time.perf_counter() - start)

    free, bound = [], []
    for _ in range(runs):
        free.append(rate(None))
        bound.append(rate(grammar))
    return summarise(
        "decode under a JSON schema",
        "tokens/s",
        bound,
        reference=statistics.median(free),
        reference_name="without =",
        goal=">= 0.90",
    )


def overhead(model: Mapped, steps: int, runs: int) -> Row:
    """What a token of one stream costs beside the native call: scheduling, packing, detokenizing
    and events, as CPU time of the engine's thread. HTTP runs in another thread."""
    executor = model.executor
    core = EngineCore(executor, lambda: StreamDetokenizer(model.tokenizer, text_start=False))
    samples = []
    for _ in range(runs):
        generation = Generation(
            prompt=_random_tokens(executor, 16), max_tokens=steps + 1, temperature=0.0
        )
        core.submit(core.sequence(generation))
        core.step()  # the prompt
        native, start = executor.native_seconds, time.thread_time()
        while core.step() is not None:
            pass
        seconds = time.thread_time() - start - (executor.native_seconds - native)
        samples.append(seconds / steps * 1e6)
    return summarise("engine: beside the native call, per token", "us", samples, goal="<= 150")
