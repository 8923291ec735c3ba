"""The CUDA sampler, on any machine: draw for draw what the native sampler draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_worker.cuda.kernels import KERNELS, Unit
from ds4_worker.cuda.parameters import Sample
from ds4_worker.executor.api import Adjustments, Sampling
from ds4_worker.executor.cpu import SAMPLED_RECORD
from helpers.cuda_kernels import Memory, address, module_of
from helpers.sampling import BAD_ID, NOT_FINITE, NOTHING_ALLOWED, draw

Floats = npt.NDArray[np.float32]


def on_device(logits: Floats, record: bytes, descending: bool = False) -> bytes:
    memory, n = Memory(), len(logits)
    own = memory.array((1, n), np.float32, logits[None])
    held = memory.array((len(record),), np.uint8, np.frombuffer(record, np.uint8))
    out = memory.array((SAMPLED_RECORD.size,), np.uint8)
    token, scratch = memory.array((1,), np.int32), memory.array((2 * n,), np.float32)
    p = Sample(
        logits=address(own), samplings=address(held), sampled=address(out), tokens=address(token),
        scratch=address(scratch), logits_stride=own.strides[0], rows=1, vocabulary=n,
    )  # fmt: skip
    kernel = KERNELS["sample"]
    module_of(Unit(kernel.file)).run("sample", p, kernel.launch(p), descending)
    made = out.tobytes()
    assert token[0] == SAMPLED_RECORD.unpack(made)[0]
    return made


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
    how=parameters, seed=st.integers(0, 1000), n=st.sampled_from([1, 7, 64, 513, 1500]),
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
