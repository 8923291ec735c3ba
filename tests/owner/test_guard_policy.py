"""The guard's decisions: admission, trips, and the way from SIGTERM to SIGKILL. No process runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_owner.guard.policy import (
    GIB,
    PRESSURE_MARGIN_BYTES,
    Limits,
    Phase,
    Policy,
    Reason,
    Sample,
    Watch,
    admit,
    step,
    trip,
)

SIZES = st.integers(0, 200 * GIB)
LIMITS = st.builds(Limits, st.integers(1, 200 * GIB), st.integers(1, 200 * GIB))
POLICIES = st.builds(
    Policy,
    trip_bytes=st.integers(0, 64 * GIB),
    grace_seconds=st.floats(0, 60),
    deadline=st.none() | st.floats(0, 100),
)
LOOKS = st.tuples(st.none() | SIZES, st.none() | st.floats(0, 100))
ASKED = st.none() | st.sampled_from([Reason.STOP, Reason.LOG, Reason.LEFTOVERS])
TWELVE = Policy(trip_bytes=12 * GIB, grace_seconds=1.0, deadline=None)


@given(LIMITS, SIZES, SIZES)
def test_an_admitted_job_leaves_the_reserve_to_others(
    requested: Limits, reserve: int, available: int
) -> None:
    limits = admit(requested, reserve, available)
    if limits is None:
        assert available - reserve < GIB / 10
        return
    assert 0 < limits.max_bytes <= requested.max_bytes
    assert limits.max_bytes + reserve <= available
    assert limits.high_bytes <= requested.high_bytes
    assert limits.max_bytes - limits.high_bytes >= min(GIB, limits.max_bytes // 10)


@given(LIMITS, SIZES, SIZES)
def test_more_memory_never_admits_less(requested: Limits, reserve: int, available: int) -> None:
    less, more = (admit(requested, reserve, n) for n in (available, available + GIB))
    assert less is None or (more is not None and more.max_bytes >= less.max_bytes)


@pytest.mark.parametrize(
    ("available_gib", "max_gib", "high_gib"),
    [(120, 24.0, 21.0), (20.57, 8.5, 7.65), (30, 18.0, 17.0), (12.1, 0.1, 0.09)],
)
def test_limits_follow_the_published_formula(
    available_gib: float, max_gib: float, high_gib: float
) -> None:
    limits = admit(Limits(24 * GIB, 21 * GIB), 12 * GIB, int(available_gib * GIB) + 1)
    assert limits is not None
    assert limits.max_bytes == int(max_gib * GIB)
    assert limits.high_bytes == pytest.approx(high_gib * GIB, abs=1)


def test_nothing_is_admitted_into_the_reserve() -> None:
    asked = Limits(24 * GIB, 21 * GIB)
    assert admit(asked, 12 * GIB, 12 * GIB + GIB // 10 - 1) is None
    assert admit(asked, 12 * GIB, 3 * GIB) is None


@pytest.mark.parametrize(
    ("available", "full_avg10", "reason"),
    [
        (12 * GIB, 0.0, None),
        (12 * GIB - 1, 0.0, Reason.MEMORY),
        (12 * GIB + PRESSURE_MARGIN_BYTES - 1, 20.0, Reason.PRESSURE),
        (12 * GIB + PRESSURE_MARGIN_BYTES - 1, 19.9, None),
        (12 * GIB + PRESSURE_MARGIN_BYTES, 99.0, None),
        (13 * GIB, None, None),
        (None, 0.0, Reason.BLIND),
    ],
)
def test_a_sample_trips_exactly_at_the_floor(
    available: int | None, full_avg10: float | None, reason: Reason | None
) -> None:
    assert trip(TWELVE, Sample(0.0, available, full_avg10)) is reason


def test_a_deadline_of_none_never_comes() -> None:
    late = Sample(1e12, 64 * GIB, 0.0)
    assert trip(TWELVE, late) is None
    assert trip(Policy(TWELVE.trip_bytes, 1.0, deadline=5.0), late) is Reason.DEADLINE


@given(POLICIES, st.lists(st.tuples(LOOKS, ASKED), max_size=40))
def test_every_job_goes_through_sigterm_and_never_comes_back(
    policy: Policy, events: list[tuple[tuple[int | None, float | None], Reason | None]]
) -> None:
    order = list(Phase)
    watch = Watch()
    for at, (look, asked) in enumerate(events):
        sample = Sample(float(at), *look)
        after = step(policy, watch, sample, asked)
        assert order.index(after.phase) - order.index(watch.phase) in (0, 1)
        assert (after.phase is Phase.RUNNING) == (after.reason is None)
        if watch.reason is not None:
            assert after.reason is watch.reason
        if after.phase is Phase.KILLING and watch.phase is Phase.TERMINATING:
            available = look[0]
            assert at >= watch.kill_at or available is None or 3 * available < 2 * policy.trip_bytes
        watch = after


@given(POLICIES, LOOKS)
def test_a_job_that_ignores_sigterm_is_killed_when_its_grace_is_over(
    policy: Policy, look: tuple[int | None, float | None]
) -> None:
    watch = step(policy, Watch(), Sample(0.0, *look), Reason.STOP)
    assert watch.phase is Phase.TERMINATING
    late = Sample(policy.grace_seconds, *look)
    assert step(policy, watch, late).phase is Phase.KILLING


def test_grace_is_cut_when_memory_falls_far_below_the_floor() -> None:
    low, lower = (Sample(0.0, n, 0.0) for n in (8 * GIB, 8 * GIB - 1))
    watch = step(TWELVE, Watch(), low)
    assert watch.reason is Reason.MEMORY
    assert step(TWELVE, watch, low).phase is Phase.TERMINATING
    assert step(TWELVE, watch, lower).phase is Phase.KILLING


def test_a_worker_goes_before_its_owner() -> None:
    owner = Policy(8 * GIB, 1.0, None)
    falling = [Sample(0.0, n * GIB, 0.0) for n in range(16, 0, -1)]
    first = {name: next(s for s in falling if trip(policy, s))
             for name, policy in (("worker", TWELVE), ("owner", owner))}  # fmt: skip
    assert first["worker"].available_bytes == 11 * GIB
    assert first["owner"].available_bytes == 7 * GIB


def test_only_leftovers_are_no_fault_of_the_job() -> None:
    assert [reason for reason in Reason if not reason.is_trip] == [Reason.LEFTOVERS]
