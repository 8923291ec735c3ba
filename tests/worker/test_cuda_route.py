"""The choice of experts by the CUDA kernel, on any machine: the definition of the op."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.contract.ops import RouteScore
from ds4_worker.cuda.kernels import KERNELS, Unit
from ds4_worker.cuda.parameters import Route
from ds4_worker.executor.reference import KERNELS as DEFINITIONS
from helpers.cuda_kernels import F32, Memory, address, module_of
from helpers.vector_table import table

SCALAR = table(0)


def route(
    logits: F32, used: int, bias: F32 | None = None, descending: bool = False, **fields: float
) -> F32:
    memory = Memory()
    own = memory.array(logits.shape, np.float32, logits)
    routes = memory.array((len(logits), 2 * used + 3), np.float32)
    p = Route(
        logits=address(own), routes=address(routes), logits_stride=own.strides[0],
        routes_stride=routes.strides[0], rows=len(logits), experts=logits.shape[1], used=used,
        **{"groups": 1, "groups_used": 1, "group_top": 1, "scale": 1.0, **fields},
    )  # fmt: skip
    if bias is not None:
        held = memory.array(bias.shape, np.float32, bias)
        p.bias = address(held)
    kernel = KERNELS["route"]
    module_of(Unit(kernel.file)).run("route", p, kernel.launch(p), descending)
    return routes[:, : 2 * used].copy()


def by_definition(logits: F32, used: int, bias: F32 | None, **fields: float) -> F32:
    attributes = {
        "normalize": 0, "scale": 1.0, "groups": 1, "groups_used": 1, "group_top": 1,
        "width": 2 * used, **fields,
    }  # fmt: skip
    made = DEFINITIONS["route_experts"]([logits, bias, None, None], attributes)
    assert made is not None
    return made.astype(np.float32)


@settings(max_examples=60)
@given(
    score=st.sampled_from(list(RouteScore)), used=st.integers(1, 6), experts=st.integers(2, 9),
    groups=st.sampled_from([1, 2, 4]), grouped=st.booleans(), biased=st.booleans(),
    normalize=st.integers(0, 1), descending=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_the_choice_is_that_of_the_definition(
    score: RouteScore, used: int, experts: int, groups: int, grouped: bool, biased: bool,
    normalize: int, descending: bool, seed: int,
) -> None:  # fmt: skip
    rng, experts = np.random.default_rng(seed), experts * groups
    logits = rng.normal(0, 3, (3, experts)).astype(np.float32)
    bias = rng.normal(0, 1, experts).astype(np.float32) if biased else None
    kept = max(1, groups // 2) if grouped else groups
    used = min(used, experts // groups * kept)
    fields = {
        "score": int(score), "groups": groups, "groups_used": kept,
        "group_top": min(2, experts // groups), "normalize": normalize, "scale": 2.5,
    }  # fmt: skip
    got = route(logits, used, bias, descending, **fields)
    expected = by_definition(logits, used, bias, **fields)
    np.testing.assert_array_equal(got[:, :used], expected[:, :used])
    np.testing.assert_allclose(got[:, used:], expected[:, used:], rtol=2e-6, atol=1e-7)


def test_the_softmax_of_a_choice_has_the_bits_of_the_cpu() -> None:
    logits = np.random.default_rng(1).normal(0, 4, (1, 77)).astype(np.float32)
    p = logits.copy()
    top = SCALAR.max(p.ctypes.data, 77)
    total = np.float32(SCALAR.softmax(p.ctypes.data, top, 77))
    best = np.argsort(-p[0], kind="stable")[:5]
    got = route(logits, 5, score=int(RouteScore.SOFTMAX))[0]
    np.testing.assert_array_equal(got, [*best, *(p[0, best] / total)])


def test_equal_scores_go_to_the_lower_number() -> None:
    logits = np.zeros((1, 70), np.float32)
    logits[0, 40] = logits[0, 65] = 1.0
    got = route(logits, 4, score=int(RouteScore.LOGITS))
    np.testing.assert_array_equal(got[0, :4], [40, 65, 0, 1])


@pytest.mark.parametrize("score", list(RouteScore))
def test_logits_that_are_no_numbers_show_in_the_weights(score: RouteScore) -> None:
    logits = np.full((1, 8), np.nan, np.float32)
    got = route(logits, 3, score=int(score), groups=2, groups_used=1)
    assert (got[0, :3] == 0).all()
    assert np.isnan(got[0, 3:]).all()
