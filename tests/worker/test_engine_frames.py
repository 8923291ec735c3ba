"""Two steps under way: what changes is when a token is computed, and nothing that anybody sees."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ds4_common.errors import ExecutorFailure
from ds4_worker.engine.api import (
    Event,
    Failed,
    Finished,
    ReasoningSpan,
)
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.sequence import Sequence
from ds4_worker.executor.api import (
    PENDING,
    Adjustments,
    ExecutorConfig,
    Sampling,
    Slice,
    WindowPages,
)
from helpers.engine_runs import run
from helpers.fake_executor import failing_after
from helpers.fake_model import VOCABULARY, ByteDetokenizer
from helpers.frame_cores import (
    CONTEXT,
    PAGE,
    counting,
    item,
    lazy_of,
    make_core,
    run_to_the_end,
    seen,
)
from helpers.lazy_executor import LazyExecutor
from helpers.stride import Stride

# --- what needs the host ------------------------------------------------------------------------


NO_END = ReasoningSpan(close=(220,), opened=True, ignore_eos=True)


@pytest.mark.parametrize(
    ("fields", "ahead"),
    [
        pytest.param({}, 9, id="plain"),
        pytest.param({"pieces": True, "temperature": 0.0}, 9, id="greedy pieces"),
        pytest.param({"eos_ids": frozenset({200})}, 9, id="an end"),
        pytest.param(
            {"reasoning": ReasoningSpan(close=(200,), opened=True)}, 9, id="no budget of reasoning"
        ),
        pytest.param({"logprobs": 0}, 9, id="log-probabilities"),
        pytest.param({"presence_penalty": 0.5}, 9, id="a penalty"),
        pytest.param(
            {"logit_bias": tuple((token, 1.0) for token in range(200, 209))}, 9, id="biases"
        ),
        pytest.param({"ignore_eos": True, "eos_ids": frozenset({200})}, 9, id="an end ignored"),
        pytest.param(
            {"eos_ids": frozenset({200}), "reasoning": NO_END},
            0,
            id="an end held back by reasoning",
        ),
        pytest.param(
            {"eos_ids": frozenset({200}), "reasoning": replace(NO_END, close=(14,))},
            4,
            id="an end held back until reasoning closes",
        ),
        pytest.param({"grammar": Stride()}, 0, id="a grammar"),
        pytest.param(
            {"reasoning": ReasoningSpan(close=(200,), opened=True, budget=30)},
            0,
            id="a budget of reasoning",
        ),
        pytest.param(
            {"reasoning": ReasoningSpan(close=(14,), opened=True, budget=30)},
            4,
            id="a budget of reasoning, closed",
        ),
        pytest.param({"stop_strings": ("zz",)}, 0, id="a stop string"),
        pytest.param({"stop_token_sequences": ((99,),)}, 0, id="stop tokens"),
    ],
)
def test_a_step_follows_at_once_only_where_nothing_of_it_needs_the_host(
    fields: dict[str, Any], ahead: int
) -> None:
    """Of ten steps: the first is the prompt's. Tokens count up from 10. With a budget, or another
    rule inside the reasoning, none before the delimiter (14) is booked."""
    wanted = item([8, 9], 10, **fields)
    core = make_core(choose=counting)
    expected = run(make_core(False, choose=counting), wanted)
    assert list(map(seen, run(core, wanted))) == list(map(seen, expected))
    assert (core.stats.steps, core.stats.steps_ahead) == (10, ahead)


def test_one_sequence_that_needs_the_host_holds_up_the_step_of_all() -> None:
    """Two steps of half the rows would cost more than the wait. Behind its last one nobody
    waits."""
    core = make_core()
    run(core, item([1], 12), item([2], 6, grammar=Stride()))
    assert [len(step) for step in lazy_of(core).steps] == [2] * 6 + [1] * 6
    assert core.stats.steps_ahead == 6


def test_drafts_wait_for_the_token_before_them_and_the_rest_does_not() -> None:
    """A sequence that begins to repeat itself."""

    def repeats(history: list[int]) -> int:
        return len(history) * 7 % 250 if len(history) < 20 else history[-5]

    wanted = item([1, 2, 3], 50, eos_ids=frozenset({255}))
    core = make_core(choose=repeats, speculate=4, banks=1)
    plain = run(make_core(False, choose=repeats, banks=1), wanted)
    assert list(map(seen, run(core, wanted))) == list(map(seen, plain))
    assert core.stats.steps_ahead >= 15
    assert core.stats.draft_tokens_accepted >= 15
    tokens = [piece.tokens for step in lazy_of(core).steps for piece in step]
    assert max(map(len, tokens)) == 5


def test_a_prompt_is_not_kept_waiting_by_steps_sent_ahead() -> None:
    core = make_core(banks=2, chunk=8)
    core.submit(core.sequence(item([1], 30)))
    for _ in range(4):
        core.step()
    late = core.sequence(item(list(range(20)), 3))
    core.submit(late)
    core.step()  # what was under way when it came
    assert late.bank < 0
    core.step()
    assert late.consumed > 0
    steps = core.stats.steps_ahead
    while late.prefilling:
        core.step()
    assert core.stats.steps_ahead <= steps + 1, "only behind the end of the prompt"


def test_a_bank_that_is_about_to_be_free_is_given_on_at_once() -> None:
    core = make_core(banks=2)
    core.submit(core.sequence(item([1], 4)))
    core.submit(core.sequence(item([2], 30)))
    waiting = core.sequence(item([3], 4))
    core.submit(waiting)
    for _ in range(4):
        core.step()
    assert core.stats.steps_ahead == 3
    core.step()
    assert waiting.output


def test_a_step_ahead_takes_no_more_pages_of_a_window_than_were_reserved() -> None:
    """The last piece of the prompt, at 15 to 19, holds all three pages that a window of 5 can need;
    position 20 is in a fourth, so it is for the step after."""
    most = 3
    executor = LazyExecutor(
        ExecutorConfig(banks=1, context_tokens=CONTEXT, batch_tokens=5),
        vocabulary=VOCABULARY,
        page_tokens=PAGE,
        windows=(WindowPages(5, most, most, page_bytes=8),),
    )
    core = EngineCore(executor, ByteDetokenizer, prefill_chunk=5, live_chunk=5)
    ((*_, end),) = run(core, item(list(range(20)), 9))
    assert isinstance(end, Finished)
    assert [piece.start for step in executor.steps for piece in step][3:6] == [15, 20, 21]
    assert core.stats.steps_ahead == 7


# --- what is found out late -----------------------------------------------------------------------


def test_what_was_computed_behind_the_end_is_nobodys() -> None:
    wanted = item([8, 9], 30, pieces=True, eos_ids=frozenset({14}))
    other = item([100], 20)
    core = make_core(choose=counting)
    expected = run(make_core(False, choose=counting), wanted, other)
    assert list(map(seen, run(core, wanted, other))) == list(map(seen, expected))
    assert core.stats.rows_discarded == 1
    assert core.stats.generated_tokens == 5 + 20
    sent = lazy_of(core).steps
    assert sum(len(step) for step in sent) == 5 + 20 + 1


def test_an_end_by_length_is_known_before_and_costs_no_row() -> None:
    core = make_core()
    run(core, item([1], 4), item([2], 9))
    assert core.stats.rows_discarded == 0
    assert [len(step) for step in lazy_of(core).steps] == [2] * 4 + [1] * 5


@pytest.mark.parametrize("divisible", [True, False])
def test_a_conversation_goes_on_behind_an_end_that_was_found_out_late(divisible: bool) -> None:
    """Where a page holds state that has run ahead, it is not gone on from."""
    for place in range(1, 12):
        core = make_core(choose=counting, divisible=divisible)
        plain = make_core(False, choose=counting, divisible=divisible)
        first = item([1, 2, 3], 30, eos_ids=frozenset({3 + place}))
        assert list(map(seen, run(core, first))) == list(map(seen, run(plain, first)))
        assert core.stats.rows_discarded == 1
        more = item([*range(1, 4 + place), 77, 78, 79], 6)
        ((*_, last),), ((*_, expected),) = run(core, more), run(plain, more)
        assert isinstance(last, Finished)
        assert isinstance(expected, Finished)
        assert lazy_of(core).prompts[-1] == list(more.prompt)
        kept = (3 + place - 1) // PAGE * PAGE
        assert last.reused_prompt_tokens == (expected.reused_prompt_tokens if divisible else kept)


def test_a_draw_that_fails_under_a_step_sent_ahead_fails_its_sequence_only() -> None:
    core = make_core(choose=counting)
    bad, good = core.sequence(item([1], 30)), core.sequence(item([100], 12))
    for sequence in (bad, good):
        core.submit(sequence)
    for _ in range(3):
        core.step()
    lazy_of(core).errors[bad.bank] = "not finite"
    events: list[tuple[Sequence, Event]] = []
    while (batch := core.step()) is not None:
        events += batch
        lazy_of(core).errors.clear()
    assert [event for sequence, event in events if sequence is bad] == [
        Failed(500, "not finite", "sampling_failure")
    ]
    assert good.output == list(range(101, 113))
    assert core.stats.rows_discarded == 1


def test_a_cancelled_sequence_leaves_nothing_behind_in_the_step_under_way() -> None:
    """Its bank and its pages go to the next one while a step still writes them."""
    core = make_core(choose=counting, banks=1, pages=6)
    gone = core.sequence(item([1, 2, 3], 20))
    core.submit(gone)
    for _ in range(5):
        core.step()
    assert core._under_way is not None
    core.cancel(gone)
    ((*_, end),) = run(core, item([50] * 9, 12))
    assert isinstance(end, Finished)
    assert core.stats.rows_discarded == 1
    assert lazy_of(core).prompts[-1] == [50] * 9
    assert core.scheduler.memory.cache.available == core.scheduler.memory.pool.total


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_executor_that_breaks_with_a_step_under_way_ends_everything_once(steps: int) -> None:
    core = make_core(before_step=failing_after(steps))
    sequences = [core.sequence(item([n], 20)) for n in range(3)]
    for sequence in sequences:
        core.submit(sequence)
    with pytest.raises(ExecutorFailure):
        run_to_the_end(core)
    failure = Failed(500, "gone", "engine_failure")
    assert core.fail_all(failure) == [(sequence, failure) for sequence in sequences]
    assert core.scheduler.memory.cache.available == core.scheduler.memory.pool.total


# --- the stand-in of such an executor ---------------------------------------------------------


def test_the_lazy_executor_refuses_what_an_executor_of_frames_refuses() -> None:
    def ready() -> LazyExecutor:
        executor = LazyExecutor(ExecutorConfig(banks=2, context_tokens=CONTEXT), page_tokens=PAGE)
        for bank in range(2):
            executor.set_page(bank, 0, bank)
        executor.submit([Slice(0, 0, [1], Sampling())])
        return executor

    for refused in (
        [Slice(0, 1, [PENDING], Sampling(index=1, adjust=Adjustments(drawn=[7])))],
        [Slice(0, 2, [PENDING], Sampling())],
        [Slice(1, 0, [PENDING], Sampling())],
        [Slice(0, 1, [PENDING, 1], Sampling())],
    ):
        with pytest.raises((AssertionError, KeyError)):
            ready().submit(refused)
    executor = ready()
    executor.submit([Slice(0, 1, [PENDING], Sampling())])
    with pytest.raises(AssertionError):
        executor.submit([Slice(0, 2, [PENDING], Sampling())])
    assert executor.collect() != executor.collect()
