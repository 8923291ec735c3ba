"""Sequences with drafts: these change the speed alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Several
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_worker.engine import core as engine_core
from ds4_worker.engine.api import (
    Event,
    Failed,
    Finished,
    Generation,
    Output,
    Speculate,
)
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.sequence import Sequence
from ds4_worker.executor.api import ExecutorConfig, Slice
from helpers.engine_runs import run
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY, ByteDetokenizer
from helpers.speculating import item
from helpers.stride import Stride

CONTEXT = 96


def make_core(
    speculate: Speculate = "off",
    *,
    banks: int = 3,
    recall: int | None = 2,
    outputs: int = 64,
    tokens: int = 512,
    rewinds: bool = True,
    divisible: bool = True,
) -> EngineCore:
    config = ExecutorConfig(
        banks=banks, context_tokens=CONTEXT, batch_tokens=tokens, batch_outputs=outputs
    )
    executor = FakeExecutor(
        config, vocabulary=VOCABULARY, recall=recall, rewinds=rewinds, divisible=divisible
    )
    return EngineCore(executor, ByteDetokenizer, live_chunk=8, speculate=speculate)


def seen(events: list[Event]) -> list[object]:
    """All that a reader may see, but times."""
    return [
        (event.tokens, event.text, event.logprobs, event.pieces)
        if isinstance(event, Output)
        else (event.reason, event.stop, event.completion_tokens)
        if isinstance(event, Finished)
        else event
        for event in events
    ]


PERIODIC = [1, 2, 3, 4, 5] * 4


def period(history: list[int]) -> int:
    return history[-5]


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    steps, offered, accepted = {}, {}, {}
    for speculate in ("off", 1, 4, 15):
        core = make_core(speculate)
        executor = core._executor
        assert isinstance(executor, FakeExecutor)
        executor._choose = period
        (events,) = run(core, item(PERIODIC, 40))
        assert seen(events)[-1] == ("length", None, 40)
        steps[speculate] = len(executor.steps)
        offered[speculate] = core.stats.draft_tokens_offered
        accepted[speculate] = core.stats.draft_tokens_accepted
        end = events[-1]
        assert isinstance(end, Finished)
        assert (end.drafted_tokens, end.accepted_tokens) == (
            core.stats.draft_tokens_offered,
            core.stats.draft_tokens_accepted,
        )
    assert steps == {"off": 40, 1: 21, 4: 9, 15: 4}
    assert offered["off"] == 0
    assert offered == accepted
    (random,) = run(make_core(4, recall=None), item(list(range(9)), 40))
    assert seen(random) == seen(run(make_core(recall=None), item(list(range(9)), 40))[0])


def test_a_prediction_is_drafted_from_the_first_token_on_and_changes_no_answer() -> None:
    wanted = item([9, 8, 7], 40)
    plain = make_core(recall=None)
    (expected,) = run(plain, wanted)
    tokens = [t for event in expected if isinstance(event, Output) for t in event.tokens]
    wrong = [t if i % 13 else (t + 1) % 256 for i, t in enumerate(tokens, start=1)]
    taken = []
    for prediction in ((), wrong, tokens):
        core = make_core(15, recall=None)
        (events,) = run(core, msgspec.structs.replace(wanted, prediction=prediction))
        assert seen(events) == seen(expected)
        taken.append(core.stats.steps)
    assert taken[0] == 40
    assert taken[2] == 1 + math.ceil(39 / 16)
    assert taken[2] < taken[1] < 20


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_sequences": ((3, 4),)},
        {"stop_token_sequences": ((4,),)},
        {"stop_strings": ("\x04\x05\x01",)},
        {"eos_ids": frozenset({4})},
        {"grammar": Stride(17, modulus=6, reach=5)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_drawn_after_the_end_is_nobodys(fields: dict[str, Any]) -> None:
    """The end lies inside a draft of which every token is right."""
    wanted = item(PERIODIC, 40, pieces=True, logprobs=1, **fields)
    answers = []
    for speculate in ("off", 15):
        core = make_core(speculate, banks=1)
        executor = core._executor
        assert isinstance(executor, FakeExecutor)
        executor._choose = period
        answers.append(seen(run(core, wanted)[0]))
        if speculate == 15 and "stop" in next(iter(fields)):  # other drafts end before
            assert core.stats.draft_tokens_offered > core.stats.draft_tokens_accepted > 0
    assert answers[0] == answers[1]
    assert len(answers[0]) < 40


def test_tokens_of_one_step_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(engine_core, "now_ns", lambda: next(seconds) * 1_000_000_000)
    core = make_core(15, banks=1)
    executor = core._executor
    assert isinstance(executor, FakeExecutor)
    executor._choose = period
    run(core, item(PERIODIC, 40))
    observed = core.stats.between_tokens_seconds
    assert sum(observed.counts) == 39
    assert observed.total == pytest.approx(core.stats.steps - 1)


class Priced(FakeExecutor):
    """Draws at random from `vocabulary` tokens, and knows what its steps take: one unit with one
    row, and `slope` more with each further row."""

    def __init__(self, vocabulary: int, banks: int, slope: float) -> None:
        super().__init__(
            ExecutorConfig(banks=banks, context_tokens=256), vocabulary=vocabulary, page_tokens=64
        )
        self.slope, self.now = slope, 0.0

    def step(self, slices: Several[Slice]) -> list[Any]:
        rows = sum(len(piece.tokens) for piece in slices)
        self.now += 1e9 * (1 + self.slope * (rows - 1))
        self.steps.clear()
        return super().step(slices)


def time_of_answers(
    monkeypatch: pytest.MonkeyPatch, executor: Priced, speculate: Speculate
) -> tuple[list[float], EngineCore]:
    """What four answers take, one after the other, of all streams at once."""
    monkeypatch.setattr(engine_core, "now_ns", lambda: int(executor.now))
    core = EngineCore(executor, ByteDetokenizer, speculate=speculate, reuse_prefixes=False)
    times, streams = [], executor.config.banks
    for number in range(4):
        began = executor.now
        prompts = [
            [(7 * i * i + 3 * i * (number + bank)) % executor.vocabulary for i in range(48)]
            for bank in range(streams)
        ]
        run(core, *(item(p, 128, seed=number * streams + i) for i, p in enumerate(prompts)))
        times.append(executor.now - began)
    return times, core


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("slope", [0.02, 0.12, 0.6])
@pytest.mark.parametrize("vocabulary", [24, 250])
def test_text_that_repeats_itself_by_chance_costs_hardly_any_time(
    vocabulary: int, slope: float, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 24 tokens drawn at random nearly every end has occurred before, and what followed it does
    not follow again. Drafting finds that out, whatever a row costs, and falls silent."""
    plain, drafted = (
        time_of_answers(monkeypatch, Priced(vocabulary, streams, slope), speculate)
        for speculate in ("off", "auto")
    )
    shares = [a / b for a, b in zip(plain[0], drafted[0], strict=True)]
    assert min(shares) >= 0.97, shares
    if slope > 0.1:  # else rows are next to free, and trying is right
        assert drafted[1].stats.draft_tokens_offered <= 0.05 * 4 * 128 * streams


