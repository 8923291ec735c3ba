"""What the CUDA executor is held to, as functions of a process that sees a device.

Each returns plain data for the test to judge. Bits are compared with the CPU executor's here, where
both are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace as replace_case
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ds4_common.errors import Ds4Error
from ds4_common.gguf import GgmlType
from ds4_worker.engine.api import Generation, Output
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.draws import Draws
from ds4_worker.executor import cuda_counts
from ds4_worker.executor.api import (
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
from helpers.cuda_executors import Bench
from helpers.executors import cpu_executor, generate
from helpers.fake_model import ByteDetokenizer
from helpers.prepared import Prepared, prepare_file
from helpers.stride import Stride
from helpers.tiny_gguf import TinyLlama, write_llama

Rows = npt.NDArray[np.float32]
CONTEXT = 640  # more than two attention parts
LLAMA = TinyLlama(
    head_dim=32, n_heads=6, n_kv_heads=2, width=192, ffn=160, biases=True, rope_freqs=True,
    context=CONTEXT, weights=(GgmlType.Q8_0, GgmlType.F16, GgmlType.Q4_1, GgmlType.F32),
)  # fmt: skip
BASE = ExecutorConfig(threads=1, banks=3, context_tokens=CONTEXT, batch_tokens=40, batch_outputs=40)


@cache
def bench() -> Bench:
    return Bench()


@cache
def llama() -> Prepared:
    with tempfile.TemporaryDirectory() as folder:
        return prepare_file(write_llama(Path(folder) / "tiny.gguf", LLAMA))


def ids(n: int, seed: int = 0, vocabulary: int = 320) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocabulary, n)]


def rows(executor: CpuExecutor | CudaExecutor, tokens: Sequence[int], bank: int = 0) -> Rows:
    """Logits [tokens, vocabulary] of a fresh sequence."""
    found = [np.array(row, np.float32) for row in executor.logit_rows(Slice(bank, 0, tokens))]
    return np.stack(found)


def difference(cuda: Rows, cpu: Rows) -> dict[str, Any]:
    """Of two sets of logits: whether the bits are equal, and the largest error against the
    spread."""
    assert np.isfinite(cpu).all()
    error = float(np.abs(cuda - cpu).max() / np.std(cpu))
    return {"equal": bool((cuda.view(np.uint32) == cpu.view(np.uint32)).all()), "error": error}


def compare(prepared: Prepared, config: ExecutorConfig, tokens: Sequence[int]) -> dict[str, Any]:
    cpu, cuda = cpu_executor(prepared, config), bench().executor(prepared, config)
    try:
        return difference(rows(cuda, tokens), rows(cpu, tokens))
    finally:
        cpu.close()
        cuda.close()


# ---- numerics ----------------------------------------------------------------------------------


def llama_logits(kv_dtype: str) -> dict[str, Any]:
    return compare(llama(), replace(BASE, kv_dtype=kv_dtype), ids(300))


def family_logits(family: str, case_name: str, types: Sequence[int]) -> dict[str, Any]:
    """One of the tiny models that agree with other implementations."""
    case = next(case for case in tiny.cases_of(family) if case.name == case_name)
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write_gguf(case, Path(folder) / "case.gguf", [GgmlType(t) for t in types])
        prepared = prepare_file(path)
    config = ExecutorConfig(
        threads=1, banks=2, context_tokens=case.context, batch_tokens=48, batch_outputs=48
    )
    return compare(prepared, config, tiny.tokens(case))


def family_in_pieces(family: str, case_name: str) -> dict[str, bool]:
    """Chunks beside a neighbour, then token by token: equal to one prefill."""
    case = next(case for case in tiny.cases_of(family) if case.name == case_name)
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_file(tiny.write_gguf(case, Path(folder) / "case.gguf"))
    config = ExecutorConfig(
        threads=1, banks=2, context_tokens=case.context, batch_tokens=48, batch_outputs=48
    )
    cuda, tokens = bench().executor(prepared, config), tiny.tokens(case)
    try:
        whole = rows(cuda, tokens)
        cuda.step([Slice(1, 0, tokens[:7])])
        cuda.step([Slice(0, 0, tokens[:5]), Slice(1, 7, tokens[7:30])])
        last = len(tokens) - 18
        for at in range(30, last, 37):
            cuda.step([Slice(1, at, tokens[at : min(last, at + 37)])])
        singly = [
            cuda.logits([Slice(1, at, [tokens[at]])])[0][0] for at in range(last, len(tokens))
        ]
        other = cuda.logits([Slice(0, 5, tokens[5:20])])[0]
    finally:
        cuda.close()
    return {
        "decoded": bool((np.array(singly, np.float32) == whole[last:]).all()),
        "neighbour": bool((np.array(other, np.float32) == whole[5:20]).all()),
    }


def windowed_answers() -> dict[str, Any]:
    """Two prompts that outgrow a window, answered through the engine on both executors: the tokens
    of each, and how many pages of windows the device has."""
    case = next(case for case in tiny.cases_of("gemma3") if case.name == "plain")
    metadata = {**case.metadata, "context_length": 448, "attention.sliding_window": 40}
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write_gguf(replace_case(case, metadata=metadata), Path(folder) / "case.gguf")
        prepared = prepare_file(path)
    config = ExecutorConfig(threads=1, banks=2, context_tokens=448, batch_tokens=48)
    cuda = bench().executor(prepared, config)
    found: dict[str, Any] = {"windows": [window.tokens for window in cuda.windows]}
    executors: dict[str, Executor] = {"cpu": cpu_executor(prepared, config), "cuda": cuda}
    for name, executor in executors.items():
        core = EngineCore(executor, ByteDetokenizer, prefill_chunk=48, live_chunk=32)
        sequences = [
            core.sequence(
                Generation(
                    prompt=ids(n, n, 60), max_tokens=20, temperature=0.9, seed=n, ignore_eos=True
                )
            )
            for n in (150, 90, 150)
        ]
        drawn: dict[Any, list[int]] = {sequence: [] for sequence in sequences}
        for sequence in sequences:
            core.submit(sequence)
        while (events := core.step()) is not None:
            for sequence, event in events:
                if isinstance(event, Output):
                    drawn[sequence] += event.tokens
        core.close()
        found[name] = list(drawn.values())
    return found


def weight_types(types: Sequence[int]) -> dict[str, Any]:
    """A model whose matrices are of those types."""
    spec = TinyLlama(
        n_layers=2, head_dim=32, n_heads=8, n_kv_heads=2, width=256, ffn=512,
        weights=tuple(GgmlType(t) for t in types),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_file(write_llama(Path(folder) / "tiny.gguf", spec))
    config = replace(BASE, context_tokens=64, banks=1, batch_tokens=24, batch_outputs=24)
    return compare(prepared, config, ids(24))


def whatever_happens_around(kv_dtype: str) -> dict[str, bool]:
    """Chunks, neighbours, decoding token by token: equal to one prefill."""
    config, tokens = replace(BASE, kv_dtype=kv_dtype), ids(280)
    cuda = bench().executor(llama(), config)
    try:
        whole = rows(cuda, tokens, bank=2)
        cuda.step([Slice(0, 0, tokens[:13]), Slice(1, 0, tokens[:27])])
        cuda.step([Slice(1, 27, tokens[27:31]), Slice(0, 13, tokens[13:49])])
        for start in range(31, 260, 37):
            cuda.step([Slice(1, start, tokens[start : min(260, start + 37)])])
        singly = [cuda.logits([Slice(1, at, [tokens[at]])])[0][0] for at in range(260, 280)]
        other = cuda.logits([Slice(0, 49, tokens[49:60])])[0]
    finally:
        cuda.close()
    return {
        "decoded": bool((np.array(singly, np.float32) == whole[260:]).all()),
        "neighbour": bool((np.array(other, np.float32) == whole[49:60]).all()),
    }


# ---- the boundary --------------------------------------------------------------------------------


def draws() -> dict[str, list[bool]]:
    """Generations by both executors: whether the tokens are equal, and whether everything is."""
    cpu, cuda = cpu_executor(llama(), BASE), bench().executor(llama(), BASE)
    try:
        found = {}
        for name, how in {
            "greedy": Sampling(temperature=0.0, logprobs=3),
            "random": Sampling(temperature=0.9, top_p=0.9, seed=7, logprobs=0),
            "plain": Sampling(temperature=0.9, top_p=0.9, seed=7),
        }.items():
            expected = generate(cpu, ids(20), 12, how)
            found[name] = _same(generate(cuda, ids(20), 12, how), expected)
        piece, targets = Slice(1, 0, ids(50)), ids(50)
        found["scores"] = _same(cuda.score(piece, targets, 2), cpu.score(piece, targets, 2))
        drafts = [Slice(2, 0, ids(9), Sampling(temperature=0.0), [Sampling(temperature=0.0)] * 3)]
        found["drafts"] = _same(cuda.step(drafts), cpu.step(drafts))
        return found
    finally:
        cpu.close()
        cuda.close()


def lists(room: int) -> dict[str, list[bool]]:
    """Draws with masks, biases and penalties, with drafts too, by both executors: as a sequence has
    them that goes on. `room`: records of tokens seen that a step takes along."""
    kinds: dict[str, dict[str, Any]] = {
        "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        "of the output": {"frequency_penalty": 0.8, "logprobs": 2},
        "grammar": {"grammar": Stride(40), "repetition_penalty": 1.2},
        "biases": {"logit_bias": tuple((t, t % 7 - 3.0) for t in range(0, 320, 2))},
    }
    before, cuda_counts.SEEN_ROOM = cuda_counts.SEEN_ROOM, room
    cpu, cuda = cpu_executor(llama(), BASE), bench().executor(llama(), BASE)
    try:
        return {name: _in_turns([cpu, cuda], fields) for name, fields in kinds.items()}
    finally:
        cuda_counts.SEEN_ROOM = before
        cpu.close()
        cuda.close()


def _in_turns(
    executors: Sequence[CpuExecutor | CudaExecutor], fields: dict[str, Any]
) -> list[bool]:
    """Steps of three banks, the drafts partly right: whether each has the same draws."""
    draws, last, at, same = [], [], [], []
    for bank in range(3):
        how = {"temperature": 0.8, "seed": bank, "max_tokens": 60, **fields}
        wanted = Generation(prompt=ids(10 + bank, bank), **how)
        draws.append(Draws(wanted))
        last.append(list(wanted.prompt))
        at.append(0)
    guess: list[int] = []
    for turn in range(6):
        slices = []
        for bank, own in enumerate(draws):
            first = own.next()
            after = own.ahead([*guess, 5, 5, 9][: 3 - bank]) if turn else []
            drafts = [*guess, 5, 5, 9][: len(after)]
            samples = [first, *after]
            slices.append(Slice(bank, at[bank], [*last[bank], *drafts], samples[-1], samples[:-1]))
        cpu, cuda = (executor.step(slices) for executor in executors)
        same.append(cpu == cuda)
        found = iter(cpu)
        for bank, piece in enumerate(slices):
            at[bank] += len(last[bank])
            drawn = [next(found) for _ in range(len(piece.checks) + 1)]
            for place, sampled in enumerate(drawn):
                assert sampled is not None
                assert sampled.error is None
                draws[bank].accept(sampled.token)
                last[bank] = [sampled.token]
                if place == len(piece.drafts) or sampled.token != piece.drafts[place]:
                    break
                at[bank] += 1
            guess = last[bank]
    return same


def _same(got: Sequence[Sampled | None], expected: Sequence[Sampled | None]) -> list[bool]:
    tokens = [[s.token for s in drawn if s is not None] for drawn in (got, expected)]
    return [tokens[0] == tokens[1], got == expected]


def copied_pages() -> dict[str, bool]:
    """A page that is copied, or mapped by another bank, serves the same bits."""
    cuda = bench().executor(llama(), BASE)
    try:
        tokens = ids(130)
        whole = rows(cuda, tokens)
        cuda.copy_page(0, 10, 64)
        cuda.copy_page(1, 11, 40)
        shared = cuda.logits([Slice(1, 104, tokens[104:])])[0]
        cuda.set_page(2, 0, 0)
        cuda.set_page(2, 1, 1)
        mapped = cuda.logits([Slice(2, 128, tokens[128:])])[0]
    finally:
        cuda.close()
    return {
        "copied": bool((np.array(shared, np.float32) == whole[104:]).all()),
        "mapped": bool((np.array(mapped, np.float32) == whole[128:]).all()),
    }


def steps_of_every_size() -> int:
    """Loads an executor, marks the driver's log, runs steps of all kinds; for a test that reads the
    log. Returns how often memory was taken meanwhile."""
    cuda = bench().executor(llama(), BASE)
    try:
        before = cuda.allocated
        bench().context.memory_info()  # the mark
        at = 0
        for count in (1, 2, 3, 8, 40, 17, 1):
            cuda.step([Slice(0, at, ids(count), Sampling(temperature=0.0))])
            at += count
        cuda.step([Slice(bank, [at, 0, 0][bank], ids(3), Sampling()) for bank in range(3)])
        cuda.submit([Slice(0, at + 3, ids(1), Sampling())])
        cuda.submit([Slice(0, at + 4, [PENDING], Sampling())])
        cuda.collect()
        cuda.collect()
        counted = Adjustments(repetition=1.2, drawn=[])
        cuda.step([Slice(0, at + 5, ids(2), Sampling(adjust=counted, logprobs=3))])
        cuda.copy_page(0, 5, 10)
        cuda.set_page(1, 3, 5)
        cuda.score(Slice(2, 3, ids(5)), ids(5), 2)
        bench().context.memory_info()
        return cuda.allocated - before
    finally:
        cuda.close()


def fails_with(config: ExecutorConfig = BASE) -> list[Any]:
    """What ends a generation on a device that breaks: class, exit code, message."""
    try:
        cuda = bench().executor(llama(), config)
        generate(cuda, ids(20), 12, Sampling(temperature=0.0))
    except Ds4Error as error:
        return [type(error).__name__, error.exit_code, str(error)]
    return []
