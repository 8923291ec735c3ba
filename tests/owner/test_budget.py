"""The memory budget: the smallest limit counts, and a plan that does not fit is refused."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.errors import BackendError, BudgetError
from ds4_owner import budget
from ds4_owner import limits as owner_limits
from ds4_owner.budget import Memory, Need
from ds4_owner.cli import parse

GIB = 1 << 30
sizes = st.integers(0, 1 << 45)
limits = st.none() | sizes


@given(sizes, limits, limits)
def test_the_budget_is_never_above_any_limit(
    available: int, cgroup: int | None, tmpfs: int | None
) -> None:
    memory = Memory(1 << 45, available, cgroup, tmpfs)
    known = [limit for limit in (available, cgroup, tmpfs) if limit is not None]
    assert memory.budget == min(known)


@given(sizes, sizes, st.integers(1, 1 << 40))
def test_a_plan_is_refused_exactly_when_it_and_the_reserve_exceed_the_budget(
    needed: int, available: int, reserve: int
) -> None:
    memory = Memory(1 << 45, available)
    if available >= needed + reserve:
        budget.check([Need("x", needed)], reserve, memory)
    else:
        with pytest.raises(BudgetError, match="refusing upload; not enough allocatable CUDA"):
            budget.check([Need("x", needed)], reserve, memory)


def test_a_reserve_of_zero_disables_the_check() -> None:
    budget.check([Need("x", 1 << 50)], 0, Memory(GIB, GIB))


def test_the_refusal_names_the_smallest_limit() -> None:
    memory = Memory(64 * GIB, 60 * GIB, cgroup_left=2 * GIB)
    with pytest.raises(BudgetError, match=r"got 2\.00 GiB, the cgroup limit; short by 2\.00 GiB"):
        budget.check([Need("x", 3 * GIB)], GIB, memory)


def test_the_preflight_line_is_the_published_one() -> None:
    line = budget.preflight_line(GIB, 2 * GIB, Memory(64 * GIB, 60 * GIB, tmpfs_left=5 * GIB))
    assert re.fullmatch(
        r"memory preflight full upload plan need=1\.00 GiB reserve=2\.00 GiB free=60\.00 GiB"
        r" budget=5\.00 GiB total=64\.00 GiB integrated=1",
        line,
    )


@pytest.mark.parametrize(
    ("flags", "total", "expected"),
    [
        ((), 24 * GIB, 24 * GIB // 10),
        ((), 1024 * GIB, 32 * GIB),
        (("--reserve-gb", "32"), 24 * GIB, 32 * GIB),
        (("--reserve-gb", "0"), 24 * GIB, 0),
        (("--backend", "vmm"), 24 * GIB, 32 * GIB),
    ],
)
def test_the_default_reserve_leaves_room_on_small_hosts(
    flags: tuple[str, ...], total: int, expected: int
) -> None:
    config = parse(
        ["--base", "x", "--scope", "base", "--dry-run", "--backend", "memfd", *flags], {}
    )
    assert budget.default_reserve(config, total) == expected


def test_too_few_descriptors_for_the_plan_are_refused_before_loading() -> None:
    owner_limits.check_descriptors(8, 1, 32)
    owner_limits.check_descriptors(10**6, 1, resource.RLIM_INFINITY)
    with pytest.raises(BackendError, match=r"needs 33 file descriptors .* the limit is 32"):
        owner_limits.check_descriptors(9, 1, 32)


def write_tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


MEMINFO = "MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:   800 kB\nHugePages_Free:   3\n"


def test_cgroup_v2_counts_the_tightest_level_and_reclaimable_cache(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": "5000\n",
            "sys/fs/cgroup/outer/memory.current": "4000\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 700\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "10\n",
        },
    )
    memory = budget.read_memory(root=root)
    assert memory.cgroup_left == 1700
    assert memory.budget == 1700
    assert (memory.total, memory.available) == (1000 * 1024, 800 * 1024)


def test_cgroup_v1_without_a_limit_limits_nothing(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:cpu,memory:/a\n1:cpu:/\n0::/\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1\n",
    }
    assert budget.read_memory(root=write_tree(tmp_path, files)).cgroup_left is None
    files["sys/fs/cgroup/memory/a/memory.limit_in_bytes"] = "300\n"
    files["sys/fs/cgroup/memory/a/memory.stat"] = "inactive_file 1\ntotal_inactive_file 50\n"
    assert budget.read_memory(root=write_tree(tmp_path, files)).cgroup_left == 349


def test_usage_above_a_lowered_limit_leaves_nothing(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "10\n",
            "sys/fs/cgroup/memory.current": "400\n",
        },
    )
    assert budget.read_memory(root=root).budget == 0


def test_reserved_huge_pages_are_not_asked_of_the_available_memory() -> None:
    needs = [Need("ranges", 100 * GIB, reserved=True), Need("scratch", GIB)]
    assert budget.need_bytes(needs) == GIB
    budget.check(needs, GIB, Memory(128 * GIB, 2 * GIB))
