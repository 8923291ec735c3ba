"""Drafts: where they come from, how many are offered, and by what they are drawn."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence as Several
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_worker.engine.api import ReasoningSpan
from ds4_worker.engine.drafts import Drafter, Drafts
from ds4_worker.engine.draws import Draws
from ds4_worker.engine.history import MOST_MATCH, History
from ds4_worker.engine.speculation import Acceptance, StepCosts, allocate, extensions
from ds4_worker.executor.api import Sampling
from helpers.speculating import item
from helpers.stride import Stride

# --- where the end occurred before -----------------------------------------------------------


def longest_match(tokens: Several[int]) -> tuple[int, int]:
    """Length of the longest earlier occurrence of the end, and where the latest of them ends."""
    best, place = 0, 0
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, MOST_MATCH) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= max(best, 2):
            best, place = length, end
    return best, place


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.integers(0, 1 << 30), max_size=3),
    st.integers(0, 9),
    st.integers(1, 7),
)
def test_a_draft_is_what_followed_the_latest_of_the_longest_matches(
    tokens: list[int], more: list[int], wanted: int, piece: int
) -> None:
    tokens = [*tokens, *more, *tokens[:4]]
    history = History(64, 9)
    for start in range(0, len(tokens), piece):
        history.propose(tokens[start : start + piece], 0)
    draft, matched = history.propose([], wanted)
    best, place = longest_match(tokens)
    if not best or not wanted:
        assert draft == []
        return
    assert matched == best
    whole = list(tokens)
    for _ in range(wanted):
        whole.append(whole[place])
        place += 1
    assert draft == whole[len(tokens) :]


def test_a_draft_that_reaches_the_end_goes_on_with_its_own_beginning() -> None:
    assert History(16, 8).propose([9, 1, 2, 3, 1, 2, 3], 8) == ([1, 2, 3, 1, 2, 3, 1, 2], 3)


def test_tokens_beyond_the_capacity_are_dropped() -> None:
    history = History(5, 4)
    assert history.propose([1, 2, 3, 1, 2, 7, 7, 7], 2) == ([3, 1], 2)
    assert history.propose([4] * 100, 2) == ([3, 1], 2)


def test_a_repetitive_text_is_searched_in_bounded_steps_and_copied_right() -> None:
    line = [5, 5, 5, 7]
    history = History(1 << 16, 4)
    text = list(itertools.chain.from_iterable([*line, i] for i in range(100, 5000)))
    assert history.propose([*text, *line], 1)[1] >= 4
    assert history.propose([4321], 4)[0] == [5, 5, 5, 7]


# --- how many are offered ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confidences", "ceilings", "packed", "rows"),
    [
        ([[0.9] * 3, [0.5, 0.99, 0.99]], [4, 4], 5, [4, 1]),
        ([[0.5] * 2] * 2, [3, 3], 4, [2, 2]),
        ([[0.5] * 2] * 2, [3, 3], 3, [2, 1]),
        ([[0.5] * 2] * 2, [3, 3], 99, [3, 3]),
        ([[0.9], []], [1, 5], 9, [1, 1]),
    ],
)
def test_r64_the_likeliest_drafts_of_all_lanes_get_the_rows(
    confidences: list[list[float]], ceilings: list[int], packed: int, rows: list[int]
) -> None:
    assert allocate(confidences, ceilings, packed) == rows


lanes = st.lists(
    st.tuples(st.lists(st.sampled_from([0.2, 0.5, 0.8, 1.0]), max_size=3), st.integers(1, 4)),
    min_size=1,
    max_size=3,
)


def survivals(confidences: Several[float], rows: int) -> float:
    """Expected tokens of a lane of `rows` rows beyond its first."""
    return sum(math.prod(confidences[:n]) for n in range(1, rows))


@given(lanes, st.integers(0, 12))
def test_r64_no_other_allocation_promises_more_tokens(
    items: list[tuple[list[float], int]], packed: int
) -> None:
    confidences, ceilings = [c for c, _ in items], [c for _, c in items]
    rows = allocate(confidences, ceilings, packed)
    most = [min(ceiling, len(c) + 1) for c, ceiling in items]
    assert all(1 <= got <= limit for got, limit in zip(rows, most, strict=True))
    assert sum(rows) == min(max(packed, len(items)), sum(most))
    got = sum(map(survivals, confidences, rows))
    for other in itertools.product(*(range(1, limit + 1) for limit in most)):
        if sum(other) <= sum(rows):
            assert sum(map(survivals, confidences, other)) <= got + 1e-9
    found = [survival for _, survival in extensions(confidences, ceilings)]
    assert found == sorted(found, reverse=True)


def learned(cost: float, *, level: float = 0.01, most: int = 16) -> StepCosts:
    """After steps of which each row beyond the first took `cost` of the first one's time."""
    costs = StepCosts(64)
    for _ in range(400):
        for rows in range(1, most + 1):
            costs.add(rows, level * (1 + cost * (rows - 1)), plain=rows == 1)
    return costs


@pytest.mark.parametrize("level", [0.0005, 0.01, 3.0])
def test_drafts_that_cost_as_much_as_steps_are_offered_to_nobody(level: float) -> None:
    assert learned(1.0, level=level).best([[0.9] * 15], [16], 64) == 1


@pytest.mark.parametrize("level", [0.0005, 0.01, 3.0])
def test_cheap_drafts_are_offered_as_far_as_they_are_likely(level: float) -> None:
    costs = learned(0.05, level=level)
    assert costs.best([[0.98] * 15], [16], 64) == 16
    assert costs.best([[0.98] * 15], [16], 6) == 6
    assert 1 < costs.best([[0.6] * 15], [16], 64) < 6
    assert costs.best([[0.02] * 15], [16], 64) == 1
    every = Acceptance(None, memory=64, weight=4.0)
    assert len(every.confidences(2, 15, least=0.1)) == 1, "what follows survives too seldom"


