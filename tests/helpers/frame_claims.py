"""What two steps under way are held to on a CUDA device, as functions of a process that sees one.

Each returns plain data for the test to judge; what is right is what the CPU executor gives, one
step at a time. On a real device, whose cosines may differ from the CPU's in the last bit, it is
what the device gives one step at a time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_case
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ds4_common.contract import image as im
from ds4_common.errors import Ds4Error, ExecutorFailure, StepRefused
from ds4_worker.engine.api import Failed, Finished, Generation, Output, ReasoningSpan, Speculate
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import (
    MOST_BIASES,
    PENDING,
    Adjustments,
    Executor,
    ExecutorConfig,
    Sampled,
    Sampling,
    Slice,
)
from ds4_worker.executor.cpu import CpuExecutor
from ds4_worker.executor.cuda import CudaExecutor
from golden import tiny
from helpers.cuda_claims import BASE, bench, ids, llama
from helpers.executors import cpu_executor, generate
from helpers.fake_model import ByteDetokenizer
from helpers.prepared import Prepared, prepare_file
from helpers.stride import Stride

CONFIG = replace(BASE, context_tokens=192, batch_tokens=24, batch_outputs=24)
Arrivals = Sequence[tuple[int, Generation]]
GREEDY, RANDOM = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
PLAIN: list[dict[str, Any]] = [
    {**GREEDY},
    {**RANDOM, "seed": 3},
    {**RANDOM, "eos_ids": frozenset(range(0, 320, 7))},
    {"min_p": 0.02, "eos_ids": frozenset(range(1, 320, 9))},
    {**GREEDY, "reasoning": ReasoningSpan(close=(4, 5), opened=True)},
    {**RANDOM, "logit_bias": ((5, 4.0), (7, -100.0)), "eos_ids": frozenset(range(5, 320, 40))},
    {**GREEDY, "ignore_eos": True, "eos_ids": frozenset(range(0, 64, 9))},
    {**RANDOM, "logprobs": 2},
    {**GREEDY, "logprobs": 0, "repetition_penalty": 1.3},
    {**RANDOM, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {**RANDOM, "frequency_penalty": 0.4, "pieces": True},
    {**GREEDY, "frequency_penalty": 0.9, "logit_bias": tuple((t, 4.0) for t in range(3, 90, 3))},
]
HOST: list[dict[str, Any]] = [
    {**RANDOM, "logprobs": 2, "stop_token_sequences": tuple((t,) for t in range(1, 320, 40))},
    {**RANDOM, "stop_strings": tuple(map(chr, range(33, 127, 31)))},
    {"grammar": Stride(12), "reasoning": ReasoningSpan(close=(4, 5), opened=True, budget=3)},
    {**GREEDY, "prompt_logprobs": 1},
    {**GREEDY, "grammar": Stride(9), "repetition_penalty": 1.2, "logit_bias": ((4, 3.0),)},
]


def requests(kinds: Sequence[dict[str, Any]], vocabulary: int, turns: int) -> Arrivals:
    """Two of each kind, whose prompts begin alike, as they arrive."""
    found = []
    for number, fields in enumerate((*kinds, *kinds)):
        prompt = ids(80 + 3 * (number % 4), 1, vocabulary) + ids(number, number, vocabulary)
        how = {"seed": number, **fields}
        count = 4 + number % 9 * 3
        wanted = Generation(prompt=prompt, max_tokens=count, **how)
        found.append((number * turns, wanted))
    return found


def reference(prepared: Prepared) -> CpuExecutor | CudaExecutor:
    if bench().context.device.simulated:
        return cpu_executor(prepared, CONFIG)
    return bench().executor(prepared, CONFIG)


def answers(
    executor: Executor,
    arrivals: Arrivals,
    speculate: Speculate,
    cancelled: Sequence[int] = (),
    frames: int = 2,
) -> tuple[list[list[Any]], EngineCore]:
    """All that readers may see of each, but times and what the cache saved; `cancelled` are when
    they have seen three tokens."""
    core = EngineCore(
        executor, ByteDetokenizer, prefill_chunk=20, live_chunk=9, speculate=speculate,
        frames=frames,
    )  # fmt: skip
    sequences = [core.sequence(wanted) for _, wanted in arrivals]
    numbers = {sequence: number for number, sequence in enumerate(sequences)}
    seen: list[list[Any]] = [[] for _ in sequences]
    turn, busy = 0, True
    while busy or turn <= max(arrival for arrival, _ in arrivals):
        for (arrival, _), sequence in zip(arrivals, sequences, strict=True):
            if arrival == turn:
                core.submit(sequence)
        events = core.step()
        busy, turn = events is not None, turn + 1
        for sequence, event in events or []:
            number = numbers[sequence]
            if isinstance(event, Output) and event.tokens:
                seen[number].append((event.tokens, event.text, event.logprobs, event.pieces))
            elif isinstance(event, Output):  # in pieces, as the prompt was cut
                seen[number] += event.prompt_logprobs or []
            elif isinstance(event, Finished):
                seen[number].append((event.reason, event.stop, event.completion_tokens))
            elif isinstance(event, Failed):
                seen[number].append(event)
            if number in cancelled and len(seen[number]) == 3:
                core.cancel(sequence)
    return seen, core


def mixes(
    kinds: Sequence[dict[str, Any]],
    speculate: Speculate,
    turns: int,
    cancelled: Sequence[int] = (),
    case: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Requests of those kinds through the engine on both executors."""
    prepared, vocabulary = (llama(), 320) if case is None else _family(*case)
    arrivals = requests(kinds, vocabulary, turns)
    plain, cuda = reference(prepared), bench().executor(prepared, CONFIG)
    taken = cuda.allocated
    try:
        expected, alone = answers(plain, arrivals, speculate, cancelled, frames=1)
        found, core = answers(cuda, arrivals, speculate, cancelled)
        kept = core.scheduler.memory
        return {
            "equal": [a == b for a, b in zip(found, expected, strict=True)],
            "ahead": (alone.stats.steps_ahead, core.stats.steps_ahead),
            "discarded": core.stats.rows_discarded,
            "drafts": core.stats.draft_tokens_offered - core.stats.draft_tokens_accepted,
            "steps": core.stats.steps,
            "rewinds": (plain.rewinds, cuda.rewinds),
            "allocated": cuda.allocated - taken,
            "pages": kept.pool.total - kept.cache.available,
        }
    finally:
        plain.close()
        cuda.close()


