"""Does a plan for device memory fit, and is the reserve still there while it is allocated.

Owns which pool counts. An integrated device (GB10) has the system's memory: MemAvailable, for the
driver's "free" there is MemFree and the page cache makes it small. A discrete device has its own:
the driver's free, never MemAvailable. Never the larger of two. Host memory for the load itself is
checked against the host in both cases.

The memory of a worker that just died comes back late, so a plan that fits the whole device waits a
few seconds for it before it is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds4_common.cuda.device import Device
from ds4_common.errors import BudgetError, CudaOutOfMemory, Ds4Error
from ds4_owner import budget
from ds4_owner.backends import Memory
from ds4_owner.backends.vmm import VmmBackend
from ds4_owner.budget import Need
from ds4_owner.config import OwnerConfig
from ds4_owner.progress import gib, log, size
from ds4_owner.stop import StopWatch

LATE_SECONDS = 10.0  # for memory of processes that are ending
_RETRY_MS = 200

Measure = Callable[[], tuple[int, int]]  # the driver's (free, total), from whoever has a context


def read_device(device: Device, measure: Measure) -> budget.Memory:
    """What the device can still give."""
    if device.integrated:
        host = budget.read_memory()
        return budget.Memory(host.total, host.available)
    free, total = measure()
    return budget.Memory(total, free, pool="free device memory", integrated=False)


def default_reserve(config: OwnerConfig, device: Device) -> int:
    """`--reserve-gb`, else 32 GiB as published; of a device's own memory at most a tenth."""
    if config.reserve_bytes is None and not device.integrated:
        return min(budget.DEFAULT_RESERVE_BYTES, device.total_bytes // 10)
    return budget.default_reserve(config, device.total_bytes)


@dataclass(slots=True)
class DeviceBudget:
    """The budget of one load."""

    config: OwnerConfig
    backend: VmmBackend
    measure: Measure
    watch: StopWatch
    _reserve: int = 0  # kept while allocating; 0: no checks
    _granted: int = 0
    _told: bool = False

    @property
    def device(self) -> Device:
        return self.backend.device

    def memory(self) -> budget.Memory:
        return read_device(self.device, self.measure)

    def default_reserve(self) -> int:
        return default_reserve(self.config, self.device)

    def pooled(self, needs: Sequence[Need]) -> list[Need]:
        """Those that draw from the same pool as the weights."""
        return [need for need in needs if need.on_device or self.device.integrated]

    def check(self, needs: Sequence[Need], reserve: int) -> None:
        """Raises BudgetError when the plan does not fit, after a few seconds when it might have.
        The reserve is kept from now on."""
        self._reserve = reserve
        on_host = [need for need in needs if not need.on_device]
        wanted = self.pooled(needs)
        total = self.memory().total
        might_fit = budget.need_bytes(wanted) + reserve <= total and not self.config.dry_run
        give_up = time.monotonic() + (LATE_SECONDS if might_fit else 0.0)
        while True:
            try:
                budget.check(wanted, reserve, self.memory(), self.device.name)
                break
            except BudgetError as error:
                self._wait(give_up, "the plan", error)
        host = budget.read_memory()
        if budget.need_bytes(on_host) > host.budget:
            raise BudgetError(
                f"host memory for loading: need {gib(budget.need_bytes(on_host))},"
                f" got {gib(host.budget)}; stop other processes"
            )

    def create(self, label: str, n_bytes: int) -> Memory:
        """One allocation, when the reserve stays free of it. Raises BudgetError, CudaOutOfMemory:
        after a few seconds in which nothing came back."""
        give_up = time.monotonic() + LATE_SECONDS
        while True:
            try:
                self._keep_reserve(n_bytes)
                memory = self.backend.create(label, n_bytes)
                self._granted = max(0, self._granted - n_bytes)
                return memory
            except (BudgetError, CudaOutOfMemory) as error:
                self._wait(give_up, label, error)

    def _keep_reserve(self, n_bytes: int) -> None:
        """Asks the driver (or /proc) once per chunk."""
        if not self._reserve or self._granted >= n_bytes:
            return
        memory = self.memory()
        if memory.budget < n_bytes + self._reserve:
            raise BudgetError(
                f"device memory ran out while it was allocated: the next {size(n_bytes)} and the"
                f" reserve of {gib(self._reserve)} exceed the {gib(memory.budget)} left;"
                " stop other processes or lower --reserve-gb"
            )
        spare = memory.budget - self._reserve
        self._granted = max(n_bytes, min(self.config.copy_chunk_bytes, spare))

    def _wait(self, give_up: float, what: str, error: Ds4Error) -> None:
        """A moment, or raises `error` when the time is over."""
        if time.monotonic() >= give_up:
            raise error
        if not self._told:
            self._told = True
            log(f"{what}: too little device memory; waiting {LATE_SECONDS:.0f} s for what returns")
        self.watch.wait((), timeout_ms=_RETRY_MS)
