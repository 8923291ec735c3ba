"""The processes of one job: start them, find them all, signal them, reap them.

The guard is the child subreaper, so whatever a process of the job does (fork twice, setsid, lose
its parents) it stays a descendant of the guard and is found again. A signal goes through a pidfd
that was checked after it was opened, so a recycled pid is never hit. Refuses to touch children the
guard was born with (a shell that ended in `exec ds4-guard` leaves its own).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from ds4_common.errors import Ds4Error, GuardRefusal
from ds4_owner.guard import scope as scopes
from ds4_owner.guard.scope import Scope

OOM_SCORE_ADJ = 800
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4  # mlockall(2)
FIRST_PASSED_FD = 3  # sd_listen_fds(3)
_libc = ctypes.CDLL(None, use_errno=True)


class CommandError(Ds4Error):
    """The command itself cannot be run: 127 when it is not there, 126 otherwise, as shells say."""

    def __init__(self, command: str, error: OSError) -> None:
        self.exit_code = 127 if error.errno == errno.ENOENT else 126
        super().__init__(f"cannot run {command}: {error.strerror}")


class Job:
    """A started command and everything that comes from it."""

    def __init__(
        self, command: Sequence[str], scope: Scope, root: str, mask: Iterable[signal.Signals]
    ) -> None:
        """Starts `command` with the signal mask `mask`. Raises GuardRefusal or
        CommandError."""
        self._scope, self._root = scope, root
        self._me = psutil.Process()
        self._strangers = set(self._me.children())
        self.status: int | None = None  # of the command: its exit code, or 128 + signal
        self.cgroup = scope.folder
        self.protected: set[int] = set()  # pids that the kernel did not let us signal
        become_subreaper()
        self.pid = _start(command, scope, mask)
        _drop_passed_fds()

    def reap(self) -> bool:
        """Collects what ended; whether anything of the job is left."""
        if self.cgroup is None and self._scope.unit is not None and self.status is None:
            self.cgroup = scopes.locate(self._root, self.pid, self._scope.unit)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    # Without strangers this is exact: a descendant has an ancestor among us.
                    return not self._strangers or bool(self.members())
                if pid == self.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self.status = code if code >= 0 else 128 - code
        return False

    def members(self) -> list[psutil.Process]:
        """Every process of the job that a look at /proc shows."""
        found: list[psutil.Process] = []
        for child in self._me.children():
            if child not in self._strangers:
                found.append(child)
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += child.children(recursive=True)
        return found

    def terminate(self) -> None:
        """SIGTERM to every process, and SIGCONT so that stopped ones see it."""
        for process in self.members():
            self._send(process, signal.SIGTERM)
            self._send(process, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to every process; called again until `reap` says that nothing is left."""
        if self.cgroup is not None:
            scopes.kill_cgroup(self.cgroup)
        for process in self.members():
            self._send(process, signal.SIGKILL)

    def _send(self, process: psutil.Process, number: signal.Signals) -> None:
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        try:
            if process.is_running():  # still the one we saw: the pidfd cannot change any more
                signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            pass  # it ended by itself
        except PermissionError:
            self.protected.add(process.pid)
        finally:
            os.close(pidfd)


def check_command(name: str) -> None:
    """Raises CommandError for what no exec would find, whoever does the exec."""
    if shutil.which(name) is None:
        missing = shutil.which(name, mode=os.F_OK) is None
        number = errno.ENOENT if missing else errno.EACCES
        raise CommandError(name, OSError(number, os.strerror(number)))


def become_subreaper() -> None:
    """Orphans of the job become children of this process."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def lock_own_memory() -> bool:
    """Keeps the guard's pages in memory, for it must run when there is none; False if not allowed.

    Under a finite RLIMIT_MEMLOCK later allocations could fail, so it is not tried.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        return False
    return bool(_libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) == 0)


# The start of the command


def _start(command: Sequence[str], scope: Scope, mask: Iterable[signal.Signals]) -> int:
    """Forks and executes; returns the pid once the program runs."""
    reading, writing = os.pipe()  # closed by exec; carries the reason when there is none
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _become(command, scope, mask, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        failure = pipe.read().decode()
    if not failure:
        return pid
    os.waitpid(pid, 0)
    what, _, number = failure.rpartition(" ")
    error = OSError(int(number), os.strerror(int(number)))
    if what == command[0]:
        raise CommandError(what, error)
    raise GuardRefusal(f"cannot set up the job: {what}: {error.strerror}")


def _become(
    command: Sequence[str], scope: Scope, mask: Iterable[signal.Signals], report: int
) -> NoReturn:
    """The child between fork and exec."""
    what = "/proc/self/oom_score_adj"
    try:
        _raise_oom_score(Path(what))
        if scope.folder is not None:
            what = str(scope.folder / "cgroup.procs")
            Path(what).write_text(str(os.getpid()))
        if scope.kind == "rlimit":
            what = "RLIMIT_DATA"
            _limit_data(scope.limits.max_bytes)
        _readdress_passed_fds()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        what = command[0]
        argv = [*scope.prefix, *command]
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(report, f"{what} {error.errno or errno.EINVAL}".encode())
    finally:
        os._exit(1)


def _raise_oom_score(path: Path) -> None:
    """The kernel's own killer takes the job first. Never lowers what an outer guard set."""
    if int(path.read_text()) < OOM_SCORE_ADJ:
        path.write_text(str(OOM_SCORE_ADJ))


def _limit_data(max_bytes: int) -> None:
    """RLIMIT_DATA, not RLIMIT_AS: a worker maps far more read-only weights than it may allocate."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def _readdress_passed_fds() -> None:
    """Descriptors and the watchdog of a service manager are for the job, not for its guard."""
    for name in ("LISTEN_PID", "WATCHDOG_PID"):
        if os.environ.get(name) == str(os.getppid()):
            os.environ[name] = str(os.getpid())


def _drop_passed_fds() -> None:
    """The guard must not keep alive memory that its job gave back."""
    count = os.environ.get("LISTEN_FDS", "")
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and count.isdigit():
        os.closerange(FIRST_PASSED_FD, FIRST_PASSED_FD + int(count))