def test_r62_no_lane_is_wider_than_the_tokens_that_are_left() -> None:
    core = make_core(15, banks=1)
    executor = core._executor
    assert isinstance(executor, FakeExecutor)
    executor._choose = period
    for left in range(1, 20):
        executor.steps.clear()
        run(core, item(PERIODIC, left))
        decodes = [step[0] for step in executor.steps if step[0].start >= len(PERIODIC)]
        positions = [piece.start + len(piece.tokens) for piece in decodes]
        assert all(end <= len(PERIODIC) + left - 1 for end in positions)
        assert sum(len(p.tokens) for p in decodes) == left - 1


@pytest.mark.parametrize(("outputs", "tokens"), [(5, 512), (64, 12), (3, 11)])
def test_r63_a_step_never_has_more_rows_than_the_executor_takes(outputs: int, tokens: int) -> None:
    core = make_core(15, outputs=outputs, tokens=tokens)
    executor = core._executor
    assert isinstance(executor, FakeExecutor)
    executor._choose = period
    items = [item(PERIODIC[i:], 30) for i in range(6)]  # the executor itself checks every step
    for events in run(core, *items):
        assert isinstance(events[-1], Finished)
    assert core.stats.draft_tokens_accepted > 0
    drawn = [sum(len(p.checks) + 1 for p in step if p.sample) for step in executor.steps]
    assert max(drawn) <= outputs


def test_a_program_whose_histories_do_not_rewind_gets_no_drafts() -> None:
    core = make_core(4, rewinds=False)
    (events,) = run(core, item(PERIODIC, 40))
    assert core.stats.draft_tokens_offered == 0
    assert seen(events) == seen(run(make_core(), item(PERIODIC, 40))[0])


