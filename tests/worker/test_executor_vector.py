"""The executor's vector operations: all sets agree bit for bit, and each is accurate."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.quants.native import Isa, library
from helpers.vector_table import Table, table

Array = npt.NDArray[Any]
SETS = {isa.name: table(isa) for isa in Isa if library().ds4_isa_runs(isa)}
SCALAR = SETS["SCALAR"]
EACH = pytest.mark.parametrize("ops", SETS.values(), ids=SETS)
LENGTHS = st.integers(1, 200)


def values(n: int, seed: int, scale: float = 3.0) -> Array:
    return np.random.default_rng(seed).normal(0, scale, n).astype(np.float32)


def at(array: Array) -> int:
    return int(array.ctypes.data)


def bits(array: Array | float) -> bytes:
    return np.asarray(array, np.float32).tobytes()


@EACH
def test_exponential_is_accurate(ops: Table) -> None:
    x = np.concatenate([np.linspace(-87, 88, 400_001), [0.0, -0.0]]).astype(np.float32)
    y = np.empty_like(x)
    ops.exp_scaled(at(y), at(x), 0.0, 1.0, len(x))
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) / exact).max() < 2 * 2.0**-23
    assert (y[-2:] == 1.0).all()


@EACH
def test_exponential_of_extremes(ops: Table) -> None:
    x = np.array([-np.inf, -1e30, -87.1, 1e30, np.inf, np.nan] * 3, np.float32)
    y = np.empty_like(x)
    ops.exp_scaled(at(y), at(x), 0.0, 1.0, len(x))
    assert (y[:3] == 0).all()
    assert y[3] == y[4] == pytest.approx(np.exp(88.0), rel=1e-6)
    assert np.isnan(y[5])


@EACH
@settings(deadline=None)
@given(n=LENGTHS, seed=st.integers(0, 100))
def test_all_sets_agree_on_rows(ops: Table, n: int, seed: int) -> None:
    x, w = values(n, seed), values(n, seed + 1000)
    assert bits(SCALAR.sum_squares(at(x), n)) == bits(ops.sum_squares(at(x), n))
    assert SCALAR.max(at(x), n) == ops.max(at(x), n) == x.max()
    for name, arguments in (
        ("scale_by", (at(x), at(w), 0.37, n)),
        ("add", (at(x), at(w), n)),
        ("silu_mul", (at(x), at(w), n)),
        ("gated_mul", (at(x), at(w), 0, 2.0, 1.0, n)),
        ("gated_mul", (at(x), at(w), 1, 0.0, 1.0, n)),
        ("gated_mul", (at(x), at(w), 2, 2.5, 1.7, n)),
        ("soft_cap", (at(x), 5.0, n)),
        ("add_scaled", (at(x), 0.3, n)),
        ("exp_scaled", (at(x), 2.5, 0.7, n)),
        ("join", (at(x), 0.3, 0.6, n)),
    ):
        one, two = values(n + 20, seed + 1), values(n + 20, seed + 1)
        getattr(SCALAR, name)(at(one), *arguments)
        getattr(ops, name)(at(two), *arguments)
        assert bits(one) == bits(two), name  # and nothing behind the row is touched


def running(ops: Table, k: Array, gate: Array, bias: Array) -> Array:
    """Maximum, sum and weighted sum of each column after all rows."""
    n = k.shape[1]
    state = np.zeros((3, n), np.float32)
    state[0] = -np.inf
    for row, score in zip(k, gate, strict=True):
        pointers = (state[0], state[1], state[2], row, score, bias)
        ops.running_softmax(*map(at, pointers), n)
    return state


@EACH
@settings(deadline=None)
@given(n=LENGTHS, rows=st.integers(1, 9), seed=st.integers(0, 100))
def test_a_running_softmax_is_a_softmax_in_each_set(
    ops: Table, n: int, rows: int, seed: int
) -> None:
    k, gate = values(rows * n, seed).reshape(rows, n), values(rows * n, seed + 1).reshape(rows, n)
    bias = values(n, seed + 2)
    state = running(SCALAR, k, gate, bias)
    assert bits(state) == bits(running(ops, k, gate, bias))
    scores = (gate + bias).astype(np.float64)
    weights = np.exp(scores - scores.max(0))
    np.testing.assert_allclose(
        state[2] / state[1], (weights * k).sum(0) / weights.sum(0), atol=1e-5
    )


@EACH
def test_rows_are_accurate(ops: Table) -> None:
    x, w = values(300, 5), values(300, 6)
    wide = x.astype(np.float64)
    assert ops.sum_squares(at(x), 300) == pytest.approx((wide**2).sum(), rel=1e-6)
    y = np.empty_like(x)
    ops.silu_mul(at(y), at(x), at(w), 300)
    np.testing.assert_allclose(y, wide / (1 + np.exp(-wide)) * w, rtol=1e-6)
    ops.soft_cap(at(y), at(x), 5.0, 300)
    np.testing.assert_allclose(y, 5 * np.tanh(wide / 5), atol=2e-6)


@EACH
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_gated_units_are_accurate(ops: Table, mode: int, limit: float) -> None:
    x, w = values(300, 5), values(300, 6)
    gate, up, y = x.astype(np.float64), w.astype(np.float64), np.empty_like(x)
    ops.gated_mul(at(y), at(x), at(w), mode, limit, 1.7, 300)
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    inner = (gate, np.sqrt(2 / np.pi) * 2 * (gate + 0.044715 * gate**3), 1.7 * gate)[mode]
    expected = gate / (1 + np.exp(-inner)) * (up + 1 if mode == 2 else up)
    np.testing.assert_allclose(y, expected, rtol=3e-6, atol=1e-6)


@EACH
def test_what_is_no_number_stays_none(ops: Table) -> None:
    x, w, y = np.full(9, np.nan, np.float32), np.ones(9, np.float32), np.zeros(9, np.float32)
    for mode in range(3):
        ops.gated_mul(at(y), at(x), at(w), mode, 7.0, 1.0, 9)
        assert np.isnan(y).all()
        ops.gated_mul(at(y), at(w), at(x), mode, 7.0, 1.0, 9)
        assert np.isnan(y).all()
    ops.soft_cap(at(y), at(x), 5.0, 9)
    assert np.isnan(y).all()


@EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_seen_at_every_place(ops: Table, bad: float) -> None:
    for n in (1, 8, 21):
        for place in range(n):
            x = values(n, n)
            x[place] = bad
            finite = ctypes.c_int(1)
            ops.max_finite(at(x), n, ctypes.addressof(finite))
            assert not finite.value
    x = np.array([-np.inf, 1.0], np.float32)
    finite = ctypes.c_int(1)
    assert ops.max_finite(at(x), 2, ctypes.addressof(finite)) == 1.0
    assert finite.value


def softmaxed(ops: Table, x: Array, n: int) -> tuple[Array, float]:
    y = x.copy()
    return y, ops.softmax(at(y), float(x[:n].max()), n)


@EACH
@settings(deadline=None)
@given(n=LENGTHS, seed=st.integers(0, 100))
def test_softmax_agrees_and_leaves_the_rest_alone(ops: Table, n: int, seed: int) -> None:
    x = values(n + 9, seed)
    (one, sum_one), (two, sum_two) = softmaxed(SCALAR, x, n), softmaxed(ops, x, n)
    assert bits(one) == bits(two)
    assert bits(sum_one) == bits(sum_two)
    assert bits(one[n:]) == bits(x[n:])
    assert sum_one == pytest.approx(np.exp(x[:n].astype(np.float64) - x[:n].max()).sum(), rel=1e-5)
