"""Sliding windows give pages back: real executors, driven by the engine, same bits as before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.lower import lower_cpu
from ds4_common.contract.validate import validate
from ds4_common.errors import ContractError, StepRefused
from ds4_worker.engine.api import Finished, Generation, Output
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import ExecutorConfig, Slice
from ds4_worker.executor.cpu import CpuExecutor
from golden import tiny
from helpers.executors import cpu_executor
from helpers.fake_model import ByteDetokenizer
from helpers.prepared import Prepared, prepare_file

CONTEXT = 576
CONFIG = ExecutorConfig(threads=2, banks=2, context_tokens=CONTEXT, batch_tokens=96)
FAMILIES = ("gpt_oss", "gemma2", "gemma3", "phi3", "deepseek4")
CASES = [
    (family, next(c for c in tiny.cases_of(family) if "sliding" in str(c.metadata.keys())))
    for family in FAMILIES
]
EACH = pytest.mark.parametrize(("family", "case"), CASES, ids=FAMILIES)


def prepared_of(case: tiny.Case, path: Path) -> Prepared:
    metadata = {k: v for k, v in case.metadata.items() if not k.startswith("rope.scaling")}
    metadata["context_length"] = CONTEXT
    return prepare_file(tiny.write_gguf(dataclasses.replace(case, metadata=metadata), path))


def kept(prepared: Prepared) -> Prepared:
    """The same model with every page of every layer kept."""
    bundle = pb.Bundle()
    bundle.CopyFrom(prepared.bundle)
    for history in bundle.serving.model.cache.histories:
        if history.kind == pb.SLIDING_WINDOW:
            history.kind, history.window_tokens = pb.PAGED_KV, 0
    return Prepared(bundle, prepared.frontend, prepared.allocations)


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[list[CpuExecutor]]:
    executors: list[CpuExecutor] = []
    yield executors
    for executor in executors:
        executor.close()


def engine(prepared: Prepared, opened: list[CpuExecutor], **changes: int) -> EngineCore:
    executor = CpuExecutor(
        lower_cpu(prepared.bundle), prepared.allocations, replace(CONFIG, **changes)
    )
    opened.append(executor)
    return EngineCore(executor, ByteDetokenizer, prefill_chunk=64, live_chunk=32)


def ids(count: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 60, count)]


def run(core: EngineCore, *prompts: list[int], max_tokens: int = 40) -> list[list[int]]:
    sequences = [
        core.sequence(Generation(prompt=p, max_tokens=max_tokens, temperature=0.9, ignore_eos=True))
        for p in prompts
    ]
    answers: dict[object, list[int]] = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        core.submit(sequence)
    while (events := core.step()) is not None:
        for sequence, event in events:
            assert isinstance(event, Output | Finished), event
            if isinstance(event, Output):
                answers[sequence] += event.tokens
    return [answers[sequence] for sequence in sequences]


@EACH
def test_a_long_sequence_takes_few_pages_of_layers_with_windows_and_answers_as_before(
    family: str, case: tiny.Case, tmp_path: Path, opened: list[CpuExecutor]
) -> None:
    prepared = prepared_of(case, tmp_path / "m.gguf")
    sliding, whole = engine(prepared, opened), engine(kept(prepared), opened)
    (window,) = opened[0].windows
    assert not opened[1].windows
    assert window.pages <= 4 * window.most < opened[0].pages_per_bank * 2
    assert opened[0].page_bytes + window.page_bytes == opened[1].page_bytes
    assert sliding.stats.kv_bytes < whole.stats.kv_bytes
    prompts = [ids(430, 1), ids(300, 2)]
    assert run(sliding, *prompts) == run(whole, *prompts)
    (history,) = sliding.scheduler.memory.windows
    assert history.held == 0
    # What follows finds the ends of both, and a prompt that departs elsewhere computes.
    again = [[*prompts[0], 5, 6], [*prompts[1][:100], 7, 8]]
    assert run(sliding, *again) == run(whole, *again)
    assert sliding.stats.prompt_tokens_reused > 400


def test_chunks_and_neighbours_change_no_bit_of_layers_with_windows(
    tmp_path: Path, opened: list[CpuExecutor]
) -> None:
    prepared = prepared_of(CASES[0][1], tmp_path / "m.gguf")
    alone = cpu_executor(kept(prepared), replace(CONFIG, batch_tokens=CONTEXT, batch_outputs=512))
    mixed = cpu_executor(prepared, replace(CONFIG, batch_outputs=96))
    opened += [alone, mixed]
    tokens, other = ids(500, 3), ids(500, 4)
    expected = np.array(alone.logits([Slice(0, 0, tokens)])[0], np.float32)
    rows: list[list[float]] = []
    for start, end in (
        (0, 64),
        (64, 65),
        (65, 130),
        (130, 220),
        (220, 300),
        (300, 390),
        (390, 470),
    ):
        both = [Slice(1, start, tokens[start:end]), Slice(0, end, other[end : end + 1])]
        rows += mixed.logits(both if end == 1 else both[:1])[0]
    for position in range(470, 500):
        rows += mixed.logits([Slice(1, position, tokens[position : position + 1])])[0]
    assert (np.array(rows, np.float32) == expected).all()


def test_a_page_behind_the_window_is_not_asked_for(
    tmp_path: Path, opened: list[CpuExecutor]
) -> None:
    prepared = prepared_of(CASES[0][1], tmp_path / "m.gguf")
    executor = cpu_executor(prepared, replace(CONFIG, batch_outputs=96))
    opened.append(executor)
    executor.logits([Slice(0, 0, ids(90, 1))])
    executor.logits([Slice(0, 90, ids(90, 2))])
    executor.set_page(0, 0, -1, 1)
    executor.logits([Slice(0, 180, [1])])
    executor.set_page(0, 2, -1, 1)  # positions 128 to 191: the window's own
    with pytest.raises(StepRefused, match="logical page 2 is mapped to -1"):
        executor.logits([Slice(0, 181, [1])])
    with pytest.raises(StepRefused, match="history: got 2, expected at most 1"):
        executor.set_page(0, 0, 0, 2)
    with pytest.raises(StepRefused, match="copy of page"):
        executor.copy_page(0, executor.windows[0].pages, 1, 1)


def test_a_window_that_no_sequence_outgrows_keeps_all_in_one_history(
    tmp_path: Path, opened: list[CpuExecutor]
) -> None:
    prepared = prepared_of(CASES[0][1], tmp_path / "m.gguf")
    opened.append(cpu_executor(prepared, replace(CONFIG, context_tokens=8)))
    assert opened[0].windows == ()


def test_an_attention_that_sees_more_than_its_history_keeps_is_refused(tmp_path: Path) -> None:
    bundle = prepared_of(CASES[0][1], tmp_path / "m.gguf").bundle
    history = next(h for h in bundle.serving.model.cache.histories if h.kind == pb.SLIDING_WINDOW)
    history.window_tokens -= 1
    with pytest.raises(
        ContractError, match="attribute window: got 9, expected 1 to the history's 8"
    ):
        lower_cpu(bundle)
    history.window_tokens = 0
    with pytest.raises(
        ContractError, match=r"window_tokens: got 0, expected 1 to \d+ in a SLIDING"
    ):
        validate(bundle)