def _family(family: str, name: str) -> tuple[Prepared, int]:
    case = next(case for case in tiny.cases_of(family) if case.name == name)
    metadata = {**case.metadata, "context_length": CONFIG.context_tokens}
    if "attention.sliding_window" in metadata:
        metadata["attention.sliding_window"] = 40
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write_gguf(replace_case(case, metadata=metadata), Path(folder) / "case.gguf")
        prepared = prepare_file(path)
    return prepared, len(tiny.TEXTS)


# ---- the boundary --------------------------------------------------------------------------------


def pending_tokens(how: Sampling, count: int) -> list[bool]:
    """Three banks decode, each step sent off before the one before is collected; compared with the
    CPU, one step at a time. In every second step two of them only, and in another order."""
    prompts = [ids(5 + 9 * bank, bank) for bank in range(3)]
    plain, cuda = reference(llama()), bench().executor(llama(), CONFIG)
    try:
        expected = [generate(plain, p, count, how, bank) for bank, p in enumerate(prompts)]
        drawn: list[list[Sampled | None]] = [[], [], []]
        for bank, prompt in enumerate(prompts):
            cuda.step([Slice(bank, 0, prompt[:-1])])
        order = [0, 1, 2]
        slices = [_at(b, len(p) - 1, p[-1], how, 0) for b, p in enumerate(prompts)]
        sent = [order]
        cuda.submit(slices)
        for index in range(1, count):
            order = order[::-1]
            last = [Slice(b, len(prompts[b]) - 1 + index, (PENDING,)) for b in order]
            cuda.submit([replace(piece, sample=replace(how, index=index)) for piece in last])
            sent.append(order)
            for bank, sampled in zip(sent.pop(0), cuda.collect(), strict=True):
                drawn[bank].append(sampled)
        for bank, sampled in zip(sent.pop(0), cuda.collect(), strict=True):
            drawn[bank].append(sampled)
        return [drawn[bank] == expected[bank] for bank in range(3)]
    finally:
        plain.close()
        cuda.close()


def _at(bank: int, position: int, token: int, how: Sampling, index: int) -> Slice:
    return Slice(bank, position, [token], replace(how, index=index))


def failed_draw() -> list[Any]:
    """A draw that fails with a step behind it: its error, and that the neighbour's go on."""
    plain, cuda = reference(llama()), bench().executor(llama(), CONFIG)
    greedy, bad = Sampling(temperature=0.0), Sampling(forced=1 << 20)
    try:
        good = generate(plain, ids(9), 3, greedy)
        cuda.submit([Slice(1, 0, ids(4), bad), Slice(0, 0, ids(9), greedy)])
        cuda.submit([Slice(0, 9, [PENDING], greedy), Slice(1, 4, [PENDING], greedy)])
        first = cuda.collect()
        cuda.submit([Slice(0, 10, [PENDING], greedy)])
        second, third = cuda.collect(), cuda.collect()
        return [
            first[0] is not None and first[0].error,
            [first[1], second[0], third[0]] == good,
        ]
    finally:
        plain.close()
        cuda.close()


