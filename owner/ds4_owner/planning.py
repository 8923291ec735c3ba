"""Before anything is allocated: what the loader child planned, and whether it fits.

Owns the plan as the owner knows it, the published lines about it, the memory budget, and the two
commands that end here: `--dry-run` and `plan FILE`. Parsing and planning happen in the child.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ds4_common.allocation import Allocation, ArtifactKind
from ds4_common.errors import LoaderError
from ds4_owner import budget, job, limits
from ds4_owner.backends import HUGE_PAGE_BYTES, Backend, Memory, open_backend
from ds4_owner.backends.shm import SHM_FOLDER
from ds4_owner.child import LoaderChild
from ds4_owner.config import OwnerConfig
from ds4_owner.progress import gib, log, print_table, size
from ds4_owner.stop import Stopped, StopWatch

if TYPE_CHECKING:
    from ds4_owner.device_budget import DeviceBudget

BLOB_BYTES = 16 << 20  # what the blobs need together, an upper bound for the budget
DRY_RUN_LINE = "dry-run complete; no allocations or manifest were created"


@dataclass(slots=True)
class Plan:
    """What the loader child planned, as the owner knows it."""

    allocations: list[Allocation] = field(default_factory=list)
    models: tuple[job.PlannedModel, ...] = ()
    scratch_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def n_bytes(self) -> int:
        return sum(a.n_bytes for a in self.allocations)

    @property
    def alloc_bytes(self) -> int:
        return sum(a.alloc_bytes for a in self.allocations)


def dry_run(config: OwnerConfig, watch: StopWatch, cleanup: ExitStack) -> None:
    descriptor_limit = limits.raise_descriptor_limit()
    child = LoaderChild()
    cleanup.callback(child.close)
    fit(config, child, watch, descriptor_limit)
    log(DRY_RUN_LINE)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan that fits: the backend for it, the reserve to keep while loading, and how its
    allocations are made (label, bytes)."""

    plan: Plan
    backend: Backend
    reserve: int
    create: Callable[[str, int], Memory]


def fit(config: OwnerConfig, child: LoaderChild, watch: StopWatch, descriptor_limit: int) -> Fitted:
    """Raises BudgetError."""
    backend = open_backend(config.backend, config.device)
    plan = receive_plan(child, watch, config, backend)
    backend = backend.fitted(plan.alloc_bytes)
    device = _device_budget(config, backend, child, watch)
    reserve = preflight(config, plan, backend, device)
    memories = len(plan.allocations) + len(job.BLOB_NAMES)
    limits.check_descriptors(memories, backend.fds_per_memory, descriptor_limit)
    return Fitted(plan, backend, reserve, device.create if device else backend.create)


def _device_budget(
    config: OwnerConfig, backend: Backend, child: LoaderChild, watch: StopWatch
) -> DeviceBudget | None:
    if backend.name != "vmm":
        return None
    from ds4_owner.backends.vmm import VmmBackend
    from ds4_owner.device_budget import DeviceBudget

    assert isinstance(backend, VmmBackend)
    return DeviceBudget(config, backend, lambda: measure(child, watch), watch)


def measure(child: LoaderChild, watch: StopWatch) -> tuple[int, int]:
    """The driver's free and total bytes, which only a process with a context can ask for."""
    child.send(job.Measure())
    while True:
        watch.wait([child.sock.fileno()])
        match child.receive():
            case job.Log(line=line):
                log(line)
            case job.Measured(free_bytes=free, total_bytes=total):
                return free, total
            case other:
                raise LoaderError(f"the loader sent {type(other).__name__}, expected a measure")


def receive_plan(
    child: LoaderChild, watch: StopWatch, config: OwnerConfig, backend: Backend
) -> Plan:
    """Lets the child parse and plan; logs the published lines about the plan."""
    plan = Plan()
    child.step = "planning"
    device = backend.record.uuid if backend.record is not None else ""
    child.send(job.Job(os.getpid(), config, backend.granularity, device))
    while True:
        watch.wait([child.sock.fileno()])
        match child.receive():
            case job.PlanPart(allocations=part):
                plan.allocations += part
            case job.Log(line=line):
                log(line)
            case job.Planned() as planned:
                plan.models = planned.models
                plan.scratch_bytes, plan.notes = planned.scratch_bytes, planned.notes
                return plan
            case other:
                raise LoaderError(f"the loader sent {type(other).__name__} while planning")


