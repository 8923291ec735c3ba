"""The first half: look, stop the workers, stop their owner, clear caches, look again.

Each step does one thing, prints what it saw and raises `Refused` when its verification fails; the
judgements are in `decisions`. Signals go to processes of the plan only, as identities.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ds4_common import client
from ds4_common.errors import Ds4Error, OwnerUnavailable
from ds4_common.protocol import LeaseRecord
from ds4_owner.progress import size
from ds4_owner.replace import decisions, machine, processes
from ds4_owner.replace.log import Journal
from ds4_owner.replace.machine import Machine
from ds4_owner.replace.plan import Owner, Plan

POLL_SECONDS = 0.1
CACHE_SECONDS = 300.0


class Refused(Ds4Error):
    """A verification failed; nothing after it was done."""


@dataclass(frozen=True, slots=True)
class Context:
    """What every step works with."""

    plan: Plan
    journal: Journal
    say: Callable[[str], None]

    def tell(self, text: str) -> None:
        self.say(f"  {text}")


def require(reason: str) -> None:
    """Raises Refused with the reason, if there is one."""
    if reason:
        raise Refused(reason)


def marks(plan: Plan) -> dict[int, str]:
    """pid -> what it is to this replacement."""
    found = {worker.identity.pid: f"{worker.role} to stop" for worker in plan.workers}
    if plan.owner is not None:
        found[plan.owner.identity.pid] = f"owner of {plan.old_manifest}"
    return found


def inspect(context: Context) -> dict[str, Any]:
    plan, seen = context.plan, machine.read_machine()
    rows, source = machine.list_processes(marks(plan))
    for line in (source, *machine.process_lines(rows), str(seen), *plan.notes):
        context.tell(line)
    if plan.left_out:
        context.tell(f"flags of the old model, not taken over: {', '.join(plan.left_out)}")
    return {"processes": [msgspec.to_builtins(row) for row in rows],
            "machine": msgspec.to_builtins(seen)}  # fmt: skip


def stop_workers(context: Context) -> dict[str, Any]:
    plan, settings = context.plan, context.plan.settings
    # A standby takes over when it sees its worker die: it has to go first.
    order = sorted(plan.workers, key=lambda worker: worker.role == "worker")
    for worker in order:
        places = " ".join(map(str, worker.listening)) or "no socket"
        context.tell(f"SIGTERM to {worker.role} pid {worker.identity.pid} ({places})")
    identities = [worker.identity for worker in order]
    left = processes.stop(identities, signal.SIGTERM, settings.worker_seconds)
    if left and settings.kill:
        context.tell(f"SIGKILL to {' '.join(str(process.pid) for process in left)}")
        left = processes.stop(left, signal.SIGKILL, settings.worker_seconds)
    states = {process.pid: processes.state(process) for process in left}
    require(decisions.workers_ended(left, states, settings.worker_seconds))
    had = [entry for worker in plan.workers for entry in worker.listening]
    lent = _sockets_of(plan.owner)
    require(decisions.sockets_released(had, processes.listening(), lent))
    require(decisions.nobody_attached(_leases(context)))
    context.tell(f"workers gone: {len(identities)}; the owner alone holds their sockets")
    return {"pids": [process.pid for process in identities]}


def _sockets_of(owner: Owner | None) -> set[int]:
    if owner is None or processes.state(owner.identity) == "gone":
        return set()
    return processes.socket_inodes(owner.identity.pid)


def _leases(context: Context) -> Sequence[LeaseRecord]:
    """Who uses the old owner now. One that is gone or stopped by a signal cannot say."""
    owner = context.plan.owner
    if owner is None:
        return []
    state = processes.state(owner.identity)
    if state == "running":
        try:
            with client.connect(context.plan.old_manifest, "status") as connection:
                if connection.owner_pid == owner.identity.pid:
                    return connection.status().leases
            state = "replaced at its manifest by another process"
        except OwnerUnavailable as silence:
            state = str(silence)
    context.tell(f"the owner cannot be asked for its users: it is {state}")
    return []


def stop_owner(context: Context) -> dict[str, Any]:
    owner = context.plan.owner
    if owner is None:
        context.tell("there was no owner")
        return {}
    plan, settings = context.plan, context.plan.settings
    before = context.journal.facts("saw", "stop-owner")
    if before is None:  # the first attempt: later ones may find it gone, and the memory back
        seen = msgspec.to_builtins(machine.read_machine()) | {"device_free": _device_free(owner)}
        context.journal.write("saw", "stop-owner", **seen)
        before = seen
    context.tell(f"SIGTERM to owner pid {owner.identity.pid}, {size(owner.allocated_bytes)} shared")
    left = processes.stop([owner.identity], signal.SIGTERM, settings.owner_seconds)
    state = processes.state(owner.identity)
    require(decisions.owner_ended(left, state, settings.owner_seconds))
    had = [entry for worker in plan.workers for entry in worker.listening]
    require(decisions.sockets_released(had, processes.listening(), ()))
    now = _await_memory(context, owner, msgspec.convert(before, Machine))
    context.tell(f"gone, and its memory is back: {now}")
    if owner.device_bytes and not owner.integrated:
        _await_device(context, owner, int(before.get("device_free", 0)))
    return {"machine": msgspec.to_builtins(now)}


def _await_memory(context: Context, owner: Owner, before: Machine) -> Machine:
    """Waits for memory that returns late; raises Refused at the deadline."""
    memory = {processes.Shared(device, inode) for device, inode in owner.memory}
    give_up = time.monotonic() + context.plan.settings.memory_seconds
    while True:
        found, hidden = processes.holders(memory)
        held = {pid: " ".join(processes.command_line(pid)) for pid in found}
        now = machine.read_machine()
        on_gpu = owner.identity.pid in machine.gpu_processes()[0]
        reason = (
            decisions.memory_unheld(held)
            or (f"NVML still lists pid {owner.identity.pid}" if on_gpu else "")
            or decisions.memory_returned(owner.expected_bytes, before, now)
        )
        if not reason:
            break
        if time.monotonic() > give_up:
            raise Refused(reason)
        time.sleep(POLL_SECONDS)
    if hidden:
        context.tell(f"processes that could not be looked into: {hidden}")
    return now


def _device_free(owner: Owner) -> int:
    """Of the owner's device, when that has memory of its own; else 0."""
    if not owner.device_uuid or owner.integrated:
        return 0
    from ds4_common.cuda.device import find

    return machine.device_free(find(owner.device_uuid))[0]