def refusals() -> dict[str, str]:
    """Why each of these is refused, and that nothing comes of it."""
    greedy = Sampling(temperature=0.0)
    many = Sampling(adjust=Adjustments(n_biases=MOST_BIASES + 1))
    found = {}
    attempts: dict[str, Callable[[CudaExecutor], object]] = {
        "wrong position": lambda cuda: cuda.submit([Slice(0, 10, [PENDING], greedy)]),
        "nothing drawn": lambda cuda: cuda.submit([Slice(1, 0, [PENDING], greedy)]),
        "among others": lambda cuda: cuda.submit([Slice(0, 9, [PENDING, 3], greedy)]),
        "too many biases": lambda cuda: cuda.submit([Slice(1, 0, [1], many)]),
        "scores beside": lambda cuda: cuda.score(Slice(1, 0, [1]), [1], 0),
    }
    for name, attempt in attempts.items():
        cuda = bench().executor(llama(), CONFIG)
        cuda.submit([Slice(0, 0, ids(9), greedy)])
        found[name] = _refusal(lambda a=attempt, c=cuda: a(c))  # type: ignore[misc]
        first = cuda.collect()
        cuda.submit([Slice(0, 9, [PENDING], greedy)])
        assert cuda.collect() == cuda.step([Slice(0, 9, [first[0].token], greedy)])  # type: ignore[union-attr]
        cuda.close()
    cuda = bench().executor(llama(), CONFIG)
    found["nothing under way"] = _refusal(cuda.collect)
    cuda.step([Slice(0, 0, ids(9), greedy)])
    rows = cuda.logit_rows(Slice(1, 0, ids(9)))
    next(rows)
    found["rows of a step before"] = _refusal(lambda: (cuda.step([Slice(2, 0, [1])]), next(rows)))
    found["drawn before others"] = _refusal(lambda: cuda.submit([Slice(0, 9, [PENDING], greedy)]))
    cuda.submit([Slice(0, 0, ids(9), greedy)])
    cuda.submit([Slice(0, 9, [PENDING], greedy)])
    found["a third"] = _refusal(lambda: cuda.submit([Slice(0, 10, [PENDING], greedy)]))
    cuda.close()  # with two under way
    return found


def _refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except StepRefused as error:
        return str(error)
    return ""


def breaks_with(config: ExecutorConfig = CONFIG) -> list[Any]:
    """What ends an engine whose device breaks with a step under way, and what is left of it."""
    cuda = bench().executor(llama(), config)
    core = EngineCore(cuda, ByteDetokenizer)
    sequences = [core.sequence(Generation(prompt=ids(9, n), max_tokens=30)) for n in range(3)]
    for sequence in sequences:
        core.submit(sequence)
    try:
        while core.step() is not None:
            pass
    except ExecutorFailure as error:
        ahead, kind = core.stats.steps_ahead, [type(error).__name__, error.exit_code]
        failed = core.fail_all(Failed(500, "gone", "engine_failure"))
        core.close()
        return [*kind, ahead > 0, len(failed)]
    except Ds4Error as error:
        return [type(error).__name__, error.exit_code]
    return []


def breaks_while_sending() -> list[str]:
    """The driver's calls from the one on that broke a step half sent off, up to the end."""
    log = Path(os.environ["DS4_SIM_LOG"])
    cuda = bench().executor(llama(), CONFIG)
    before = log.stat().st_size
    try:
        cuda.submit([Slice(0, 0, ids(9), Sampling(temperature=0.0))])
        why = ""
    except ExecutorFailure as error:
        why = str(error)
    cuda.close()
    with log.open() as file:
        file.seek(before)
        calls = [line.split()[1] for line in file]
    return [why, *calls[calls.index("cuEventRecord") :]]


def rows_fewer_than_the_vocabulary() -> list[Any]:
    """A model that can draw tokens which it has no embedding of: how many steps may be under way,
    why a pending token and a second step are refused."""
    greedy, image = Sampling(temperature=0.0), bench().image(llama())
    (embed,) = (op.weight for s in image.sections for op in s.ops if op.kind == im.OP_EMBED)
    weights = list(image.weights)
    weights[embed] = replace(weights[embed], rows=image.vocabulary - 1)
    cuda = bench().executor(llama(), CONFIG, replace(image, weights=weights))
    try:
        cuda.submit([Slice(0, 0, ids(9), greedy)])
        second = _refusal(lambda: cuda.submit([Slice(1, 0, ids(9), greedy)]))
        cuda.collect()
        pending = _refusal(lambda: cuda.submit([Slice(0, 9, [PENDING], greedy)]))
        return [cuda.frames, second, pending]
    finally:
        cuda.close()