def test_a_page_that_ran_ahead_of_its_sequence_is_not_gone_on_from() -> None:
    """Where a page holds state, one that ends with drafts behind it is not kept."""
    wrong = 0
    for place in range(1, 12):
        plain, core = make_core(), make_core(15, divisible=False)
        (expected,) = run(plain, item(PERIODIC, 20))
        answer = [t for e in expected if isinstance(e, Output) for t in e.tokens]
        ends, mistaken = frozenset({answer[place]}), (*answer[:place], *range(200, 209))
        run(core, item(PERIODIC, 20, prediction=mistaken, eos_ids=ends))
        wrong += core.stats.draft_tokens_offered > core.stats.draft_tokens_accepted
        more = [*PERIODIC, *answer[: place + 1], 1, 2, 3]
        assert seen(run(core, item(more, 5))[0]) == seen(run(plain, item(more, 5))[0])
    assert wrong > 3


def test_r60_results_that_leave_out_a_draw_are_a_failure() -> None:
    core = make_core(4, banks=1)
    executor = core._executor
    assert isinstance(executor, FakeExecutor)
    whole = executor.step

    def short(slices: Several[Slice]) -> list[object]:
        return whole(slices)[:1]  # type: ignore[return-value]

    executor._choose = period
    core.submit(core.sequence(item(PERIODIC, 40)))
    core.step()
    executor.step = short  # type: ignore[method-assign, assignment]
    with pytest.raises(Exception, match="1 results, asked for 5"):
        core.step()


def test_a_draw_that_fails_behind_a_wrong_draft_fails_nobody() -> None:
    """It is no draw of the sequence: plain decoding would never have come there."""
    core = make_core(4, banks=1)
    executor = core._executor
    assert isinstance(executor, FakeExecutor)
    executor._choose = lambda history: 77 if history[-2:] == [1, 2] else history[-5]
    draw = executor._draw
    wrong = [1, 2, 3]

    def failing(piece: Slice, sample: object, history: list[int]) -> object:
        sampled = draw(piece, sample, history)  # type: ignore[arg-type]
        if history[-3:] == wrong and len(history) > len(PERIODIC):
            sampled.error = "broken on purpose"
        return sampled

    executor._draw = failing  # type: ignore[method-assign, assignment]
    (events,) = run(core, item(PERIODIC, 10))
    assert not any(isinstance(event, Failed) for event in events)
    assert core.stats.draft_tokens_offered > core.stats.draft_tokens_accepted


GRAMMARS = (
    None, None, Stride(), Stride(9), Stride(modulus=7, reach=3), Stride(30, modulus=4, reach=2),
    Stride(broken=frozenset({3}), modulus=7, reach=4),
)  # fmt: skip


requests = st.lists(
    st.builds(
        item,
        st.lists(st.integers(0, 3), min_size=1, max_size=40),
        st.integers(1, 40),
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 3),
        logprobs=st.integers(-1, 2),
        pieces=st.booleans(),
        eos_ids=st.sampled_from([frozenset(), frozenset({3}), frozenset(range(0, 256, 9))]),
        ignore_eos=st.booleans(),
        stop_strings=st.sampled_from([(), ("a",), ("bc", "zz"), ("\x01\x02",)]),
        stop_token_sequences=st.sampled_from([(), ((5,),), ((1, 2),), ((200, 7), (8,))]),
        grammar=st.sampled_from(GRAMMARS),
        reuse_prefix=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=150)
@given(
    requests,
    st.sampled_from([1, 2, 7, 15, "auto"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 12), min_size=5, max_size=5),
    st.dictionaries(st.integers(0, 4), st.integers(1, 15), max_size=2),
)
def test_r66_a_mix_of_requests_gives_what_each_gives_alone_and_without_drafts(
    items: list[Generation],
    speculate: Speculate,
    banks: int,
    recall: int,
    arrivals: list[int],
    cancels: dict[int, int],
) -> None:
    """Requests arrive at any step, some are cancelled. Tokens, texts, log-probabilities, ends and
    failures are the same; the executor itself refuses wrong positions and pages."""
    core = make_core(speculate, banks=banks, recall=recall)
    sequences = [core.sequence(wanted) for wanted in items]
    events: dict[Sequence, list[Event]] = {sequence: [] for sequence in sequences}
    pending, turn = True, 0
    while pending or turn <= 15:
        for index, sequence in enumerate(sequences):
            if arrivals[index] == turn:
                core.submit(sequence)
            if cancels.get(index) == turn and arrivals[index] <= turn:
                core.cancel(sequence)
        batch = core.step()
        pending = batch is not None
        for sequence, event in batch or []:
            events[sequence].append(event)
        turn += 1
    for index, (sequence, wanted) in enumerate(zip(sequences, items, strict=True)):
        (alone,) = run(make_core(banks=1, recall=recall), wanted)
        got = seen(events[sequence])
        cut = index in cancels and cancels[index] >= arrivals[index]
        assert got == (seen(alone)[: len(got)] if cut else seen(alone))
    memory = core.scheduler.memory
    assert memory.cache.available == memory.pool.total
