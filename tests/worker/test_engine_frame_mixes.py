"""Any mix of requests under two steps at once: each gets what it gets alone, a step at a time."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_worker.engine.api import (
    Event,
    Finished,
    ReasoningSpan,
    Speculate,
)
from ds4_worker.engine.sequence import Sequence
from helpers.engine_runs import run
from helpers.frame_cores import item, lazy_of, make_core, seen
from helpers.stride import Stride

FIELDS = st.sampled_from(
    [
        {},
        {},
        {},
        {"temperature": 0.0},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"repetition_penalty": 1.5},
        {"logit_bias": ((3, -100.0),)},
        {"ignore_eos": True},
        {"grammar": Stride(9)},
        {"grammar": Stride(30, frozenset(range(0, 250, 7)))},
        {"reasoning": ReasoningSpan(close=(4, 5), opened=True, budget=3)},
        {"reasoning": ReasoningSpan(close=(4, 5), opened=True)},
        {"reasoning": ReasoningSpan(close=tuple(range(9)), opened=True, ignore_eos=True)},
        {"stop_token_sequences": tuple((token,) for token in range(0, 260, 9))},
        {"stop_token_sequences": tuple((token, 7) for token in range(260))},
        {"stop_strings": tuple(chr(code) for code in range(0, 128, 5))},
        {"stop_strings": tuple(chr(code) + "a" for code in range(128))},
        {"pieces": True},
        {"reuse_prefix": False},
    ]
)
ENDS = st.sampled_from([frozenset(), frozenset({256}), frozenset(range(0, 260, 5))])
REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=20),  # so that beginnings are shared
        st.integers(1, 20),
        st.integers(0, 3),  # seed
        FIELDS,
        ENDS,
        st.integers(0, 12),  # the turn of its arrival
        st.integers(0, 40),  # the turn of its cancellation, if it still runs then
    ),
    min_size=1,
    max_size=7,
)


@settings(deadline=None, max_examples=300)
@given(
    items=REQUESTS,
    banks=st.integers(1, 3),
    pages=st.integers(12, 40),
    chunk=st.integers(1, 30),
    recall=st.sampled_from([None, None, 2]),
    speculate=st.sampled_from(["off", "off", 3, "auto"]),
    divisible=st.booleans(),
)
def test_every_mix_of_requests_gives_what_each_gives_alone_and_one_step_at_a_time(
    items: list[tuple[Any, ...]],
    banks: int,
    pages: int,
    chunk: int,
    recall: int | None,
    speculate: Speculate,
    divisible: bool,
) -> None:
    core = make_core(
        banks=banks, pages=pages, chunk=chunk, recall=recall, speculate=speculate,
        divisible=divisible,
    )  # fmt: skip
    wanted = [
        item(prompt, count, seed=seed, eos_ids=ends, **fields)
        for prompt, count, seed, fields, ends, *_ in items
    ]
    sequences = [core.sequence(generation) for generation in wanted]
    events: dict[Sequence, list[Event]] = {sequence: [] for sequence in sequences}
    cancelled: set[Sequence] = set()
    turn, busy = 0, True
    while busy or turn <= 12:
        for sequence, (*_, arrival, end) in zip(sequences, items, strict=True):
            if arrival == turn:
                core.submit(sequence)
            if arrival < turn == end and not isinstance(events[sequence][-1:], Finished):
                core.cancel(sequence)
                cancelled.add(sequence)
        batch = core.step()
        busy = batch is not None
        for sequence, event in batch or []:
            events[sequence].append(event)
        turn += 1
    for sequence, generation in zip(sequences, wanted, strict=True):
        alone = seen(run(make_core(False, banks=1, recall=recall), generation)[0])
        if generation.prompt_logprobs >= 0:  # they come in pieces, as the prompt is cut
            alone, found = drawn(alone), drawn(seen(events[sequence]))
        else:
            found = seen(events[sequence])
        assert found == alone[: len(found)] if sequence in cancelled else found == alone
    scheduler = core.scheduler
    assert scheduler.memory.cache.available == scheduler.memory.pool.total
    assert not scheduler.running
    assert not scheduler.waiting


def drawn(events: list[Any]) -> list[object]:
    return [event for event in events if not isinstance(event, tuple) or event[0] != []]


def test_the_mixes_do_run_two_steps_at_once() -> None:
    core = make_core()
    run(core, item([1], 20), item([2, 3], 9), item([1, 5], 14, temperature=0.0))
    assert core.stats.steps == 20
    assert core.stats.steps_ahead == 19
    assert lazy_of(core).most_under_way == 2


def test_one_frame_is_what_was_asked_for() -> None:
    core = make_core(frames=1)
    run(core, item([1], 20))
    assert core.stats.steps_ahead == 0
    assert lazy_of(core).most_under_way == 1
