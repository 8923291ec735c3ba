"""The CUDA sampler, on any machine: draw for draw what the native sampler draws."""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_worker.cuda.kernels import KERNELS, Unit
from ds4_worker.cuda.parameters import Count, Sample
from ds4_worker.executor.api import Adjustments, Sampling
from ds4_worker.executor.records import SAMPLED_RECORD
from helpers.cuda_kernels import Memory, address, module_of
from helpers.sampling import BAD_ID, NOT_FINITE, NOTHING_ALLOWED, draw

Floats = npt.NDArray[np.float32]


def on_device(
    logits: Floats, record: bytes, descending: bool = False, drafts: Sequence[int] = ()
) -> bytes:
    """A draw whose record has the list of tokens seen that the native sampler reads: they are
    counted first. `drafts` come on top of them."""
    memory, n = Memory(), len(logits)
    *draw_fields, seen, n_biases, n_seen = _FIELDS.unpack_from(record)
    if n_seen or drafts:
        counts = memory.array((2, n + 1), np.int32, np.full((2, n + 1), 7, np.int32))
        count(memory, counts, [note(1, clear=1, seen=seen, n_seen=n_seen)], descending)
        seen = address(counts) + counts.strides[0]
    record = _FIELDS.pack(*draw_fields, seen, n_biases, len(drafts)) + record[_FIELDS.size :]
    own = memory.array((1, n), np.float32, logits[None])
    held = memory.array((len(record),), np.uint8, np.frombuffer(record, np.uint8))
    inputs = memory.array((3 + len(drafts),), np.int32, np.array([9, 9, 9, *drafts], np.int32))
    row = memory.array((1,), np.int32, np.array([2 + len(drafts)], np.int32))
    out = memory.array((SAMPLED_RECORD.size,), np.uint8)
    token, scratch = memory.array((1,), np.int32), memory.array((2 * n,), np.float32)
    p = Sample(
        logits=address(own), samplings=address(held), sampled=address(out), tokens=address(token),
        scratch=address(scratch), logits_stride=own.strides[0], rows=1, vocabulary=n,
        inputs=address(inputs), row_tokens=address(row),
    )  # fmt: skip
    kernel = KERNELS["sample"]
    module_of(Unit(kernel.file)).run("sample", p, kernel.launch(p), descending)
    made = out.tobytes()
    assert token[0] == SAMPLED_RECORD.unpack(made)[0]
    return made


# What a record begins with, up to the numbers of biases and of tokens seen (native/sampler.h).
_FIELDS = struct.Struct("<fffiQQQiiQQII")


def note(bank: int, clear: int = 0, seen: int = 0, n_seen: int = 0) -> list[int]:
    """Without what was drawn since."""
    return [bank, clear, seen, n_seen, 0, 0, -1, 0]


def count(
    memory: Memory, counts: npt.NDArray[Any], notes: list[list[int]], descending: bool = False,
    tokens: Sequence[int] = (0,),
) -> None:  # fmt: skip
    """Runs the counting of notes whose lists are at addresses of the host."""
    lists = memory.array((1 << 14,), np.int32)
    used, records = 0, []
    for bank, clear, seen, n_seen, drawn, n_drawn, pending, _ in notes:
        places = []
        for at, words in ((seen, 2 * n_seen), (drawn, n_drawn)):
            places.append(4 * used)
            if words:
                lists[used : used + words] = (ctypes.c_int32 * words).from_address(at)
            used += words
        records.append([bank, clear, places[0], n_seen, places[1], n_drawn, pending, 0])
    held = memory.array((len(notes), 8), np.int32, np.array(records, np.int32))
    step = memory.array((len(tokens),), np.int32, np.array(tokens, np.int32))
    live = memory.array((1,), np.int32, np.array([len(notes)], np.int32))
    p = Count(
        counts=address(counts), input=address(lists), notes=address(held), tokens=address(step),
        live=address(live), rows=len(counts), vocabulary=counts.shape[1] - 1,
    )  # fmt: skip
    kernel = KERNELS["count_tokens"]
    module_of(Unit(kernel.file)).run("count_tokens", p, kernel.launch(p), descending)


