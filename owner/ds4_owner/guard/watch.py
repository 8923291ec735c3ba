"""One guarded run from admission to exit code: looks, lets policy.py decide, acts, records.

Owns the loop, the signals of the guard and the order of things: act first, log afterwards. Refuses
to start a job that it could not watch, limit or record.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from ds4_common.errors import BackendError, GuardRefusal
from ds4_owner import progress
from ds4_owner.budget import read_memory
from ds4_owner.guard import scope as scopes
from ds4_owner.guard.job import Job, check_command, lock_own_memory
from ds4_owner.guard.log import Log
from ds4_owner.guard.policy import (
    EXIT_GUARD,
    Limits,
    Phase,
    Policy,
    Reason,
    Sample,
    Watch,
    admit,
    step,
)
from ds4_owner.guard.probes import take_sample
from ds4_owner.guard.scope import Scope, ScopeKind

SAMPLE_SECONDS = 1.0  # between two sample lines of the log
KILL_SECONDS = 10.0  # a process that survives SIGKILL this long hangs in the kernel
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for. Sizes in bytes; `timeout_seconds` 0: no deadline."""

    command: tuple[str, ...]
    requested: Limits
    reserve_bytes: int
    trip_bytes: int
    poll_seconds: float
    grace_seconds: float
    timeout_seconds: float
    log_path: str | None
    limit_by: ScopeKind | None  # None: the strongest that works
    root: str


def say(line: str) -> None:
    progress.log(line, "ds4-guard: ")


def guard(settings: Settings) -> int:
    """Runs the command; returns the exit code. Raises GuardRefusal or CommandError when it was not
    started."""
    check_command(settings.command[0])
    log = Log(settings.log_path)
    try:
        mask, stops = _take_signals()
        limits = _admission(settings, log)
        try:
            scope = scopes.choose(limits, settings.root, settings.limit_by)
        except BackendError as error:
            raise GuardRefusal(str(error)) from error
        try:
            return _run(settings, scope, log, mask, stops)
        finally:
            if scope.folder is not None:
                _remove(scope)
    finally:
        log.close()
        if log.failure is not None:
            say(f"the log {settings.log_path} is incomplete: {log.failure.strerror}")


def _take_signals() -> tuple[set[signal.Signals], set[signal.Signals]]:
    """Blocks what the loop waits for; returns the mask for the job, and the signals that stop it.

    A signal that was ignored on entry (nohup) stays ignored.
    """
    stops = {number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide the status
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, signal.SIGCHLD})
    return {signal.Signals(number) for number in mask}, stops


def _admission(settings: Settings, log: Log) -> Limits:
    """Raises GuardRefusal when the job does not fit; the log says so as well."""
    try:
        memory = read_memory(root=settings.root)
    except (OSError, KeyError) as error:
        raise GuardRefusal(f"cannot read the memory of this machine: {error}") from error
    limits = admit(settings.requested, settings.reserve_bytes, memory.budget)
    gib = progress.gib
    if limits is None:
        limit = min(memory.limits, key=memory.limits.__getitem__)
        why = (
            f"no room for a job: {gib(memory.budget)} ({limit}) less a reserve of"
            f" {gib(settings.reserve_bytes)} leaves under 0.1 GiB;"
            " stop another job or lower --reserve-gib"
        )
    elif memory.available < settings.trip_bytes:
        why = (
            f"available memory {gib(memory.available)} is already below the floor of"
            f" {gib(settings.trip_bytes)}; stop another job or lower --trip-gib"
        )
    else:
        return limits
    log.write_now(
        "refuse", why=why, available_bytes=memory.available, budget_bytes=memory.budget,
        reserve_bytes=settings.reserve_bytes, trip_bytes=settings.trip_bytes,
    )  # fmt: skip
    raise GuardRefusal(why)


