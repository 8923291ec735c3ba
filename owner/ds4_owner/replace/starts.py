"""The second half: does it fit, start the owner, start the workers, ask them something.

What is started is detached, with a log file beside the manifest, and recorded before and after: a
replacement that was killed in between finds it again by its exact command line and goes on with
it. Refuses to take over an owner that it did not start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ds4_common import manifest, paths
from ds4_common.client import OwnerConnection, connect
from ds4_common.errors import Ds4Error, ManifestError, OwnerUnavailable
from ds4_owner.progress import size
from ds4_owner.replace import client, commands, decisions, processes
from ds4_owner.replace.forecast import OWNER_COMMAND, forecast
from ds4_owner.replace.plan import Plan, Worker, planned_starts
from ds4_owner.replace.processes import Identity
from ds4_owner.replace.stops import POLL_SECONDS, Context, Refused, require

APPEAR_SECONDS = 3.0  # until an owner that a killed run had just started has bound its socket
TAIL_BYTES = 1500
TELL_SECONDS = 5.0


def check_budget(context: Context) -> dict[str, Any]:
    found = forecast(context.plan, os.environ, returned=False)
    for line in found.lines:
        context.tell(line)
    if not found.fits:
        raise Refused(
            f"the next owner does not fit: {found.refusal} The old owner is stopped. Free memory"
            " and --resume, or --resume with other flags (--reserve-gb N), or go back with"
            " --resume OLD.gguf"
        )
    return msgspec.to_builtins(found)  # type: ignore[no-any-return]


# The owner


def owner_command(plan: Plan) -> list[str]:
    return [*OWNER_COMMAND, *plan.next_flags]


def start_owner(context: Context) -> dict[str, Any]:
    plan, journal = context.plan, context.journal
    begun = journal.facts("saw", "start-owner") is not None
    process = _present_owner(plan, APPEAR_SECONDS if begun else 0.0, begun=begun)
    log = paths.log_path(plan.manifest)
    offset = 0
    if process is None:
        command = owner_command(plan)
        journal.write("saw", "start-owner", command=command, log=log)
        offset = os.stat(log).st_size if os.path.exists(log) else 0
        process = _spawn(command, dict(os.environ), "/", log)
        journal.write("saw", "start-owner", process=msgspec.to_builtins(process), log=log)
        context.tell(f"started owner pid {process.pid}, log {log}")
    else:
        context.tell(f"going on with owner pid {process.pid}, started before")
    with _await_owner(context, process, log, offset) as connection:
        welcome = connection.welcome
    _check_model(plan, [file.path for model in welcome.models for file in model.files])
    _await_manifest(context, process)
    context.tell(
        f"ready: {size(welcome.allocation_bytes)} in {welcome.allocation_count} allocations,"
        f" manifest {plan.manifest}"
    )
    return {"process": msgspec.to_builtins(process), "owner_id": welcome.owner_id, "log": log}


def _present_owner(plan: Plan, appear_seconds: float, *, begun: bool) -> Identity | None:
    """The owner at the new manifest that an earlier run started. Refused for any other."""
    try:
        with connect(plan.manifest, "status", appear_seconds=appear_seconds) as connection:
            pid = connection.owner_pid
    except OwnerUnavailable:
        return None
    process = processes.identify(pid)
    if begun and process is not None and processes.command_line(pid) == owner_command(plan):
        return process
    raise Refused(
        f"an owner that this replacement did not start answers at {plan.manifest}: pid {pid}."
        f" Something started it meanwhile; stop that, then ds4-weight-server stop --manifest"
        f" {plan.manifest}, then --resume"
    )


def _spawn(command: Sequence[str], environ: Mapping[str, str], folder: str, log: str) -> Identity:
    """Starts a detached process. Raises Refused when it cannot be executed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(log, flags, 0o600)
        try:
            child = subprocess.Popen(
                command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=fd, stderr=fd,
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(fd)
    except OSError as error:
        raise Refused(f"cannot start {' '.join(command)} in {folder}: {error}") from error
    process = processes.identify(child.pid)
    child.returncode = 0  # not ours to wait for any more: it outlives us
    if process is None:
        raise Refused(f"{' '.join(command)} ended at once: {_tail(log, 0)}")
    return process


def _await_owner(context: Context, process: Identity, log: str, offset: int) -> OwnerConnection:
    """A connection to the owner once it is ready. Raises Refused when it ends, fails or is late."""
    plan = context.plan
    give_up = time.monotonic() + plan.settings.ready_seconds
    told = time.monotonic()
    while True:
        gone = processes.state(process) == "gone"
        try:
            connection = connect(plan.manifest, "inspect", wait_seconds=None)
        except OwnerUnavailable as silence:
            if gone:
                raise Refused(_ended("the next owner", process, log, offset)) from silence
            if time.monotonic() > give_up:
                raise Refused(f"the next owner is not ready in time: {silence}") from silence
            time.sleep(POLL_SECONDS)
            continue
        try:
            while connection.welcome.state == "loading" and time.monotonic() < give_up:
                welcome = connection.wait_ready(1.0)
                if time.monotonic() > told + TELL_SECONDS:
                    told = time.monotonic()
                    p = welcome.progress
                    context.tell(f"{p.phase}: {size(p.done_bytes)} of {size(p.total_bytes)}")
            _check_ready(connection, process, plan)
        except OwnerUnavailable as silence:
            connection.close()
            if processes.state(process) == "gone":
                raise Refused(_ended("the next owner", process, log, offset)) from silence
            raise Refused(f"the next owner, pid {process.pid}: {silence}; log {log}") from silence
        except BaseException:
            connection.close()
            raise
        return connection


def _check_ready(connection: OwnerConnection, process: Identity, plan: Plan) -> None:
    welcome = connection.welcome
    if connection.owner_pid != process.pid:
        raise Refused(
            f"pid {connection.owner_pid} answers at {plan.manifest}, expected {process.pid}"
        )
    if welcome.state != "ready":
        raise OwnerUnavailable(welcome.reason or f"still {welcome.state} after the deadline")


def _check_model(plan: Plan, files: Sequence[str]) -> None:
    """Does the owner serve the file that was asked for?"""
    if not any(os.path.exists(file) and os.path.samefile(file, plan.model) for file in files):
        raise Refused(f"the owner serves {', '.join(files)}, expected {plan.model}")


def _await_manifest(context: Context, process: Identity) -> None:
    """The manifest is written after the broker is ready; workers need both."""
    give_up = time.monotonic() + context.plan.settings.ready_seconds
    path = context.plan.manifest
    while True:
        try:
            if manifest.read_manifest(path).owner.pid == process.pid:
                return
            reason = "it still names another owner"
        except ManifestError as error:
            reason = str(error)
        if processes.state(process) == "gone" or time.monotonic() > give_up:
            raise Refused(f"the next owner wrote no manifest: {reason}")
        time.sleep(POLL_SECONDS)


def _ended(what: str, process: Identity, log: str, offset: int) -> str:
    return f"{what}, pid {process.pid}, ended before it was ready: {_tail(log, offset)} (log {log})"


def _tail(log: str, offset: int) -> str:
    """The end of what was logged after `offset`."""
    try:
        with open(log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset, end - TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "it said nothing"
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"


def owner_died(context: Context) -> bool:
    """Whether the next owner was ready, and is gone now. Free memory has to be looked at again."""
    done = context.journal.facts("done", "start-owner")
    if done is None or processes.state(msgspec.convert(done["process"], Identity)) != "gone":
        return False
    context.say(f"the next owner, pid {done['process']['pid']}, is gone: it is started again")
    return True


# The workers


def stop_orphans(context: Context) -> None:
    """Ends workers that this replacement started for an owner that is gone: they still have its
    memory and its sockets. Raises Refused when one does not end."""
    started = [
        msgspec.convert(facts["process"], Identity)
        for facts in context.journal.every("saw", "start-workers")
        if "process" in facts
    ]
    settings = context.plan.settings
    left = processes.stop(started, signal.SIGTERM, settings.worker_seconds)
    if left and settings.kill:
        left = processes.stop(left, signal.SIGKILL, settings.worker_seconds)
    states = {process.pid: processes.state(process) for process in left}
    require(decisions.workers_ended(left, states, settings.worker_seconds))


def start_workers(context: Context) -> dict[str, Any]:
    plan = context.plan
    starts = planned_starts(plan)
    if not starts:
        context.tell(_why_none(plan))
    taken: set[int] = set()
    started = []
    for number, (old, start) in enumerate(starts, 1):
        log = f"{plan.manifest}.worker{'' if number == 1 else f'-{number}'}.log"
        process = _present_worker(plan, start, taken)
        offset = os.stat(log).st_size if os.path.exists(log) else 0
        if process is None:
            command = list(start.argv)
            context.journal.write("saw", "start-workers", command=command, log=log)
            context.tell(f"starting {' '.join(command)}")
            process = _spawn(command, _environment(old, start), _folder(old), log)
            context.journal.write(
                "saw", "start-workers", process=msgspec.to_builtins(process), log=log
            )
            context.tell(f"worker pid {process.pid}, log {log}")
        else:
            context.tell(f"going on with worker pid {process.pid}, started before")
        taken.add(process.pid)
        address = _await_worker(context, old, process, log, offset)
        context.tell(f"worker pid {process.pid} answers at {address}" if address else "standing by")
        started.append({"process": msgspec.to_builtins(process), "address": address, "log": log,
                        "key_from": number - 1})  # fmt: skip
    for worker in plan.workers:
        if (
            plan.settings.worker_command is None
            and not commands.split_program(worker.argv, commands.WORKER_PROGRAMS)[0]
        ):
            context.tell(f"not started again, being no ds4-server: {' '.join(worker.argv)[:200]}")
    return {"workers": started}


def _why_none(plan: Plan) -> str:
    if not plan.settings.with_worker:
        return "no worker wanted (--no-worker)"
    return "no ds4-server ran before, so none is started; --worker-cmd COMMAND starts one"


def _present_worker(plan: Plan, start: commands.WorkerStart, taken: set[int]) -> Identity | None:
    """One that a killed run started: it leases, and its command line is exactly ours."""
    with connect(plan.manifest, "status") as connection:
        leases = connection.status().leases
    for lease in leases:
        if lease.pid not in taken and processes.command_line(lease.pid) == list(start.argv):
            return processes.identify(lease.pid)
    return None


def _environment(old: Worker | None, start: commands.WorkerStart) -> dict[str, str]:
    """The worker's own variables over ours; of ours, none that would change what it serves."""
    if old is None:
        return start.environment
    mine = {name: value for name, value in os.environ.items() if not name.startswith("DS4_")}
    return mine | start.environment


def _folder(old: Worker | None) -> str:
    return os.getcwd() if old is None else old.folder


def _await_worker(
    context: Context, old: Worker | None, process: Identity, log: str, offset: int
) -> str:
    """Where it answers `/health` with 200; "" for a standby, which only leases."""
    plan = context.plan
    give_up = time.monotonic() + plan.settings.ready_seconds
    reason = "it does not lease the owner's memory"
    while True:
        if processes.state(process) == "gone":
            said = _ended("the worker", process, log, offset)
            raise Refused(f"{said}. --resume --worker-cmd COMMAND starts another")
        with connect(plan.manifest, "status") as connection:
            holders = {lease.pid for lease in connection.status().leases}
        mine = holders & processes.descendants(process.pid)
        if mine and old is not None and old.role == "standby":
            return ""
        for pid in mine:
            for listening in processes.listening_of(pid):
                health = client.health(listening)
                if health.pid in holders and not health.problem:
                    return str(listening)
                reason = f"{listening}: {health.problem or f'answered by pid {health.pid}'}"
        if time.monotonic() > give_up:
            raise Refused(f"worker pid {process.pid} does not answer: {reason} (log {log})")
        time.sleep(POLL_SECONDS)


def ask(context: Context) -> dict[str, Any]:
    done = context.journal.facts("done", "start-workers") or {}
    serving = [worker for worker in done.get("workers", []) if worker["address"]]
    if not serving:
        context.tell("no worker to ask")
        return {}
    starts = planned_starts(context.plan)
    answered = []
    for worker in serving:
        old, start = starts[worker["key_from"]]
        key = commands.api_key(start.argv, start.environment, _folder(old))
        try:
            answer = client.complete(worker["address"], context.plan.settings.prompt, key)
        except Ds4Error as error:
            raise Refused(
                f"worker at {worker['address']}: {error} (log {worker['log']})"
            ) from error
        context.tell(f"{worker['address']} ({answer.model}) on {context.plan.settings.prompt!r}:")
        context.tell(f"  {answer.text!r}")
        answered.append({"address": worker["address"], "model": answer.model, "text": answer.text})
    return {"answers": answered}
