"""What the guard decides: whether a job may start, when it has to go, and how fast.

Pure functions over records; nothing here reads a clock, a file or a process. Figures and rules are
those of the published guard: admission by available memory minus a reserve, a trip floor, memory
pressure only near the floor, and a grace that is cut when the floor is far behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

GIB = 1 << 30
PRESSURE_FULL_AVG10 = 20.0  # percent of the last 10 s in which every task waited for memory
PRESSURE_MARGIN_BYTES = 4 * GIB  # pressure alone is no reason far above the floor
EXIT_GUARD = 75  # refused or ended by the guard; EX_TEMPFAIL


class Reason(Enum):
    """Why a job is ended; the value is what the log says."""

    MEMORY = "memory"  # available memory below the floor
    PRESSURE = "pressure"
    DEADLINE = "deadline"
    STOP = "stop signal"
    LOG = "log write failure"
    BLIND = "memory unreadable"  # a guard that sees nothing guards nothing
    LEFTOVERS = "leftovers"  # the command ended by itself and left processes behind

    @property
    def is_trip(self) -> bool:
        return self is not Reason.LEFTOVERS


class Phase(Enum):
    RUNNING = "running"
    TERMINATING = "terminating"  # SIGTERM sent, grace running
    KILLING = "killing"  # SIGKILL until nothing is left


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory of the job: the kernel throttles above `high_bytes` and refuses above `max_bytes`."""

    max_bytes: int
    high_bytes: int


@dataclass(frozen=True, slots=True)
class Policy:
    trip_bytes: int
    grace_seconds: float
    deadline: float | None  # on the clock of Sample.at; None: no deadline


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the machine. `available_bytes` None: it could not be read."""

    at: float
    available_bytes: int | None
    full_avg10: float | None  # None: the kernel reports no pressure


@dataclass(frozen=True, slots=True)
class Watch:
    """Where a job stands. The first reason stays: later ones change only the speed."""

    phase: Phase = Phase.RUNNING
    reason: Reason | None = None
    kill_at: float = 0.0


def admit(requested: Limits, reserve_bytes: int, available_bytes: int) -> Limits | None:
    """The limits a job gets; None when what is left after the reserve is under 0.1 GiB.

    max = min(requested, (available - reserve) rounded down to 0.1 GiB);
    high = min(requested, max - min(1 GiB, 10 % of max)).
    """
    tenths = (available_bytes - reserve_bytes) * 10 // GIB
    max_bytes = min(requested.max_bytes, tenths * GIB // 10)
    if max_bytes <= 0:
        return None
    high_bytes = min(requested.high_bytes, max_bytes - min(GIB, max_bytes // 10))
    return Limits(max_bytes, high_bytes)


def trip(policy: Policy, sample: Sample) -> Reason | None:
    """The reason this sample gives to end a running job."""
    if sample.available_bytes is None:
        return Reason.BLIND
    if sample.available_bytes < policy.trip_bytes:
        return Reason.MEMORY
    near = sample.available_bytes < policy.trip_bytes + PRESSURE_MARGIN_BYTES
    if near and sample.full_avg10 is not None and sample.full_avg10 >= PRESSURE_FULL_AVG10:
        return Reason.PRESSURE
    if policy.deadline is not None and sample.at >= policy.deadline:
        return Reason.DEADLINE
    return None


def step(policy: Policy, watch: Watch, sample: Sample, asked: Reason | None = None) -> Watch:
    """The next state. `asked`: a reason from outside the sample (signal, log, leftovers).

    One phase at a time: SIGTERM always goes out before SIGKILL, even with no grace left.
    """
    match watch.phase:
        case Phase.RUNNING:
            reason = asked or trip(policy, sample)
            if reason is None:
                return watch
            return Watch(Phase.TERMINATING, reason, sample.at + policy.grace_seconds)
        case Phase.TERMINATING:
            if sample.at >= watch.kill_at or _far_below(policy, sample):
                return replace(watch, phase=Phase.KILLING)
            return watch
        case Phase.KILLING:
            return watch


def _far_below(policy: Policy, sample: Sample) -> bool:
    """Under two thirds of the floor there is no time left for a clean end."""
    return sample.available_bytes is None or 3 * sample.available_bytes < 2 * policy.trip_bytes