def _run(
    settings: Settings,
    scope: Scope,
    log: Log,
    mask: set[signal.Signals],
    stops: set[signal.Signals],
) -> int:
    for reason in scope.passed_over:
        say(f"not by {reason}")
    say(scopes.describe(scope))
    first = take_sample(settings.root, time.monotonic())
    if first.full_avg10 is None:
        say("this kernel reports no memory pressure (PSI); only available memory is watched")
    log.write_now(
        "start", command=settings.command, guard_pid=os.getpid(), limit_by=scope.kind,
        max_bytes=scope.limits.max_bytes, high_bytes=scope.limits.high_bytes,
        reserve_bytes=settings.reserve_bytes, trip_bytes=settings.trip_bytes,
        timeout_seconds=settings.timeout_seconds, grace_seconds=settings.grace_seconds,
        available_bytes=first.available_bytes, full_avg10=first.full_avg10,
        passed_over=scope.passed_over, memory_locked=lock_own_memory(),
    )  # fmt: skip
    job = Job(settings.command, scope, settings.root, mask)
    log.start()
    deadline = first.at + settings.timeout_seconds if settings.timeout_seconds else None
    policy = Policy(settings.trip_bytes, settings.grace_seconds, deadline)
    end = _Loop(settings, policy, job, log, stops).run()
    return _conclude(end, job, scope, log)


class _Loop:
    """Waits for signals until the next look is due; ends when nothing of the job is left."""

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        job: Job,
        log: Log,
        stops: set[signal.Signals],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._policy, self._job, self._log = settings, policy, job, log
        self._stops, self._clock = stops, clock
        self._watch = Watch()
        self._next_line = 0.0
        self._give_up_at = float("inf")

    def run(self) -> Watch:
        due = self._clock()
        while True:
            info = signal.sigtimedwait(
                {*self._stops, signal.SIGCHLD}, max(0.0, due - self._clock())
            )
            if not self._job.reap():
                return self._watch
            stopped = info is not None and info.si_signo in self._stops
            asked = self._asked(stopped)
            now = self._clock()
            if now >= due or asked is not None:
                self._look(now, asked)
                due = now + self._settings.poll_seconds
            if now >= self._give_up_at:
                return self._watch

    def _asked(self, stopped: bool) -> Reason | None:
        """A reason that no look at the memory can give."""
        if self._watch.phase is not Phase.RUNNING:
            return None
        if stopped:
            return Reason.STOP
        if self._log.failure is not None:
            return Reason.LOG
        return Reason.LEFTOVERS if self._job.status is not None else None

    def _look(self, now: float, asked: Reason | None) -> None:
        sample = take_sample(self._settings.root, now)
        before, self._watch = self._watch.phase, step(self._policy, self._watch, sample, asked)
        after = self._watch.phase
        if after is Phase.KILLING:
            self._job.kill()
        elif after is not before:
            self._job.terminate()
        if after is not before:
            self._say_phase(sample)
        if after is Phase.KILLING and before is not after:
            self._give_up_at = now + KILL_SECONDS
        if now >= self._next_line:
            self._next_line = now + SAMPLE_SECONDS
            cgroup = self._job.cgroup
            self._log.write(
                "sample", pid=self._job.pid, available_bytes=sample.available_bytes,
                full_avg10=sample.full_avg10,
                job_bytes=None if cgroup is None else scopes.memory_used(cgroup),
            )  # fmt: skip

    def _say_phase(self, sample: Sample) -> None:
        reason = self._watch.reason
        assert reason is not None
        event = "terminate" if self._watch.phase is Phase.TERMINATING else "kill"
        self._log.write(
            event, reason=reason.value, available_bytes=sample.available_bytes,
            full_avg10=sample.full_avg10,
        )  # fmt: skip
        available = sample.available_bytes
        seen = "unreadable" if available is None else progress.gib(available)
        say(f"{event} job {self._job.pid}: {reason.value} (available memory {seen})")


def _conclude(end: Watch, job: Job, scope: Scope, log: Log) -> int:
    """The exit code, said and logged."""
    reason, code = end.reason, job.status
    not_entered = reason is None and scope.unit is not None and job.cgroup is None
    if not_entered:
        say("systemd-run did not start the job; its message is above")
    if (reason is not None and reason.is_trip) or not_entered or code is None:
        code = EXIT_GUARD
    left = [process.pid for process in job.members()]
    if left:
        say(f"processes {left} survived SIGKILL; they hang in the kernel or belong to another user")
    kills = 0 if job.cgroup is None else scopes.oom_kills(job.cgroup)
    if kills:
        say(f"the kernel killed {kills} of its processes at the limit; raise --max-gib")
    log.write(
        "exit", exit_code=code, job_status=job.status, reason=None if reason is None else
        reason.value, oom_kills=kills, left=left, not_permitted=sorted(job.protected),
    )  # fmt: skip
    return code


def _remove(scope: Scope) -> None:
    assert scope.folder is not None
    try:
        scopes.remove_cgroup(scope.folder)
    except OSError as error:
        say(f"the cgroup {scope.folder} stays: {error.strerror}")
