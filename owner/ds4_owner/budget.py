"""Does the plan fit: everything that will be allocated, against everything there is.

Pure functions over two records, plus thin probes that read the machine. The budget is the smallest
of what the kernel calls available, what the cgroups still allow and, for shm, what the tmpfs has;
never the larger of two. Refuses a plan that does not fit with the published text, then says in
plain words which limit was the smallest.

DS4_WEIGHT_SERVER_NO_PREFLIGHT and `--reserve-gb 0` report without refusing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4_common.errors import BudgetError
from ds4_owner.config import GIB, HOST_BACKENDS, OwnerConfig
from ds4_owner.progress import gib

DEFAULT_RESERVE_BYTES = 32 * GIB
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number


@dataclass(frozen=True, slots=True)
class Need:
    """One line of the budget table."""

    what: str
    n_bytes: int
    reserved: bool = False  # comes from reserved huge pages, which nobody else can have
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """What the machine has, in bytes; None where there is no such limit."""

    total: int
    available: int
    cgroup_left: int | None = None
    tmpfs_left: int | None = None
    pool: str = "available memory"
    integrated: bool = True  # one pool for owner and workers, as host memory is

    @property
    def limits(self) -> dict[str, int]:
        limits = {self.pool: self.available}
        if self.cgroup_left is not None:
            limits["cgroup limit"] = self.cgroup_left
        if self.tmpfs_left is not None:
            limits["space of /dev/shm"] = self.tmpfs_left
        return limits

    @property
    def budget(self) -> int:
        return min(self.limits.values())


def default_reserve(config: OwnerConfig, total_bytes: int) -> int:
    """`--reserve-gb`, else 32 GiB, else on host backends at most a tenth of the memory."""
    if config.reserve_bytes is not None:
        return config.reserve_bytes
    if config.backend in HOST_BACKENDS:
        return min(DEFAULT_RESERVE_BYTES, total_bytes // 10)
    return DEFAULT_RESERVE_BYTES


def need_bytes(needs: Sequence[Need]) -> int:
    """What must come from allocatable memory: reserved huge pages are not part of it."""
    return sum(need.n_bytes for need in needs if not need.reserved)


def fits(needed: int, budget: int, reserve: int) -> bool:
    """The published rule: a reserve of 0 disables the check."""
    return reserve == 0 or budget >= needed + reserve


def preflight_line(needed: int, reserve: int, memory: Memory) -> str:
    """The published line."""
    return (
        f"memory preflight full upload plan need={gib(needed)} reserve={gib(reserve)}"
        f" free={gib(memory.available)} budget={gib(memory.budget)} total={gib(memory.total)}"
        f" integrated={memory.integrated:d}"
    )


def check(needs: Sequence[Need], reserve: int, memory: Memory, where: str = "host memory") -> None:
    """Raises BudgetError when the plan and the reserve exceed the budget."""
    needed = need_bytes(needs)
    if fits(needed, memory.budget, reserve):
        return
    limit = min(memory.limits, key=memory.limits.__getitem__)
    raise BudgetError(
        "refusing upload; not enough allocatable CUDA memory for full upload plan plus reserve."
        " Stop other model processes, lower --reserve-gb, or set DS4_WEIGHT_SERVER_NO_PREFLIGHT=1."
        f" ({where}: need {gib(needed)} + reserve {gib(reserve)}; got {gib(memory.budget)},"
        f" the {limit}; short by {gib(needed + reserve - memory.budget)})"
    )


# Probes


def read_memory(*, tmpfs: str | None = None, root: str = "/") -> Memory:
    """Probes the machine. `tmpfs`: folder whose free space limits too; `root`: for tests."""
    fields = _meminfo(Path(root, "proc/meminfo").read_text())
    return Memory(
        total=fields["MemTotal"], available=fields["MemAvailable"],
        cgroup_left=cgroup_left(root), tmpfs_left=None if tmpfs is None else _space(tmpfs),
    )  # fmt: skip


def available_memory(root: str = "/") -> int:
    """MemAvailable in bytes. Raises OSError or KeyError when the kernel does not say."""
    return _meminfo(Path(root, "proc/meminfo").read_text())["MemAvailable"]


def _meminfo(text: str) -> dict[str, int]:
    fields = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return fields


def _space(folder: str) -> int:
    """Free bytes of a tmpfs; one without a size limit (f_blocks 0) limits nothing."""
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize if info.f_blocks else UNLIMITED


def cgroup_left(root: str = "/") -> int | None:
    """Bytes this process's cgroups (v2 or v1, every level up) still allow; None without a limit.

    Inactive file cache counts as free: the kernel drops it before it refuses memory.
    """
    try:
        membership = Path(root, "proc/self/cgroup").read_text()
    except OSError:
        return None
    left = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = Path(root, "sys/fs/cgroup"), ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount = Path(root, "sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        left += _levels_left(mount, path, *names)
    return min(left) if left else None


def _levels_left(mount: Path, path: str, limit: str, usage: str, prefix: str) -> list[int]:
    left = []
    level = mount / path.strip("/")
    for folder in (level, *level.parents):
        bound = _number(folder / limit)
        if bound is not None and bound < UNLIMITED:
            used = _number(folder / usage) or 0
            left.append(max(0, bound - used + _inactive_file(folder / "memory.stat", prefix)))
        if folder == mount:
            break
    return left


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None for "max" and for levels that do not have the file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _inactive_file(path: Path, prefix: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    key = f"{prefix}inactive_file "
    return next((int(line[len(key) :]) for line in lines if line.startswith(key)), 0)
