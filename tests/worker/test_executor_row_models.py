"""Models of compressed rows and streams over pages, chunks, threads and copies: the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4_common.errors import StepRefused
from ds4_worker.engine.api import Event, Generation, Output
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import ExecutorConfig, Slice
from golden import tiny
from golden.deepseek4.cases import CASES, REAL, REAL_TYPES
from helpers.executors import cpu_executor, logits, packed
from helpers.fake_model import ByteDetokenizer
from helpers.prepared import Prepared, prepare_file

LONG = next(case for case in CASES if case.name == "long")
MIXED = next(case for case in CASES if case.name == "short_ratios")
Array = npt.NDArray[Any]


# --- whole models ---


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Two-bit experts, halves and Q8_0, as files of such models have them."""
    return prepare_file(
        tiny.write_gguf(REAL, tmp_path_factory.mktemp("real") / "m.gguf", REAL_TYPES)
    )


def config(case: tiny.Case, **changes: Any) -> ExecutorConfig:
    made: dict[str, Any] = {"threads": 2, "banks": 2, "batch_outputs": 64}
    return ExecutorConfig(context_tokens=case.context, **(made | changes))


def run(prepared: Prepared, case: tiny.Case, **changes: Any) -> Array:
    executor = cpu_executor(prepared, config(case, **changes))
    rows = logits(executor, tiny.tokens(case))
    executor.close()
    return rows


def test_real_block_types_are_computed_alike_by_every_layout_and_instruction_set(
    real: Prepared,
) -> None:
    whole = run(real, REAL)
    assert np.isfinite(whole).all()
    for changes in ({"isa": "scalar", "threads": 1}, {"threads": 5}, {"kv_dtype": "q8_0"}):
        assert (run(real, REAL, **changes) == whole).all(), changes  # rows are halves in any cache
    assert (run(packed(real), REAL) == whole).all()


@pytest.mark.parametrize("edges", [[0, 1, 64, 65, 127, 129, 200], [0, 63, 128, 131, 132, 199, 200]])
def test_chunks_and_neighbours_change_no_bit(real: Prepared, edges: list[int]) -> None:
    whole, ids = run(real, REAL), tiny.tokens(REAL)
    executor = cpu_executor(real, config(REAL))
    for start, end in itertools.pairwise(edges):
        other = ids[: end - start]
        rows = executor.logits([Slice(1, start, ids[start:end])])[0]
        executor.step([Slice(0, 0, other)])
        assert (np.array(rows, np.float32) == whole[start:end]).all()
    executor.close()


def test_token_by_token_is_the_prompt_at_once(tmp_path: Path) -> None:
    prepared = prepare_file(tiny.write_gguf(LONG, tmp_path / "m.gguf"))
    whole, ids = run(prepared, LONG), tiny.tokens(LONG)
    executor = cpu_executor(prepared, config(LONG))
    for position, token in enumerate(ids[:270]):
        row = executor.logits([Slice(0, position, [token])])[0][0]
        assert (np.array(row, np.float32) == whole[position]).all(), position
    executor.close()


def test_a_page_goes_on_only_where_it_ends(real: Prepared) -> None:
    whole, ids = run(real, REAL), tiny.tokens(REAL)
    executor = cpu_executor(real, config(REAL))
    assert not executor.divisible
    executor.step([Slice(0, 0, ids[:100])])
    with pytest.raises(StepRefused, match="holds 36 tokens, expected 30"):
        executor.step([Slice(0, 94, ids[94:120])])
    with pytest.raises(StepRefused, match="exactly the tokens that the first holds, got 30"):
        executor.copy_page(1, 6, 30)
    # A second sequence shares the first page and goes its own way.
    executor.set_page(1, 0, 0)
    executor.copy_page(1, executor.pages_per_bank + 1, 36)
    for history, window in enumerate(executor.windows, start=1):
        executor.copy_page(1 % window.most, window.most + 1 % window.most, 36, history)
    for bank in (1, 0):
        rows = executor.logits([Slice(bank, 100, ids[100:])])[0]
        assert (np.array(rows, np.float32) == whole[100:]).all()
    executor.close()


@pytest.mark.parametrize("start", [5, 60, 63, 64, 100, 126])
def test_what_a_short_slice_got_wrong_is_taken_back(real: Prepared, start: int) -> None:
    """Over the ends of windows and pages, beside a neighbour who does the same."""
    whole, ids = run(real, REAL), tiny.tokens(REAL)
    executor = cpu_executor(real, config(REAL))
    assert executor.rewinds
    for bank in (0, 1):
        executor.step([Slice(bank, 0, ids[:start])])
    position = start
    for right, wrong in ((1, 3), (2, 1), (4, 9), (1, 0), (3, 30), (1, 1)):
        tokens = [*ids[position : position + right], *[7] * wrong]
        rows = executor.logits([Slice(0, position, tokens)])[0]
        executor.step([Slice(1, position, tokens)])
        expected = whole[position : position + right]
        assert (np.array(rows[:right], np.float32) == expected).all()
        position += right
    for bank in (0, 1):
        rows = executor.logits([Slice(bank, position, ids[position:])])[0]
        assert (np.array(rows, np.float32) == whole[position:]).all()
    executor.close()


def test_a_slice_is_taken_back_only_while_its_pages_are_its_own(real: Prepared) -> None:
    ids = tiny.tokens(REAL)
    executor = cpu_executor(real, config(REAL))
    executor.step([Slice(0, 0, ids[:20])])
    executor.step([Slice(0, 20, ids[20:24])])
    executor.set_page(1, 0, 0)  # another sequence gets the page
    executor.step([Slice(1, 0, ids[:24])])
    with pytest.raises(StepRefused, match="holds 24 tokens, expected 22"):
        executor.step([Slice(0, 22, ids[22:24])])
    executor.close()


def tokens_of(
    core: EngineCore, prompt: list[int], count: int, **more: Any
) -> tuple[list[int], int]:
    """The tokens drawn, and how many positions of the prompt were found."""
    sequence = core.sequence(Generation(prompt=prompt, max_tokens=count, temperature=0.0, **more))
    core.submit(sequence)
    events: list[Event] = []
    while (batch := core.step()) is not None:
        events += [event for _, event in batch]
    drawn = [token for event in events if isinstance(event, Output) for token in event.tokens]
    return drawn, sequence.reused


def test_a_conversation_reuses_whole_pages_and_its_own_end(tmp_path: Path) -> None:
    prepared = prepare_file(tiny.write_gguf(LONG, tmp_path / "m.gguf"))
    executor = cpu_executor(prepared, config(LONG, banks=2))
    core = EngineCore(executor, ByteDetokenizer, prefill_chunk=50)
    page, prompt = executor.page_tokens, tiny.tokens(LONG)[:150]
    answer, reused = tokens_of(core, prompt, 20)
    assert (page, reused) == (128, 0)
    said = [*prompt, *answer[:-1]]
    for follow, found in (([*said, answer[-1], 7, 8], len(said)), ([*prompt[:140], 9], page)):
        drawn, reused = tokens_of(core, follow, 10)
        assert reused == found
        assert drawn == tokens_of(core, follow, 10, reuse_prefix=False)[0]
    executor.close()
