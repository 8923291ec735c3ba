"""What a replacement concludes from what it saw: pure functions, each with one question.

Every function returns the reason not to go on, or an empty string. Nothing here reads the machine
or a clock; thresholds are named and explained here and nowhere else.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ds4_common.protocol import LeaseRecord
from ds4_owner import budget
from ds4_owner.progress import size
from ds4_owner.replace.machine import Machine
from ds4_owner.replace.processes import Identity, Listening

PRESSURE_LIMIT = 20.0  # PSI full avg10 in percent: the figure at which the memory guard trips
# Other programs allocate meanwhile: of an owner's memory this much may be unaccounted for.
SLACK_SHARE = 0.1
SLACK_BYTES = 64 << 20


def workers_ended(survivors: Sequence[Identity], states: Mapping[int, str], seconds: float) -> str:
    """Are the workers' processes gone?"""
    if not survivors:
        return ""
    pids = " ".join(str(process.pid) for process in survivors)
    who = ", ".join(f"pid {p.pid} is {states.get(p.pid, 'running')}" for p in survivors)
    return (
        f"workers still live {seconds:g} s after SIGTERM ({who}). A worker owns nothing that would"
        f" be lost: end them yourself (kill -9 {pids}), or --resume --kill"
    )


def sockets_released(
    had: Iterable[Listening], now: Iterable[Listening], held_by_owner: Collection[int]
) -> str:
    """Does nobody listen any more where the workers did, but the owner that lent the sockets? (It
    makes a second one for a path whose first one somebody removed.)"""
    others = [entry for entry in now if entry.inode not in held_by_owner]
    inodes = {entry.inode for entry in others}
    places = {entry.place for entry in others}
    for entry in had:
        if entry.inode in inodes:
            return (
                f"{entry} still listens and it is not the owner that holds the socket: another"
                f" process of the worker lives. Find it with: {_finding(entry)}"
            )
        if entry.place in places:
            return (
                f"another program listens on {entry} now; the worker could not come back there."
                f" Find it with: {_finding(entry)}"
            )
    return ""


def _finding(entry: Listening) -> str:
    """A command that shows who listens there."""
    if entry.path:
        return f"ss -lxp | grep -F {shlex.quote(entry.path)}"
    return f"ss -ltnp 'sport = :{entry.port}'"


def nobody_attached(leases: Sequence[LeaseRecord]) -> str:
    """Is the owner without users after its workers ended?"""
    if not leases:
        return ""
    who = ", ".join(f"pid {lease.pid} ({lease.command[:80]})" for lease in leases)
    return (
        f"the owner has users again: {who}. Something starts workers by itself (systemd, a"
        " supervisor, --reload): stop that first, then --resume"
    )


def owner_ended(survivors: Sequence[Identity], state: str, seconds: float) -> str:
    """Is the owner's process gone?"""
    if not survivors:
        return ""
    pid = survivors[0].pid
    stopped = f" It is stopped: kill -CONT {pid} lets it end." if state == "stopped" else ""
    return (
        f"owner pid {pid} still lives {seconds:g} s after SIGTERM (it is {state}), and its memory"
        f" with it.{stopped} If it must go: kill -9 {pid}. Then --resume"
    )


def memory_unheld(holders: Mapping[int, str]) -> str:
    """Does nobody hold the old owner's memory?"""
    if not holders:
        return ""
    who = ", ".join(f"pid {pid} ({command[:80]})" for pid, command in holders.items())
    return (
        f"the owner is gone, but its memory is still in use by {who}. Memory returns when these"
        " end: stop them, then --resume"
    )


def memory_returned(expected: int, before: Machine, now: Machine) -> str:
    """Did the machine get the owner's memory back? `expected`: bytes it had allocated."""
    gained = now.available + now.swap_free - before.available - before.swap_free
    unshared = before.shared - now.shared  # exact for host memory, whatever others allocate
    wanted = expected - _slack(expected)
    if max(gained, unshared) >= wanted:
        return ""
    return (
        f"the owner held {size(expected)}, but only {size(max(gained, unshared, 0))} came back."
        " Memory can return late: wait and --resume, or look for who holds it"
        " (grep -l memfd:ds4- /proc/*/maps)"
    )


def device_missing(expected: int, before: int, now: int) -> int:
    """Bytes that a device of its own has not given back, of `expected`; 0 when it has, but for what
    may be unaccounted for. `before`, `now`: free bytes by its driver."""
    missing = expected - (now - before)
    return missing if missing > _slack(expected) else 0


def _slack(expected: int) -> int:
    return max(SLACK_BYTES, int(expected * SLACK_SHARE))


def calm(machine: Machine) -> str:
    """Is the machine fit to load a large model?"""
    if machine.pressure is None or machine.pressure < PRESSURE_LIMIT:
        return ""
    return (
        f"memory pressure is {machine.pressure:.1f} % (full, 10 s), expected below"
        f" {PRESSURE_LIMIT:g} %: everything waits for memory. Stop what uses it, then --resume"
    )


def with_returned(
    memory: budget.Memory, n_bytes: int, *, same_cgroups: bool, tmpfs: bool
) -> budget.Memory:
    """The budget as if an owner had given `n_bytes` back. A limit that its memory does not count
    against stays as it is."""
    cgroup = memory.cgroup_left
    if cgroup is not None and same_cgroups:
        cgroup += n_bytes
    left = memory.tmpfs_left
    if left is not None and tmpfs:
        left += n_bytes
    available = min(memory.total, memory.available + n_bytes)
    return replace(memory, available=available, cgroup_left=cgroup, tmpfs_left=left)
