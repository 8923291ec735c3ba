"""CUDA kernels of compressed rows in pages, run on the CPU: the CPU's own bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_worker.cuda.kernels import KERNELS, Unit
from ds4_worker.cuda.parameters import (
    AttendRows,
    Compress,
    Index,
    Plane,
    StoreRows,
)
from helpers.cuda_kernels import F32, Memory, address, launch, module_of
from helpers.kv_table import kv_table
from helpers.quant_blocks import bits
from helpers.vector_table import exp, table

SCALAR, HALF = table(0), kv_table(0)
PAGE = 16


class Pages:
    """A plane in pages of a strange order."""

    def __init__(self, page_bytes: int, dim: int, ratio: int, banks: int = 2, n: int = 40) -> None:
        self.memory, rng = Memory(), np.random.default_rng(5)
        order = rng.permutation(banks * n).astype(np.int32).reshape(banks, n)
        self.table = self.memory.array(order.shape, np.int32, order)
        self.data = self.memory.array((banks * n, page_bytes + 64), np.uint8)
        self.data[:] = 0xFF
        self.dim, self.ratio = dim, ratio

    def plane(self) -> Plane:
        return Plane(
            pages=address(self.data), page_stride=self.data.strides[0],
            page_table=address(self.table), pages_per_bank=self.table.shape[1], page_tokens=PAGE,
            dim=self.dim, ratio=self.ratio,
        )  # fmt: skip

    def put(self, values: Any, dtype: Any = np.int32) -> npt.NDArray[Any]:
        held = np.asarray(values, dtype)
        return self.memory.array(held.shape, dtype, held)

    def page(self, bank: int, index: int) -> npt.NDArray[np.uint8]:
        made: npt.NDArray[np.uint8] = self.data[self.table[bank, index]]
        return made

    def row(self, bank: int, row: int) -> npt.NDArray[np.uint16]:
        """Stored one after the other."""
        records = PAGE // self.ratio
        held = self.page(bank, row // records)[: 2 * records * self.dim].view(np.uint16)
        made: npt.NDArray[np.uint16] = held.reshape(records, self.dim)[row % records]
        return made


@pytest.mark.parametrize("copies", [1, 2])
def test_windows_are_compressed_alike_however_they_are_cut(copies: int) -> None:
    rng, dim, window, n = np.random.default_rng(6), 150, 4, 57
    k, gate = (rng.normal(0, 2, (2, n, copies * dim)).astype(np.float32) for _ in range(2))
    bias = rng.standard_normal((window, copies * dim)).astype(np.float32)

    def run(cuts: list[int], descending: bool) -> tuple[F32, npt.NDArray[np.uint8]]:
        world = Pages(4 * 3 * copies * dim, dim, PAGE)
        out = np.empty((2, n, dim), np.float32)
        held = world.put(bias, np.float32)
        for start, end in zip([0, *cuts], [*cuts, n], strict=True):
            m = end - start
            own, gates = (
                world.put(x[:, start:end].reshape(2 * m, -1), np.float32) for x in (k, gate)
            )
            positions, banks = world.put([*range(start, end)] * 2), world.put([0] * m + [1] * m)
            y = world.memory.array((2 * m, dim), np.float32)
            p = Compress(
                state=world.plane(), k=address(own), gate=address(gates), bias=address(held),
                y=address(y), positions=address(positions), banks=address(banks),
                k_stride=own.strides[0], gate_stride=gates.strides[0], y_stride=y.strides[0],
                tokens=2 * m, copies=copies, window=window,
            )  # fmt: skip
            launch("compress", p, descending)
            out[:, start:end] = y.reshape(2, m, dim)
        return out, world.data

    whole, pages = run([], False)
    cut, same_pages = run([1, 2, 15, 16, 17, 33, 48], True)
    np.testing.assert_array_equal(bits(cut), bits(whole))
    np.testing.assert_array_equal(pages, same_pages)
    state = np.zeros((3 * copies, dim), np.float32)
    for t in range(n):  # by the CPU's own operation
        phase, last = t % window, state[3 * (copies - 1) :]
        if phase == 0:
            if copies == 2:
                last[:] = state[:3] if t else np.array([[-np.inf], [0], [0]])
            state[:3] = np.array([[-np.inf], [0], [0]])
        for part in range(copies):
            at = slice(part * dim, part * dim + dim)
            rows = [state[3 * part + i].ctypes.data for i in range(3)]
            mine = [np.ascontiguousarray(x[at]) for x in (k[0, t], gate[0, t], bias[phase])]
            SCALAR.running_softmax(*rows, *(x.ctypes.data for x in mine), dim)
        expected = last[2] / last[1] if phase + 1 == window else np.zeros(dim, np.float32)
        np.testing.assert_array_equal(bits(whole[0, t]), bits(expected))


@pytest.mark.parametrize("copies", [1, 2])
def test_what_a_run_added_is_taken_back_and_added_again(copies: int) -> None:
    """Runs of guesses, of which the next one begins behind those that came true: the state and the
    rows of plain runs, over windows and over pages."""
    rng, dim, window, n = np.random.default_rng(8), 150, 4, 57
    k, gate = (rng.normal(0, 2, (n, copies * dim)).astype(np.float32) for _ in range(2))
    bias = rng.standard_normal((window, copies * dim)).astype(np.float32)
    wrong = rng.standard_normal((n, copies * dim)).astype(np.float32)
    bank_floats = (3 + 2 * 64) * copies * dim

    def run(moves: list[tuple[int, int, int]]) -> tuple[F32, npt.NDArray[np.uint8]]:
        """Of each: where it begins, how many tokens are right, and how many wrong ones follow."""
        world = Pages(4 * 3 * copies * dim, dim, PAGE)
        held, out = world.put(bias, np.float32), np.empty((n, dim), np.float32)
        kept = world.memory.array((2, bank_floats), np.float32)
        kept[:] = np.nan
        last = 0
        for number, (start, right, guesses) in enumerate(moves):
            m, end = right + guesses, start + right
            values = [np.concatenate([x[start:end], wrong[:guesses]]) for x in (k, gate)]
            own, gates = (world.put(x, np.float32) for x in values)
            y = world.memory.array((m, dim), np.float32)
            ahead = number > 0 and sum(moves[number - 1]) > start
            again, keeps = world.put([0, start - last if ahead else 0]), world.put([0, 1])
            p = Compress(
                state=world.plane(), k=address(own), gate=address(gates), bias=address(held),
                y=address(y), positions=address(world.put(range(start, start + m))),
                banks=address(world.put([1] * m)), kept=address(kept),
                kept_stride=kept.strides[0], again=address(again), keeps=address(keeps),
                k_stride=own.strides[0], gate_stride=gates.strides[0], y_stride=y.strides[0],
                tokens=m, copies=copies, window=window,
            )  # fmt: skip
            launch("compress", p, bool(number % 2))
            out[start:end], last = y[:right], start
        assert np.isnan(kept[0]).all(), "another bank's"
        return out, world.data

    plain, pages = run([(0, 16, 0), (16, 16, 0), (32, 16, 0), (48, 9, 0)])
    for most in (1, 3, 7):
        moves, at = [], 0
        while at < n:
            right = min(int(rng.integers(1, 5)), n - at)
            moves.append((at, right, most if at + right < n else 0))
            at += right
        again, same_pages = run(moves)
        np.testing.assert_array_equal(bits(again), bits(plain))
        last = n // PAGE  # a page ahead of it holds what was wrong
        for index in range(last + 1):
            np.testing.assert_array_equal(*(d[_physical(index)] for d in (same_pages, pages)))


def _physical(index: int) -> int:
    """Where `Pages` puts a page of bank 1."""
    return int(np.random.default_rng(5).permutation(80).reshape(2, 40)[1, index])


@pytest.mark.parametrize("tiles", [0, 1])
def test_rows_are_stored_where_a_window_ends(tiles: int) -> None:
    dim, ratio = 24, 4
    world = Pages(2 * dim * PAGE // ratio, dim, ratio)
    x = world.put(np.random.default_rng(7).standard_normal((5, dim)), np.float32)
    positions, banks = world.put([2, 3, 22, 23, 3]), world.put([0, 0, 1, 1, -1])
    before = world.data.copy()
    p = StoreRows(
        plane=world.plane(), x=address(x), positions=address(positions), banks=address(banks),
        x_stride=x.strides[0], tokens=5, tiles=tiles,
    )  # fmt: skip
    launch("store_rows", p)
    for token, bank, row in ((1, 0, 0), (3, 1, 5)):
        page = before[world.table[bank, row // 4]][: 8 * dim].view(np.float16)
        if tiles:
            page.reshape(dim, 4)[:, row % 4] = x[token]
        else:
            page.reshape(4, dim)[row % 4] = x[token]
    np.testing.assert_array_equal(world.data, before)


@settings(max_examples=12)
@given(
    k=st.sampled_from([1, 5, 64, 200]), heads=st.sampled_from([1, 8, 11]), ties=st.booleans(),
    position=st.integers(0, 639), descending=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_rows_picked_are_those_of_the_definition(
    k: int, heads: int, ties: bool, position: int, descending: bool, seed: int
) -> None:
    rng, dim, ratio = np.random.default_rng(seed), 16, 4
    records, visible = PAGE // ratio, (position + 1) // ratio
    world = Pages(2 * dim * records, dim, ratio)
    rows = rng.integers(-2, 3, (160, dim)) if ties else rng.standard_normal((160, dim))
    half = rows.astype(np.float16)
    for i, row in enumerate(half):
        world.page(1, i // records)[: 2 * dim * records].view(np.float16).reshape(dim, records)[
            :, i % records
        ] = row
    q = world.put(rng.integers(-2, 3, (1, heads * dim)) if ties else
                  rng.standard_normal((1, heads * dim)), np.float32)  # fmt: skip
    w = world.put(rng.integers(1, 3, (1, heads)), np.float32)
    at, bank = world.put([position]), world.put([1])
    scores = world.memory.array((1, 160), np.float32)
    chosen = world.memory.array((1, k), np.float32)
    p = Index(
        plane=world.plane(), q=address(q), w=address(w), positions=address(at), banks=address(bank),
        scores=address(scores), rows=address(chosen), q_stride=q.strides[0], w_stride=w.strides[0],
        rows_stride=chosen.strides[0], tokens=1, heads=heads, k=k, most_rows=160, scale=0.5,
    )  # fmt: skip
    launch("index_scores", p, descending)
    launch("index_pick", p, descending)
    dots = np.maximum(q.reshape(heads, dim).astype(float) @ half.astype(float).T, 0)
    exact = (0.5 * w.T * dots).sum(0)[:visible]
    if visible > k:
        np.testing.assert_allclose(scores[0, :visible], exact, rtol=1e-5, atol=1e-5)
        best = np.sort(np.argsort(-scores[0, :visible], kind="stable")[:k])
    else:
        best = np.arange(visible)
    expected = [*best.tolist(), *[-1] * (k - len(best))]
    np.testing.assert_array_equal(chosen[0], expected)


def attended(
    recent: Pages, other: Pages | None, q: F32, scale: float, bank: int, position: int, window: int,
    picked: list[int] | None, sink: np.float32 | None,
) -> F32:  # fmt: skip
    """One head, part by part as native/exec_attend_rows.c has it."""
    first = max(0, position + 1 - window)
    rows = [recent.row(bank, i) for i in range(first, position + 1)]
    if other is not None:
        seen = range((position + 1) // other.ratio) if picked is None else picked
        rows += [other.row(bank, i) for i in seen]
    dim, own = recent.dim, (q * np.float32(scale)).astype(np.float32)
    top, total = np.array([-np.inf], np.float32), np.zeros(1, np.float32)
    values = np.zeros(dim, np.float32)
    for at in range(0, len(rows), 64):
        part = np.ascontiguousarray(rows[at : at + 64])
        n, scores, weighed = len(part), np.zeros(64, np.float32), np.zeros(dim, np.float32)
        data, to = part.ctypes.data, scores.ctypes.data
        HALF.score_along(own.ctypes.data, 1, dim, data, data, 64, dim, n, to, 64)
        best = np.array([SCALAR.max(to, n)], np.float32)
        mine = np.array([SCALAR.softmax(to, float(best[0]), n)], np.float32)
        HALF.accumulate(to, 64, 1, 0, n, data, data, 64, dim, dim, weighed.ctypes.data)
        above = np.maximum(best, top)
        keep, take = exp(top - above), exp(best - above)
        top, total, values = above, total * keep + mine * take, values * keep + weighed * take
    if sink is not None:
        above = np.maximum(sink, top)
        keep = exp(top - above)
        total, values = total * keep + exp(sink - above), values * keep
    return values * (np.float32(1) / total)


@pytest.mark.parametrize("kind", ["recent", "all", "chosen"])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_over_rows_has_the_bits_of_the_cpu(kind: str, sinks: bool) -> None:
    rng, dim, heads, window = np.random.default_rng(8), 40, 19, 70
    recent, other = Pages(2 * dim * PAGE, dim, 1), Pages(2 * dim * PAGE // 4, dim, 4)
    for world, rows in ((recent, 640), (other, 160)):
        for bank in range(2):
            for i in range(rows):
                world.row(bank, i)[:] = rng.standard_normal(dim).astype(np.float16).view(np.uint16)
    positions, banks = [3, 639, 300, 5], [0, 1, 0, -1]
    q = recent.put(rng.standard_normal((4, heads * dim)), np.float32)
    sink = recent.put(rng.standard_normal(heads), np.float32)
    chosen = recent.put(np.full((4, 90), -1), np.float32)
    picks: list[list[int]] = [[], list(range(0, 160, 2)), [5, 6, 70], []]
    for row, picked in zip(chosen, picks, strict=True):
        row[: len(picked)] = picked
    expected = np.full((4, heads * dim), -3, np.float32)
    for token in range(3):
        for h in range(heads):
            at = slice(h * dim, h * dim + dim)
            expected[token, at] = attended(
                recent, None if kind == "recent" else other, q[token, at], 0.2, banks[token],
                positions[token], window, picks[token] if kind == "chosen" else None,
                sink[h] if sinks else None,
            )  # fmt: skip
    at_, bank_ = recent.put(positions), recent.put(banks)
    parts = recent.memory.array((4, heads, 5, 2 + dim), np.float32)
    for splits in (0, 2, 5):  # fewer blocks than parts, a block for each
        y = recent.put(np.full((4, heads * dim), -3), np.float32)
        p = AttendRows(
            recent=recent.plane(), q=address(q), y=address(y), positions=address(at_),
            banks=address(bank_), sinks=address(sink) if sinks else 0, q_stride=q.strides[0],
            y_stride=y.strides[0], chosen_stride=chosen.strides[0], tokens=4, heads=heads,
            window=window, most_chosen=90, parts=address(parts), most_parts=5, scale=0.2,
        )  # fmt: skip
        if kind != "recent":
            p.compressed = other.plane()
        if kind == "chosen":
            p.chosen = address(chosen)
        if splits:
            parts[:] = np.nan
            how = KERNELS["attend_rows_parts"].launch(p)
            assert how.grid == (2, 4, 5)
            how = how._replace(grid=(2, 4, splits))
            module_of(Unit("attend_rows.cu")).run("attend_rows_parts", p, how, splits == 2)
            launch("attend_rows_fold", p)
        else:
            launch("attend_rows", p)
        np.testing.assert_array_equal(bits(y), bits(expected))