def test_a_cost_that_has_changed_is_found_out_in_both_directions() -> None:
    costs = learned(1.0)
    for _ in range(5000):  # nothing is offered, so only plain steps are measured
        costs.add(1, 0.01, plain=True)
        costs.declined()
    assert costs.best([[0.9] * 15], [16], 64) > 1, "it is tried again"
    chosen = []
    for _ in range(400):
        chosen.append(costs.best([[0.9] * 15], [16], 64))
        costs.add(chosen[-1], 0.01 * chosen[-1], plain=chosen[-1] == 1)
    assert chosen[-50:] == [1] * 50


def test_the_depth_of_the_context_does_not_look_like_the_price_of_a_row() -> None:
    costs = learned(0.1)
    for step in range(2000):  # every step takes longer than the one before
        rows = 1 + 7 * (step % 4 > 0)
        costs.add(rows, (0.01 + step * 1e-5) * (1 + 0.1 * (rows - 1)), plain=rows == 1)
    assert costs.relative(8) / costs.relative(1) == pytest.approx(1.7, rel=0.15)


def test_acceptance_is_known_by_the_length_of_the_match_and_forgets() -> None:
    every = Acceptance(None, memory=64, weight=4.0)
    mine = Acceptance(every, memory=32, weight=4.0)
    before = list(mine.confidences(2, 20))
    assert before == sorted(before), "longer matches are better from the beginning"
    for _ in range(200):
        mine.add(3, hit=True)
        mine.add(20, hit=False)
    assert mine.confidences(3, 1)[0] > 0.9
    assert mine.confidences(20, 1)[0] < 0.1
    assert Acceptance(every, memory=32, weight=4.0).confidences(20, 1)[0] < 0.2
    for _ in range(100):
        mine.add(20, hit=True)
    assert mine.confidences(20, 1)[0] > 0.8


def test_r65_what_is_not_offered_is_learned_from_all_the_same() -> None:
    every = Acceptance(None, memory=64, weight=4.0)
    drafter = Drafter([1, 2, 3, 4, 1, 2], 90, 4, every)
    drafter.follow([])
    assert drafter.draft[:2] == [3, 4]
    first = drafter.confidences(1)[0]
    for token in (3, 4, 1, 2, 3, 4, 1, 2):
        drafter.follow([token])
    drafter.follow([9])
    assert every.rate(1) > 0.3
    assert drafter.draft == []
    assert first == pytest.approx(0.2)


def test_nothing_is_shared_out_where_there_is_no_draft() -> None:
    drafts = Drafts(4, 64)
    drafter = drafts.drafter(item([1, 2]))
    drafter.follow([])
    assert drafts.share([(drafter, 0)], 64) == [0]


def test_a_draft_ends_before_the_end_of_the_sequence_and_what_the_grammar_forbids() -> None:
    assert Draws(item([1], eos_ids=frozenset({7}))).possible([5, 6, 7, 8]) == 2
    bound = Draws(item([1], grammar=Stride(3)))
    assert bound.possible([5, 6, 100, 101]) == 2
    bound.next()
    assert len(bound.ahead([5, 6])) == 2
    assert len(bound.ahead([5, 6, 7])) == 2, "the third token is the grammar's last"
    bound.accept(9)
    assert bound.possible([5, 6]) == 0


def told(how: Sampling) -> list[object]:
    """All that the sampler learns of one draw: contents, not addresses."""
    mask = ctypes.string_at(how.mask, 64) if how.mask else b""
    found: list[object] = [how.index, how.seed, how.temperature, how.forced, mask]
    if how.adjust is not None:
        adjust = how.adjust
        found += [
            ctypes.string_at(adjust.biases, 8 * adjust.n_biases) if adjust.n_biases else b"",
            ctypes.string_at(adjust.seen, 8 * adjust.n_seen) if adjust.n_seen else b"",
            (adjust.repetition, adjust.frequency, adjust.presence),
        ]
    return found


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 1.5]),
            "presence_penalty": st.sampled_from([0.0, 0.5]),
            "logit_bias": st.sampled_from([(), ((3, 2.0), (4, -100.0))]),
            "temperature": st.sampled_from([0.0, 1.0]),
            "eos_ids": st.just(frozenset({250})),
            "reasoning": st.sampled_from(
                [
                    None,
                    ReasoningSpan(close=(4, 5), opened=True, budget=3, ignore_eos=True),
                    ReasoningSpan(close=(2,), open=(1,), ignore_eos=True),
                ]
            ),
            "grammar": st.sampled_from([None, Stride(modulus=6, reach=3), Stride(5, modulus=6)]),
        }
    ),
)
def test_what_a_draft_is_drawn_by_is_what_it_would_be_drawn_by_without_drafts(
    prompt: list[int], output: list[int], draft: list[int], fields: dict[str, Any]
) -> None:
    """Whatever was looked at ahead of time, and of that nothing stays."""
    wanted = item(prompt, 40, **fields)
    draws, ahead = Draws(wanted), Draws(wanted)
    for token in output:
        if not draws.possible([token]):
            return
        told(draws.next())
        assert draws.accept(token) == ahead.accept(token)
    draft = draft[: ahead.possible(draft)]
    assert told(draws.next()) == told(ahead.next())
    found = [told(how) for how in ahead.ahead(draft)]
    again = told(ahead.next())
    assert again == told(draws.next())
    for place, token in enumerate(draft):
        if draws.accept(token):
            assert len(found) == place, "after the grammar's last token nothing is drawn"
            return
        assert found[place] == told(draws.next())