def _log_plan(config: OwnerConfig, plan: Plan, backend: Backend) -> None:
    for model in plan.models:
        log(
            f"{model.id} plan model={gib(model.n_bytes)} raw_tensor_ranges={gib(model.raw_bytes)}"
            f" ranges={model.raw_ranges}"
        )
        if model.replaced:
            log(f"{model.id} excluded {model.replaced} repacked tensors from raw ranges")
    for note in plan.notes:
        log(note)
    log(
        f"backend={config.backend} logical_upload={gib(plan.n_bytes)}"
        f" allocation_plan={gib(plan.alloc_bytes)}"
    )
    log(f"pages {backend.pages}, granularity {backend.granularity}")


def preflight(
    config: OwnerConfig, plan: Plan, backend: Backend, device: DeviceBudget | None = None
) -> int:
    """Logs plan and budget; returns the reserve to keep while loading (0: no checks).

    Raises BudgetError when the plan does not fit."""
    _log_plan(config, plan, backend)
    needs = needs_of(plan, backend)
    if device is None:
        memory = budget.read_memory(tmpfs=tmpfs_folder(config))
        reserve = budget.default_reserve(config, memory.total)
        pooled = needs
    else:
        memory, reserve, pooled = device.memory(), device.default_reserve(), device.pooled(needs)
    log(budget.preflight_line(budget.need_bytes(pooled), reserve, memory))
    if config.dry_run:
        rows = [(need.what, size(need.n_bytes)) for need in needs]
        rows += [(f"have: {name}", size(n_bytes)) for name, n_bytes in memory.limits.items()]
        print_table("memory budget", [*rows, ("reserve", size(reserve))])
    if not config.preflight:
        return 0
    if device is None:
        budget.check(needs, reserve, memory)
    else:
        device.check(needs, reserve)
    return reserve


def needs_of(plan: Plan, backend: Backend) -> list[budget.Need]:
    """Everything that will be allocated, by what it is for."""
    parts: dict[str, budget.Need] = {}
    on_device = backend.fill == "device"
    for a in plan.allocations:
        if a.artifact is None:
            what = f"{a.model} raw ranges"
        elif a.artifact.kind is ArtifactKind.CPU_GROUP:
            what = f"{a.model} CPU groups"
        else:
            what = f"{a.model} artifacts {a.artifact.kind.name}"
        reserved = backend.fill == "map" and a.alloc_bytes >= HUGE_PAGE_BYTES
        what += " (reserved huge pages)" if reserved else ""
        before = parts[what].n_bytes if what in parts else 0
        parts[what] = budget.Need(what, before + a.alloc_bytes, reserved, on_device)
    return [
        *parts.values(),
        budget.Need("loader scratch", plan.scratch_bytes),
        budget.Need("contract, image, tokenizer, directory", BLOB_BYTES),
    ]


def tmpfs_folder(config: OwnerConfig) -> str | None:
    return SHM_FOLDER if config.backend == "shm" and os.path.isdir(SHM_FOLDER) else None


def print_plan(config: OwnerConfig, *, as_json: bool) -> int:
    """Prints the plan of a dry run on stdout: a line per allocation, or one JSON document."""
    with ExitStack() as cleanup:
        watch = StopWatch()
        cleanup.callback(watch.close)
        backend = open_backend(config.backend, config.device)
        child = LoaderChild()
        cleanup.callback(child.close)
        try:
            plan = receive_plan(child, watch, config, backend)
        except Stopped:
            return 0
    if as_json:
        document = {
            "backend": config.backend,
            "models": plan.models,
            "allocations": plan.allocations,
            "needs": {need.what: need.n_bytes for need in needs_of(plan, backend)},
            "on_device": [need.what for need in needs_of(plan, backend) if need.on_device],
        }
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        return 0
    for a in plan.allocations:
        kind = "raw" if a.artifact is None else f"{a.artifact.kind.name} {a.artifact.name}"
        print(f"{a.id:4} {a.model:8} at {a.source_offset:>14} {a.n_bytes:>14} bytes  {kind}")
    for need in needs_of(plan, backend):
        print(f"{need.what}: {size(need.n_bytes)}")
    return 0