def _await_device(context: Context, owner: Owner, before: int) -> None:
    """Waits for memory of a device of its own. Nobody can say who holds what is missing, or whether
    another program took it meanwhile, so the deadline is no refusal: the budget has the last word,
    on what the driver says is free then."""
    give_up = time.monotonic() + context.plan.settings.memory_seconds
    while True:
        missing = decisions.device_missing(owner.device_bytes, before, _device_free(owner))
        if not missing or time.monotonic() > give_up:
            break
        time.sleep(POLL_SECONDS)
    if missing:
        context.tell(
            f"of the {size(owner.device_bytes)} on its device, {size(missing)} did not come back"
            f" within {context.plan.settings.memory_seconds:g} s: a process still maps them, or"
            " another program took them (nvidia-smi lists who is there)"
        )
    else:
        context.tell(f"its {size(owner.device_bytes)} on {owner.device_uuid} are free again")


def clear_cache(context: Context) -> dict[str, Any]:
    command = context.plan.settings.clear_cache
    if not command:
        cached = size(machine.read_machine().cached)
        context.tell(
            f"no command to clear caches; {cached} of page cache count as available to host"
            " memory, but not always to a GPU driver: --clear-cache-cmd COMMAND gives it back first"
        )
        return {"command": []}
    text = shlex.join(command)
    context.tell(f"running {text}")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=CACHE_SECONDS,
        )  # fmt: skip
    except OSError as error:
        raise Refused(f"clear-cache command {text}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Refused(f"clear-cache command {text} ran longer than {CACHE_SECONDS:g} s") from error
    said = (done.stdout + done.stderr).strip()
    for line in said.splitlines()[:10]:
        context.tell(f"| {line}")
    if done.returncode:
        raise Refused(
            f"clear-cache command {text}: exit code {done.returncode}: {said[-500:]}. Mend it, or"
            " --resume with another --clear-cache-cmd ('' for none)"
        )
    return {"command": list(command)}


def recheck(context: Context) -> dict[str, Any]:
    give_up = time.monotonic() + context.plan.settings.memory_seconds
    while True:
        seen = machine.read_machine()
        reason = decisions.calm(seen)
        if not reason or time.monotonic() > give_up:
            break
        time.sleep(POLL_SECONDS)
    context.tell(str(seen))
    require(reason)
    return {"machine": msgspec.to_builtins(seen)}
