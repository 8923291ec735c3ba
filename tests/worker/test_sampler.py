"""The native sampler: its rules, its determinism, and what it refuses."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.native import lib
from ds4_worker.executor.api import Adjustments, Sampling
from helpers.sampling import (
    BAD_ID,
    NOT_FINITE,
    NOTHING_ALLOWED,
    OK,
    Drawn,
    adjusted,
    draw,
    kept_tokens,
    random_bits,
)

VOCABULARY = 1000


def some_logits(seed: int, n: int = VOCABULARY, ties: bool = False) -> npt.NDArray[np.float32]:
    x = np.random.default_rng(seed).normal(0, 3, n).astype(np.float32)
    return (np.round(x * 2) / 2).astype(np.float32) if ties else x


def native_random(seed: int, index: int) -> int:
    function = lib.load().ds4_random
    function.argtypes, function.restype = [ctypes.c_uint64, ctypes.c_uint64], ctypes.c_uint64
    return int(function(seed, index))


def test_random_bits_match_the_published_vector() -> None:
    assert native_random(0, 0) == 0xE169C58D6627E8D5  # Random123 kat_vectors, philox4x32 10


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_random_bits_match_the_definition(seed: int, index: int) -> None:
    assert native_random(seed, index) == random_bits(seed, index)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-9, math.nan])
def test_no_temperature_takes_the_best_and_the_lowest_id_of_equals(temperature: float) -> None:
    x = some_logits(1)
    x[[700, 300, 900]] = 50.0
    assert draw(x, Sampling(temperature=temperature)).token == 300


@pytest.mark.parametrize("n", [1, 7, 8, 63, 64, 65, 1001])
def test_the_best_is_found_at_every_place(n: int) -> None:
    for place in range(n):
        x = np.zeros(n, np.float32)
        x[place] = 1.0
        assert draw(x, Sampling(temperature=0.0)).token == place


parameters = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5, 10.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 999, 1000, 5000]),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**40),
)


@settings(deadline=None)
@given(parameters, st.integers(0, 1000), st.booleans())
def test_only_tokens_that_the_rules_keep_are_drawn(
    how: Sampling, logits_seed: int, ties: bool
) -> None:
    x = some_logits(logits_seed, ties=ties)
    kept = kept_tokens(x, how)
    token = draw(x, how).token
    if token not in kept:  # rounding at the edge of top_p may keep one token more
        more = Sampling(how.temperature, how.top_k, min(1.0, how.top_p + 1e-6), how.min_p)
        assert token in kept_tokens(x, more)


@settings(deadline=None)
@given(parameters, st.integers(0, 1000), st.booleans())
def test_the_draw_is_the_inverse_of_the_cumulative_distribution(
    how: Sampling, logits_seed: int, ties: bool
) -> None:
    x = some_logits(logits_seed, ties=ties)
    kept = sorted(kept_tokens(x, how))
    weights = np.exp((x[kept].astype(np.float64) - x.max()) / how.temperature)
    edges = np.concatenate([[0], np.cumsum(weights) / weights.sum()])
    drawn = draw(x, how).token
    place = random_bits(how.seed, how.index) / 2**64
    if drawn in kept:
        i = kept.index(drawn)
        slack = 1e-5 if how.top_p == 1.0 else 0.02  # one token more or less at the edge of top_p
        assert edges[i] - slack <= place <= edges[i + 1] + slack


@settings(deadline=None)
@given(parameters, st.integers(0, 1000), st.booleans(), st.integers(1, 300))
def test_both_instruction_sets_draw_the_same(
    how: Sampling, logits_seed: int, ties: bool, n: int
) -> None:
    x = some_logits(logits_seed, n, ties)
    how.logprobs = 5
    assert draw(x, how, isa=0) == draw(x, how, isa=1)


def test_frequencies_follow_the_probabilities() -> None:
    x = np.array([0.0, 1.0, 2.0, -1.0, -math.inf], np.float32)
    count = 20_000
    tokens = [draw(x, Sampling(seed=9, index=i)).token for i in range(count)]
    expected = np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum()
    got = np.bincount(tokens, minlength=5) / count
    assert got[4] == 0
    np.testing.assert_allclose(got, expected, atol=4 * math.sqrt(0.25 / count))


def test_top_k_keeps_lower_ids_of_equals() -> None:
    x = np.zeros(100, np.float32)
    drawn = {draw(x, Sampling(top_k=3, seed=s)).token for s in range(200)}
    assert drawn == {0, 1, 2}


def test_top_p_after_top_k_splits_equals() -> None:
    x = np.zeros(100, np.float32)
    drawn = {draw(x, Sampling(top_k=8, top_p=0.5, seed=s)).token for s in range(200)}
    assert drawn == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_best() -> None:
    x = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    drawn = {draw(x, Sampling(min_p=0.25, seed=s)).token for s in range(200)}
    assert drawn == {0, 1, 2}


def test_temperature_comes_before_top_p() -> None:
    x = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    cold = {draw(x, Sampling(temperature=0.25, top_p=0.9, seed=s)).token for s in range(200)}
    hot = {draw(x, Sampling(temperature=5.0, top_p=0.9, seed=s)).token for s in range(200)}
    assert cold == {0}
    assert hot == {0, 1, 2}


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": math.inf},
        {"temperature": 1e38},
        {"temperature": 1.1e-5},
        {"top_p": math.nan},
        {"top_p": -1.0},
        {"min_p": math.nan},
        {"min_p": 7.0},
        {"top_k": -3},
    ],
    ids=str,
)
def test_extreme_parameters_still_draw_a_token(extreme: dict[str, Any]) -> None:
    x = some_logits(3)
    x[5] = -math.inf
    for seed in range(20):
        drawn = draw(x, Sampling(seed=seed, **extreme))
        assert drawn.status == OK
        assert 0 <= drawn.token < VOCABULARY
        assert drawn.token != 5


@settings(deadline=None)
@given(st.sets(st.integers(0, VOCABULARY - 1), min_size=1), parameters)
def test_a_mask_allows_only_its_tokens(allowed: set[int], how: Sampling) -> None:
    mask = np.zeros(VOCABULARY, np.float32)
    mask[list(allowed)] = 1
    assert draw(some_logits(4), how, mask=mask).token in allowed


def test_an_empty_mask_is_an_error_of_this_draw() -> None:
    drawn = draw(some_logits(5), Sampling(), mask=np.zeros(VOCABULARY, np.float32))
    assert (drawn.token, drawn.status) == (-1, NOTHING_ALLOWED)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 8, 999])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("isa", [0, 1])
def test_logits_that_are_not_finite_are_an_error(
    value: float, place: int, temperature: float, isa: int
) -> None:
    x = some_logits(6)
    x[place] = value
    drawn = draw(x, Sampling(temperature=temperature, logprobs=3), isa)
    assert drawn == Drawn(-1, NOT_FINITE, 0.0, ())


def test_nothing_but_minus_infinity_is_an_error() -> None:
    assert draw(np.full(9, -np.inf, np.float32), Sampling()).status == NOT_FINITE


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("wanted", [0, 1, 20, 500])
def test_logprobs_are_those_of_temperature_one(ties: bool, wanted: int) -> None:
    x = some_logits(7, ties=ties)
    exact = x.astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    best = sorted(range(VOCABULARY), key=lambda t: (-x[t], t))[: min(wanted, 20)]
    drawn = draw(x, Sampling(temperature=0.5, top_k=10, seed=1, logprobs=wanted))
    assert drawn.logprob == pytest.approx(exact[drawn.token], abs=2e-6)
    assert [token for token, _ in drawn.top] == best
    assert [value for _, value in drawn.top] == pytest.approx(exact[best], abs=2e-6)


def test_logprobs_ignore_the_mask() -> None:
    x = some_logits(8)
    mask = np.ones(VOCABULARY, np.float32)
    mask[int(x.argmax())] = 0
    drawn = draw(x, Sampling(temperature=0.0, logprobs=1), mask=mask)
    assert drawn.token != x.argmax()
    assert drawn.top[0][0] == x.argmax()


def test_more_alternatives_than_tokens() -> None:
    assert len(draw(np.zeros(3, np.float32), Sampling(logprobs=20)).top) == 3


# --- biases and penalties ---------------------------------------------------------------------

biases = st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=9)
occurrences = st.dictionaries(st.integers(0, VOCABULARY - 1), st.integers(0, 50), max_size=40)


@settings(deadline=None)
@given(
    biases,
    occurrences,
    st.floats(0.5, 2, width=32),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    parameters,
    st.sampled_from([0, 1]),
)
def test_biases_and_penalties_are_those_of_the_definition(
    bias: dict[int, float],
    seen: dict[int, int],
    repetition: float,
    frequency: float,
    presence: float,
    how: Sampling,
    isa: int,
) -> None:
    """The draw from logits that the sampler changes is the draw from logits changed beforehand."""
    x = some_logits(8)
    how.adjust = Adjustments(repetition=repetition, frequency=frequency, presence=presence)
    expected = draw(adjusted(x, how.adjust, [*bias.items()], [*seen.items()]), how, isa)
    got = draw(x, how, isa, biases=[*bias.items()], seen=[*seen.items()])
    assert (got.token, got.status) == (expected.token, expected.status)


def test_penalties_count_the_output_and_repetition_the_prompt_too() -> None:
    x = np.zeros(8, np.float32)
    x[:4] = (4.0, 4.0, 4.0, -4.0)
    how = Adjustments(repetition=2.0, frequency=0.5, presence=0.25)
    # token 0 in the prompt only, 1 twice in the output, 3 once
    changed = adjusted(x, how, [], [(0, 0), (1, 2), (3, 1)])
    assert changed[:4].tolist() == [2.0, 2.0 - 1.0 - 0.25, 4.0, -8.0 - 0.5 - 0.25]


def test_a_bias_of_minus_infinity_bans_at_any_temperature() -> None:
    x = np.zeros(4, np.float32)
    x[2] = 30.0
    banned = [(2, -math.inf), (0, -math.inf)]
    for index in range(50):
        how = Sampling(temperature=100.0, index=index)
        assert draw(x, how, biases=banned).token in (1, 3)
    assert draw(x, Sampling(), biases=[(i, -math.inf) for i in range(4)]).status == NOTHING_ALLOWED


def test_a_large_bias_forces() -> None:
    x = some_logits(9)
    for index in range(50):
        assert draw(x, Sampling(index=index), biases=[(17, 100.0)]).token == 17


def test_the_mask_rules_whatever_the_bias() -> None:
    mask = np.zeros(VOCABULARY, np.float32)
    mask[[5, 900]] = 1
    drawn = draw(some_logits(9), Sampling(), mask=mask, biases=[(17, 100.0), (5, -math.inf)])
    assert drawn.token == 900


def test_a_forced_token_comes_out_with_its_own_logprob() -> None:
    x = some_logits(10)
    mask = np.zeros(VOCABULARY, np.float32)
    free = draw(x, Sampling(temperature=0.0, logprobs=5))
    forced = draw(x, Sampling(forced=123, logprobs=5), mask=mask, biases=[(123, -math.inf)])
    assert (forced.token, forced.status, forced.top) == (123, OK, free.top)
    total = np.log(np.exp(x.astype(np.float64)).sum())
    assert forced.logprob == pytest.approx(float(x[123]) - total, abs=1e-5)


def test_logprobs_ignore_biases_and_penalties() -> None:
    x = some_logits(11)
    free = draw(x, Sampling(temperature=0.0, logprobs=20))
    change = Adjustments(repetition=2.0, presence=1.0)
    how = Sampling(temperature=0.0, logprobs=20, adjust=change)
    drawn = draw(x, how, biases=[(3, 50.0)], seen=[(free.token, 1)])
    assert drawn.token == 3
    assert drawn.top == free.top


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**31 - 1])
def test_ids_outside_the_vocabulary_touch_nothing(bad: int) -> None:
    x = some_logits(12)
    assert draw(x, Sampling(), biases=[(bad, 1.0)]).status == BAD_ID
    assert draw(x, Sampling(), seen=[(bad, 1)]).status == BAD_ID
    if bad > 0:
        assert draw(x, Sampling(forced=bad)).status == BAD_ID
