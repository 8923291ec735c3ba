"""Small floats, streams that exchange, windows that are compressed, an index, attention over rows.

Single ops against their definitions; then whole models over pages, chunks, threads and copies.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_worker.executor.api import ExecutorConfig, Slice
from ds4_worker.executor.reference_ops import KERNELS
from golden.deepseek4.cases import CASES
from helpers.executors import cpu_executor
from helpers.op_program import PLACE, OpProgram, cpu_rows, exact_rows
from helpers.prepared import Prepared

Array = npt.NDArray[Any]
LONG = next(case for case in CASES if case.name == "long")
MIXED = next(case for case in CASES if case.name == "short_ratios")


def draw(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> Array:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


# --- small floats ---


def values_of(exponent_bits: int, mantissa_bits: int) -> Array:
    """Every finite value of a format, without its sign, in order of its code; e4m3 has no infinity
    and one NaN, e2m1 neither."""
    bias, found = (1 << (exponent_bits - 1)) - 1, []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, fraction = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if exponent:
            found.append((1 + fraction / (1 << mantissa_bits)) * 2.0 ** (exponent - bias))
        else:
            found.append(fraction / (1 << mantissa_bits) * 2.0 ** (1 - bias))
    return np.array(found[:-1] if exponent_bits == 4 else found)


TABLES = {0: values_of(4, 3), 1: values_of(2, 1)}


def rounded(x: Array, kind: int) -> Array:
    """A block by looking every value up; of two that are as near, the one with the even code."""
    table, most = TABLES[kind], float(TABLES[kind][-1])
    floor = np.float32(1e-4) if kind == 0 else np.float32(6 * 2.0**-126)
    ratio = np.maximum(np.abs(x).max(), floor) / np.float32(most)
    scale = 2.0 ** math.ceil(math.log2(float(ratio)))
    size = np.minimum(np.abs(x.astype(np.float64)) / scale, most)
    distance = np.abs(size[:, None] - table)
    near = distance == distance.min(1, keepdims=True)
    code = np.where(near.sum(1) > 1, near.argmax(1) + near.argmax(1) % 2, near.argmax(1))
    found: Array = np.copysign(table[code] * scale, x)
    return found


def test_the_tables_are_those_of_the_formats() -> None:
    assert (TABLES[0][-1], TABLES[0][1], len(TABLES[0])) == (448.0, 2.0**-9, 127)
    assert TABLES[1].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@settings(deadline=None)
@given(st.integers(0, 1), st.integers(0, 1 << 30), st.sampled_from([1e-30, 1e-6, 1.0, 700.0, 1e20]))
def test_a_block_is_rounded_to_the_nearest_values_of_its_format(
    kind: int, seed: int, scale: float
) -> None:
    x = draw((1, 64), seed, scale)
    x[0, :4] = (0.0, -0.0, x[0].max(), 2 * x[0].max())
    x[0, 4:12] = np.resize(TABLES[kind][1:9], 8) * 2.0 ** math.floor(math.log2(scale))  # and ties
    attributes = {"format": kind, "block": 32, "dims": 64, "heads": 1}
    result = KERNELS["round_floats"]([x], attributes)
    assert result is not None
    expected = np.concatenate([rounded(x[0, :32], kind), rounded(x[0, 32:], kind)])
    np.testing.assert_array_equal(result[0], expected)


@pytest.mark.parametrize("isa", ["auto", "scalar"])
@pytest.mark.parametrize("kind", [0, 1])
def test_the_executor_rounds_as_the_definition_does(kind: int, isa: str) -> None:
    rows = draw((200, 48), kind) * np.exp2(draw((200, 1), 9, 30)).astype(np.float32)
    rows[0, :] = 0
    program = OpProgram(rows)
    program.op(
        "round_floats", ("x",), (program.scratch("y", 48),), format=kind, block=8, dims=16, heads=2
    )
    prepared, tokens = program.prepared("y", 48), list(range(60))
    for first in (0, 60, 120):
        part = [token + first for token in tokens]
        result = cpu_rows(prepared, part, isa)
        np.testing.assert_array_equal(result, exact_rows(prepared, part))
    np.testing.assert_array_equal(result[:, 16:24], rows[120:180, 16:24])


def test_values_beyond_reason_become_no_number() -> None:
    rows = draw((2, 8))
    rows[1, 3] = np.inf
    program = OpProgram(rows)
    program.op("round_floats", ("x",), (program.scratch("y", 8),), format=0, block=8, dims=8)
    result = cpu_rows(program.prepared("y", 8), [0, 1])
    assert np.isfinite(result[0]).all()
    assert np.isnan(result[1]).all()


@pytest.mark.parametrize("dim", [1, 2, 16, 128])
def test_hadamard_keeps_lengths_and_undoes_itself(dim: int) -> None:
    rows = draw((8, 2 * dim), dim)
    program = OpProgram(rows)
    program.op("hadamard", ("x",), (program.scratch("y", 2 * dim),), heads=2)
    once = program.prepared("y", 2 * dim)
    spread = cpu_rows(once, range(8))
    np.testing.assert_allclose(spread, exact_rows(once, range(8)), atol=1e-5)
    np.testing.assert_allclose((spread**2).sum(1), (rows**2).sum(1), rtol=1e-5)
    program = OpProgram(spread)
    program.op("hadamard", ("x",), (program.scratch("y", 2 * dim),), heads=2)
    twice = cpu_rows(program.prepared("y", 2 * dim), range(8))
    np.testing.assert_allclose(twice, rows, atol=1e-5)


# --- streams that exchange ---


def test_weights_of_streams_balance_what_they_exchange() -> None:
    rows = draw((40, 24), 3, 2.0)
    program = OpProgram(rows)
    scale = program.weight("scale", np.array([0.5, 1.5, 2.0], np.float32))
    base = program.weight("base", draw((24,), 4))
    program.op(
        "hyper_weights", ("x", scale, base), (program.scratch("w", 24),),
        streams=4, eps=1e-6, iterations=20,
    )  # fmt: skip
    prepared = program.prepared("w", 24)
    weights = cpu_rows(prepared, range(40))
    np.testing.assert_allclose(weights, exact_rows(prepared, range(40)), atol=2e-6)
    cross = weights[:, 8:].reshape(-1, 4, 4)
    np.testing.assert_allclose(cross.sum(1), 1, atol=1e-5)  # the last to be divided
    np.testing.assert_allclose(cross.sum(2), 1, atol=0.05)
    assert ((weights[:, :4] > 0) & (weights[:, :4] < 1.001)).all()


def test_what_is_written_to_streams_is_what_is_read_from_them() -> None:
    """Weights that keep every stream and write nothing leave the streams as they are."""
    rows = draw((6, 24), 5)  # four streams of three values, then the weights beside them
    keep = np.concatenate([np.full(4, 0.25), np.zeros(4), np.eye(4).ravel()]).astype(np.float32)
    program = OpProgram(np.concatenate([rows[:, :12], np.tile(keep, (6, 1))], 1))
    for name, first, width in (("s", 0, 12), ("w", 12, 24), ("y", 0, 3)):
        program.op(
            "slice_heads", ("x",), (program.scratch(name, width),),
            heads=1, dim=36, first=first, width=width,
        )  # fmt: skip
    program.op("hyper_write", ("y", "s", "w"), (program.scratch("kept", 12),))
    program.op("hyper_read", ("kept", "w"), (program.scratch("mean", 3),))
    program.op("join_heads", ("kept", "mean"), (program.scratch("all", 15),), heads=1)
    result = cpu_rows(program.prepared("all", 15), range(6))
    np.testing.assert_array_equal(result[:, :12], rows[:, :12])
    means = rows[:, :12].reshape(6, 4, 3).mean(1)
    np.testing.assert_allclose(result[:, 12:], means, atol=1e-6)


# --- windows that are compressed ---


@pytest.mark.parametrize(("ratio", "copies"), [(4, 2), (8, 1), (16, 1), (1, 1), (32, 2)])
def test_a_window_is_the_softmax_of_its_positions(ratio: int, copies: int) -> None:
    dim, n = 72, 150  # several ranges of dims, several pages
    wide = copies * dim
    rows = draw((n, 2 * wide), ratio)
    program = OpProgram(rows, context=256)
    bias = program.weight("bias", draw((ratio, wide), 7))
    state = program.plane("state", dim, vectors=3 * copies)
    for name, first in (("k", 0), ("gate", wide)):
        program.op(
            "slice_heads", ("x",), (program.scratch(name, wide),),
            heads=1, dim=2 * wide, first=first, width=wide,
        )  # fmt: skip
    program.op(
        "compress", ("k", "gate", bias, *PLACE), (state, program.scratch("y", dim)), ratio=ratio
    )
    prepared = program.prepared("y", dim)
    result = cpu_rows(prepared, range(n))
    k, gate = rows[:, :wide].astype(np.float64), rows[:, wide:].astype(np.float64)
    gate = gate + np.resize(draw((ratio, wide), 7), gate.shape)
    expected = np.zeros((n, dim))
    for end in range(ratio, n + 1, ratio):
        own = slice(end - ratio, end)
        scores, values = gate[own, wide - dim :], k[own, wide - dim :]
        if copies == 2 and end > ratio:
            before = slice(end - 2 * ratio, end - ratio)
            scores = np.concatenate([gate[before, :dim], scores])
            values = np.concatenate([k[before, :dim], values])
        weights = np.exp(scores - scores.max(0))
        expected[end - 1] = (weights * values).sum(0) / weights.sum(0)
    np.testing.assert_allclose(result, expected, atol=2e-5)
    np.testing.assert_allclose(exact_rows(prepared, range(n)), expected, atol=2e-5)
    assert (cpu_rows(prepared, range(n), "scalar", 5) == result).all()


# --- an index ---


def indexed(rows: Array, heads: int, dim: int, chosen: int, context: int, ratio: int) -> Prepared:
    """Queries, weights and rows side by side in the table; which rows are chosen, as logits."""
    program = OpProgram(rows, context=context)
    widths, first = {"q": heads * dim, "w": heads, "row": dim}, 0
    for name, width in widths.items():
        program.op(
            "slice_heads", ("x",), (program.scratch(name, width),),
            heads=1, dim=rows.shape[1], first=first, width=width,
        )  # fmt: skip
        first += width
    plane = program.plane("rows", dim, ratio)
    program.op("store_rows", ("row", *PLACE), (plane,), ratio=ratio, tiles=1)
    program.op(
        "index_rows", ("q", "w", plane, *PLACE), (program.scratch("best", chosen),),
        heads=heads, ratio=ratio, scale=0.5,
    )  # fmt: skip
    return program.prepared("best", chosen)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.sampled_from([1, 2, 4]), st.integers(1, 9), st.integers(0, 1 << 20))
def test_an_index_picks_the_best_rows_and_the_first_of_equals(
    heads: int, ratio: int, chosen: int, seed: int
) -> None:
    dim, n = 8, 90
    rng = np.random.default_rng(seed)  # small integers: sums are exact, and many are equal
    rows = rng.integers(-2, 3, (n, heads * (dim + 1) + dim)).astype(np.float32)
    prepared = indexed(rows, heads, dim, chosen, 128, ratio)
    result = cpu_rows(prepared, range(n))
    for position in range(n):
        q = rows[position, : heads * dim].reshape(heads, dim)
        w = rows[position, heads * dim : heads * (dim + 1)]
        seen = rows[ratio - 1 : position + 1 : ratio, -dim:]
        scores = w @ np.maximum(q @ seen.T, 0)
        best = sorted(np.argsort(-scores, kind="stable")[:chosen].tolist())
        assert result[position].tolist() == [*best, *[-1] * (chosen - len(best))], position
    assert (exact_rows(prepared, range(n)) == result).all()


def test_an_index_picks_the_same_rows_from_all_rows_at_once_and_in_parts() -> None:
    heads, dim, chosen, n = 5, 16, 12, 2600  # more rows than a part has
    rows = draw((n, heads * (dim + 1) + dim), 11)
    prepared = indexed(rows, heads, dim, chosen, n + 64, 1)
    config = ExecutorConfig(
        threads=2, banks=1, context_tokens=n + 64, batch_tokens=512, batch_outputs=1
    )
    executor = cpu_executor(prepared, config)
    for start in range(0, n - 3, 512):
        end = min(start + 512, n - 3)
        executor.step([Slice(0, start, range(start, end))])
    alone = [executor.logits([Slice(0, p, [p])])[0][0] for p in range(n - 3, n)]
    executor.close()
    for position, picked in zip(range(n - 3, n), alone, strict=True):
        q = rows[position, : heads * dim].reshape(heads, dim)
        w = rows[position, heads * dim : heads * (dim + 1)]
        halves = rows[: position + 1, -dim:].astype(np.float16).astype(np.float64)
        scores = w @ np.maximum(q @ halves.T, 0)
        assert picked[:chosen] == sorted(np.argsort(-scores, kind="stable")[:chosen].tolist())


def test_scores_that_are_no_numbers_are_never_picked_before_others() -> None:
    heads, dim = 1, 8
    rows = draw((30, heads * (dim + 1) + dim), 2)
    rows[3, -dim:] = np.nan
    rows[:, dim] = np.abs(rows[:, dim])  # its weight
    result = cpu_rows(indexed(rows, heads, dim, 4, 64, 1), range(30))
    assert not (result[20:] == 3).any()


# --- attention over rows ---


@pytest.mark.parametrize(
    ("window", "ratio", "chosen"), [(1, 0, 0), (40, 0, 0), (130, 4, 0), (9, 4, 5)]
)
def test_attention_over_rows_is_that_of_the_definition(
    window: int, ratio: int, chosen: int
) -> None:
    heads, dim, n = 9, 16, 300
    rows = draw((n, (heads + 1) * dim + heads), window)
    program = OpProgram(rows, context=320)
    parts = (("q", 0, heads * dim), ("row", heads * dim, dim), ("w", (heads + 1) * dim, heads))
    for name, first, width in parts:
        program.op(
            "slice_heads", ("x",), (program.scratch(name, width),),
            heads=1, dim=rows.shape[1], first=first, width=width,
        )  # fmt: skip
    recent, compressed, picked = program.plane("recent", dim), "", ""
    program.op("store_rows", ("row", *PLACE), (recent,))
    if ratio:
        compressed = program.plane("compressed", dim, ratio)
        program.op("store_rows", ("row", *PLACE), (compressed,), ratio=ratio)
    if chosen:
        keys, picked = program.plane("keys", dim, ratio), program.scratch("picked", chosen)
        program.op("store_rows", ("row", *PLACE), (keys,), ratio=ratio, tiles=1)
        program.op(
            "index_rows", ("q", "w", keys, *PLACE), (picked,), heads=heads, ratio=ratio, scale=1.0
        )
    sinks = program.weight("sinks", draw((heads,), 3))
    program.op(
        "attend_rows", ("q", recent, *PLACE, compressed, picked, sinks),
        (program.scratch("y", heads * dim),),
        heads=heads, scale=0.3, window=window, ratio=ratio or 1,
    )  # fmt: skip
    prepared = program.prepared("y", heads * dim)
    result = cpu_rows(prepared, range(n))
    np.testing.assert_allclose(result, exact_rows(prepared, range(n)), atol=2e-5)
    for isa, threads in (("scalar", 1), ("auto", 7)):
        assert (cpu_rows(prepared, range(n), isa, threads) == result).all()
