"""Budgets of device memory: one pool or two, never the larger, with the reserve kept throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ds4_common.cuda.device import Device
from ds4_common.errors import BudgetError, CudaOutOfMemory
from ds4_owner import budget, cli, device_budget
from ds4_owner.backends import Memory
from ds4_owner.backends.vmm import VmmBackend
from ds4_owner.budget import Need
from ds4_owner.config import GIB, MIB
from ds4_owner.device_budget import DeviceBudget
from ds4_owner.stop import StopWatch

DISCRETE = Device(0, "d", "GPU-1", (9, 0), False, 100 * GIB, 1, 13000)
INTEGRATED = replace(DISCRETE, integrated=True)
FLAGS = ["--base", "m", "--scope", "base", "--manifest", "w", "--backend", "vmm"]
HOST = budget.Memory(128 * GIB, 64 * GIB)


class Clock:
    """Passes when it is waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now

    def wait(self, fds: object, timeout_ms: int) -> list[int]:
        self.now += timeout_ms / 1000
        if self.waits:
            self.waits.pop(0)()
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(device_budget, "time", made)
    monkeypatch.setattr(budget, "read_memory", lambda: HOST)
    return made


@pytest.fixture
def watch(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[StopWatch]:
    made = StopWatch()
    monkeypatch.setattr(StopWatch, "wait", lambda _, fds, timeout_ms: clock.wait(fds, timeout_ms))
    yield made
    made.close()


class Driver:
    """What a device has free, and memory made of it."""

    def __init__(self, free: int) -> None:
        self.free, self.refusals, self.asked = free, 0, 0

    def measure(self) -> tuple[int, int]:
        self.asked += 1
        return self.free, 100 * GIB

    def create(self, label: str, n_bytes: int) -> Memory:
        if self.refusals:
            self.refusals -= 1
            raise CudaOutOfMemory("out of memory")
        self.free -= n_bytes
        return Memory(label, n_bytes, -1, -1)


def budget_of(
    device: Device, driver: Driver, watch: StopWatch, monkeypatch: pytest.MonkeyPatch,
    *flags: str,
) -> DeviceBudget:  # fmt: skip
    monkeypatch.setattr(VmmBackend, "create", lambda _, *made: driver.create(*made))
    backend = VmmBackend(device, 2 * MIB, None)  # type: ignore[arg-type]
    return DeviceBudget(cli.parse([*FLAGS, *flags], {}), backend, driver.measure, watch)


WEIGHTS = Need("base raw ranges", 20 * GIB, on_device=True)
SCRATCH = Need("loader scratch", 1 * GIB)


def test_a_discrete_device_is_judged_by_its_own_free_memory(
    watch: StopWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = budget_of(DISCRETE, Driver(30 * GIB), watch, monkeypatch)
    assert made.memory().budget == 30 * GIB  # not the host's 64
    assert made.pooled([WEIGHTS, SCRATCH]) == [WEIGHTS]
    made.check([WEIGHTS, SCRATCH], 10 * GIB)
    with pytest.raises(BudgetError, match="short by 1"):
        made.check([WEIGHTS, SCRATCH], 11 * GIB)


def test_an_integrated_device_is_judged_by_available_memory_alone(
    watch: StopWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's free is MemFree there: smaller after a file was read, larger never counted."""
    for free in (1 * GIB, 99 * GIB):
        made = budget_of(INTEGRATED, Driver(free), watch, monkeypatch)
        assert made.memory().budget == HOST.available
        assert made.pooled([WEIGHTS, SCRATCH]) == [WEIGHTS, SCRATCH]
        made.check([WEIGHTS, SCRATCH], 43 * GIB)
        with pytest.raises(BudgetError, match="available memory"):
            made.check([WEIGHTS, SCRATCH], 44 * GIB)


def test_host_memory_for_the_load_is_checked_too(
    watch: StopWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = budget_of(DISCRETE, Driver(90 * GIB), watch, monkeypatch)
    with pytest.raises(BudgetError, match="host memory for loading: need 65"):
        made.check([WEIGHTS, Need("loader scratch", 65 * GIB)], 1)


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        (DISCRETE, (), 10 * GIB),
        (replace(DISCRETE, total_bytes=400 * GIB), (), 32 * GIB),
        (INTEGRATED, (), 32 * GIB),
        (DISCRETE, ("--reserve-gb", "3"), 3 * GIB),
        (DISCRETE, ("--reserve-gb", "0"), 0),
    ],
)
def test_the_default_reserve(
    device: Device, flags: tuple[str, ...], expected: int, watch: StopWatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made = budget_of(device, Driver(1), watch, monkeypatch, *flags)
    assert made.default_reserve() == expected


def test_a_plan_waits_for_memory_that_returns_late_and_no_longer(
    clock: Clock, watch: StopWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(1 * GIB)
    made = budget_of(DISCRETE, driver, watch, monkeypatch)

    def returned() -> None:
        driver.free = 60 * GIB

    clock.waits = [lambda: None, returned]
    made.check([WEIGHTS], 10 * GIB)
    assert 0 < clock.now < 1
    driver.free = 1 * GIB
    start = clock.now
    with pytest.raises(BudgetError):
        made.check([WEIGHTS], 10 * GIB)
    assert clock.now - start == pytest.approx(device_budget.LATE_SECONDS, abs=0.3)


def test_a_plan_that_can_never_fit_is_refused_at_once(
    clock: Clock, watch: StopWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = budget_of(DISCRETE, Driver(1 * GIB), watch, monkeypatch)
    with pytest.raises(BudgetError):
        made.check([WEIGHTS], 81 * GIB)
    assert clock.now == 0


def test_the_reserve_is_asked_for_once_per_chunk_and_never_given_away(
    watch: StopWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(20 * GIB + 64 * MIB)
    made = budget_of(DISCRETE, driver, watch, monkeypatch, "--copy-chunk-mb", "256")
    made.check([Need("w", 10 * GIB, on_device=True)], 10 * GIB)
    before = driver.asked
    for _ in range(512):
        made.create("range", 2 * MIB)
    assert driver.asked - before == 4  # 1 GiB in chunks of 256 MiB
    driver.free = 10 * GIB + 1 * MIB  # somebody else took the rest
    made._granted = 0
    with pytest.raises(BudgetError, match="ran out while it was allocated"):
        made.create("range", 2 * MIB)
    assert driver.free == 10 * GIB + 1 * MIB


def test_an_allocation_out_of_memory_is_tried_again(
    clock: Clock, watch: StopWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(90 * GIB)
    made = budget_of(DISCRETE, driver, watch, monkeypatch)
    driver.refusals = 3
    assert made.create("range", 2 * MIB).n_bytes == 2 * MIB
    driver.refusals = 10_000
    with pytest.raises(CudaOutOfMemory):
        made.create("range", 2 * MIB)
    assert clock.now < 2 * device_budget.LATE_SECONDS
