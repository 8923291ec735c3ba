"""Drafts change no bit, whatever the model computes and keeps: every family, every cache type."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4_common.contract.lower import lower_cpu
from ds4_worker.engine.api import Event, Finished, Generation, Output, Speculate
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.executor.cpu import CpuExecutor
from golden import tiny
from helpers.fake_model import ByteDetokenizer
from helpers.prepared import Prepared, prepare_file
from helpers.tiny_gguf import TinyLlama, write_llama

CASES = [(family, case) for family in tiny.FAMILIES for case in tiny.cases_of(family)]
ANSWER = 24
FLOATS = ("f16", "bf16", "f32")  # q8_0 wants wider heads than most of these have


def answers(
    prepared: Prepared, beginning: list[int], context: int, kv_dtype: str, speculate: Speculate
) -> tuple[list[object], int, int, bool]:
    """Bits of two answers, greedy and drawn; drafts offered and accepted; whether any may be."""
    config = ExecutorConfig(threads=2, banks=2, context_tokens=context, kv_dtype=kv_dtype)
    executor = CpuExecutor(lower_cpu(prepared.bundle), prepared.allocations, config)
    core = EngineCore(executor, ByteDetokenizer, speculate=speculate)
    prompt = (beginning * 6)[: context - ANSWER]
    sequences = [
        core.sequence(
            Generation(
                prompt=prompt,
                max_tokens=ANSWER,
                temperature=temperature,
                top_k=4,
                seed=7,
                logprobs=2,
                logit_bias=tuple((token, 9.0) for token in beginning),
            )
        )
        for temperature in (0.0, 4.0)
    ]
    events: list[list[Event]] = [[], []]
    for sequence in sequences:
        core.submit(sequence)
    while (batch := core.step()) is not None:
        for sequence, event in batch:
            events[sequences.index(sequence)].append(event)
    core.close()
    for each in events:
        assert isinstance(each[-1], Finished)
    bits = [(e.tokens, e.logprobs) for each in events for e in each if isinstance(e, Output)]
    stats = core.stats
    return (
        list(bits), stats.draft_tokens_offered, stats.draft_tokens_accepted, executor.rewinds,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "case", "kv_dtype"),
    [(family, case, FLOATS[i % 3]) for i, (family, case) in enumerate(CASES)],
    ids=[f"{family}-{case.name}" for family, case in CASES],
)
def test_r66_drafts_change_no_bit_of_any_family(
    family: str, case: tiny.Case, kv_dtype: str, tmp_path: Path
) -> None:
    prepared = prepare_file(tiny.write_gguf(case, tmp_path / "case.gguf"))
    check(prepared, tiny.tokens(case)[:3], case.context, kv_dtype)


def test_r66_drafts_change_no_bit_of_a_quantized_cache(tmp_path: Path) -> None:
    prepared = prepare_file(write_llama(tmp_path / "tiny.gguf", TinyLlama(head_dim=32)))
    check(prepared, [5, 6, 7], 128, "q8_0")


def check(prepared: Prepared, beginning: list[int], context: int, kv_dtype: str) -> None:
    plain, none, _, _ = answers(prepared, beginning, context, kv_dtype, "off")
    drafted, offered, accepted, rewinds = answers(prepared, beginning, context, kv_dtype, 7)
    assert drafted == plain
    assert none == 0
    if rewinds:
        assert 0 < accepted < offered
    else:  # a wrong draft could not be taken back
        assert offered == 0