def held(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Where the kernel can read it."""
    return Memory().array(values.shape, values.dtype, values)


def some_logits(seed: int, n: int, ties: bool) -> Floats:
    x = np.random.default_rng(seed).normal(0, 3, n).astype(np.float32)
    return (np.round(x * 2) / 2).astype(np.float32) if ties else x


parameters = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5, 10.0, math.nan]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 999, 1000, 5000]),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**40),
    logprobs=st.sampled_from([-1, 0, 1, 5, 20, 50]),
)


@settings(max_examples=40)
@given(
    how=parameters, seed=st.integers(0, 1000), n=st.sampled_from([1, 7, 64, 513, 1500, 5003]),
    ties=st.booleans(), descending=st.booleans(),
)  # fmt: skip
def test_the_device_draws_what_the_cpu_draws(
    how: Sampling, seed: int, n: int, ties: bool, descending: bool
) -> None:
    x = some_logits(seed, n, ties)
    got = draw(x, how, by=lambda logits, record: on_device(logits, record, descending))
    assert got == draw(x, how, isa=0)


@settings(max_examples=25)
@given(
    how=parameters, seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    repetition=st.sampled_from([1.0, 1.3]), frequency=st.sampled_from([0.0, 0.4]),
)  # fmt: skip
def test_biases_penalties_and_masks_are_those_of_the_cpu(
    how: Sampling, seed: int, share: float, repetition: float, frequency: float
) -> None:
    rng, n = np.random.default_rng(seed), 700
    x, ids = some_logits(seed, n, True), rng.permutation(n).tolist()
    mask = None if share == 1.0 else rng.random(n) < share
    biases = [(i, float(rng.normal(0, 3))) for i in ids[:5]]
    seen = [(i, int(c)) for i, c in zip(ids[3:40], rng.integers(0, 4, 37), strict=True)]
    how.adjust = Adjustments(repetition=repetition, frequency=frequency, presence=0.3)
    words = None if mask is None else mask.astype(np.float32)
    expected = draw(x, how, 0, words, biases, seen)
    assert draw(x, how, 0, words, biases, seen, by=on_device, place=held) == expected


@settings(max_examples=25)
@given(
    how=parameters, seed=st.integers(0, 1000),
    repetition=st.sampled_from([1.0, 1.3]), descending=st.booleans(),
    drafts=st.lists(st.integers(0, 30), min_size=1, max_size=63), known=st.booleans(),
)  # fmt: skip
def test_drafts_before_a_draw_count_as_drawn(
    how: Sampling, seed: int, repetition: float, descending: bool, drafts: list[int], known: bool
) -> None:
    """As on the CPU, which is given a list of everything."""
    rng, n = np.random.default_rng(seed), 600
    x = some_logits(seed, n, False)
    x[:31] += 8  # so that the drafts matter
    seen = {int(i): int(c) for i, c in zip(rng.permutation(50)[:20], range(20), strict=True)}
    how.adjust = Adjustments(repetition=repetition, frequency=0.4, presence=0.3)
    before = list(seen.items()) if known else []
    biases = [(3, 1.5), (40, -2.0)]
    after = Counter(dict(before)) + Counter(drafts) + Counter()
    all_seen = [(i, after[i]) for i in {**dict(before), **dict.fromkeys(drafts)}]
    expected = draw(x, how, 0, None, biases, all_seen)

    def by(logits: Floats, record: bytes) -> bytes:
        return on_device(logits, record, descending, drafts)

    assert draw(x, how, 0, None, biases, before, by=by, place=held) == expected


def test_what_is_drawn_is_added_to_the_counts_of_its_bank_alone() -> None:
    memory, n = Memory(), 40
    counts = memory.array((3, n + 1), np.int32, np.full((3, n + 1), 5, np.int32))
    seen, drawn = array("i", [3, 0, 7, 2]), array("i", [3, 3, 9])
    first = [1, 1, seen.buffer_info()[0], 2, drawn.buffer_info()[0], 3, 1, 0]
    other = [2, 0, 0, 0, drawn.buffer_info()[0], 1, -1, 0]
    count(memory, counts, [first, other], tokens=[9, 30])
    expected = np.zeros(n + 1, np.int32)
    expected[[3, 7, 9, 30]] = [3, 3, 2, 2]
    assert (counts[1] == expected).all()
    assert (counts[0] == 5).all()
    assert counts[2, 3] == 6
    assert (np.delete(counts[2], 3) == 5).all()
    count(memory, counts, [[1, 0, 0, 0, 0, 0, 0, 0]], tokens=[n])  # no such id
    assert counts[1, n] == 2
    count(memory, counts, [note(1, clear=1)])
    assert not counts[1].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 511, 512, 999])
def test_logits_that_are_not_finite_fail_wherever_they_are(bad: float, place: int) -> None:
    x = np.zeros(1000, np.float32)
    x[place] = bad
    assert draw(x, Sampling(), by=on_device).status == NOT_FINITE


def test_what_is_impossible_has_the_status_of_the_cpu() -> None:
    x = some_logits(1, 100, False)
    nothing = np.zeros(100, np.float32)
    assert draw(x, Sampling(), mask=nothing, by=on_device, place=held).status == NOTHING_ALLOWED
    assert draw(x, Sampling(forced=100), by=on_device).status == BAD_ID
    assert draw(x, Sampling(), biases=[(100, 1.0)], by=on_device, place=held).status == BAD_ID
    assert draw(x, Sampling(), seen=[(-1, 1)], by=on_device, place=held).status == BAD_ID
    assert draw(x, Sampling(forced=99, logprobs=2), by=on_device) == draw(
        x, Sampling(forced=99, logprobs=2), isa=0
    )
