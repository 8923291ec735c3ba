"""`--zygote`: a process that has imported everything a worker needs, and forks one when it must.

Owns: two children, one that serves and one that waits for its place; whenever one of them ends,
the next is forked, in milliseconds. It holds no lease, no model, no thread and no client: nothing
of it is hurt by a fork, and its own death hurts nobody - the child that serves goes on. It ends
when it is told to, or when a worker from elsewhere took over from its child. The death of a worker
is seen by the child that waits (place.py); this process only counts its children.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from ds4_common.log import write_line
from ds4_worker.config import ServerConfig

Work: TypeAlias = Callable[[ServerConfig, Callable[[str], None]], int]

_CODES = {"serving": b"s", "yielded": b"y"}  # the news of a child
_YOUNG_SECONDS = 1.0  # a child that ends before is not replaced at once
_PR_SET_PDEATHSIG = 1


class _Child(msgspec.Struct):
    """`news`: the descriptor that its news come from. `started`: when, on the monotonic clock."""

    pid: int
    news: int
    started: float
    state: Literal["starting", "serving", "yielded"]


def log(text: str) -> None:
    write_line(f"ds4-server: zygote: {text}")


def preload() -> None:
    """Imports what a worker imports on its way to the first answer. No thread may come of it."""
    import importlib

    from ds4_common.native import lib

    for name in (
        "ds4_common.contract.image",
        "ds4_worker.executor.cpu",
        "ds4_worker.private_owner",
        "ds4_worker.serve",
        "jinja2.sandbox",
    ):
        importlib.import_module(name)
    lib.load()
    gc.collect()
    gc.freeze()  # what children share stays shared


def run(config: ServerConfig, work: Work) -> int:
    """Runs workers by `work` until told to stop; the exit code of the last one that served."""
    preload()
    return _Zygote(config, work).run()


class _Zygote:
    def __init__(self, config: ServerConfig, work: Work) -> None:
        self._work = work
        self._first = msgspec.structs.replace(config, standby="off")
        waiting: Literal["hot", "cold"] = "hot" if config.standby == "hot" else "cold"
        self._next = msgspec.structs.replace(config, standby=waiting)
        self._children: dict[int, _Child] = {}
        self._stop_signal = 0
        self._fork_at: float | None = None
        self._code = 0
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        }
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> int:
        self._fork(self._first)
        while self._children or self._fork_at is not None:
            self._turn()
        return self._code

    def _turn(self) -> None:
        poll = select.poll()
        for fd in (self._wake, *(child.news for child in self._children.values())):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(self._patience_ms())}
        if self._wake in ready:
            os.read(self._wake, 512)
        for child in list(self._children.values()):
            if child.news in ready:
                self._hear(child)
        self._reap()
        if self._fork_at is not None and time.monotonic() >= self._fork_at:
            self._fork_at = None
            self._fork(self._next if self._serving() else self._first)

    def _patience_ms(self) -> float | None:
        if self._fork_at is None:
            return None
        return max(0.0, 1000 * (self._fork_at - time.monotonic()))

    def _serving(self) -> bool:
        return any(child.state == "serving" for child in self._children.values())

    def _waiting(self) -> list[_Child]:
        return [child for child in self._children.values() if child.state == "starting"]

    def _hear(self, child: _Child) -> None:
        try:
            codes = os.read(child.news, 16)
        except BlockingIOError:
            return
        for code in codes:
            if bytes([code]) == _CODES["serving"]:
                child.state = "serving"
                if not self._stop_signal and not self._waiting():
                    self._fork(self._next)
            else:
                child.state = "yielded"
                log(f"worker pid {child.pid} made room for a worker from elsewhere; ending")
                self._end_waiting()

    # --- ends -----------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGCHLD:
            return  # the descriptor wakes the loop
        again, self._stop_signal = bool(self._stop_signal), number
        if not again:
            self._end_waiting()  # first, or it would serve
        for child in self._children.values():
            os.kill(child.pid, number)

    def _end_waiting(self) -> None:
        """Kills and reaps the children that wait. They hold nothing."""
        self._fork_at = None
        for child in self._waiting() if self._serving() or not self._stop_signal else []:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            self._forget(child)

    def _forget(self, child: _Child) -> None:
        del self._children[child.pid]
        os.close(child.news)

    def _reap(self) -> None:
        for child in list(self._children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._hear(child)  # its last words
                self._forget(child)
                self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        if child.state != "starting" or not self._serving():
            self._code = code if code >= 0 else 128 - code
        if self._stop_signal or child.state == "yielded":
            return
        if child.state == "starting" and not self._children and code in (1, 2):
            return  # it could not start, and nobody else does; it has said why
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        log(f"worker pid {child.pid} ended {how}")
        if not self._waiting():
            young = time.monotonic() - child.started < _YOUNG_SECONDS
            self._fork_at = time.monotonic() + (_YOUNG_SECONDS if young else 0.0)

    # --- children -------------------------------------------------------------------------------

    def _fork(self, config: ServerConfig) -> None:
        news, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(tell)
            self._children[pid] = _Child(pid, news, time.monotonic(), "starting")
            return
        code = 1
        try:
            os.close(news)
            self._become_child(parent, waits=config.standby != "off")
            code = self._work(config, lambda what: _tell(tell, what))
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _become_child(self, parent: int, *, waits: bool) -> None:
        signal.set_wakeup_fd(-1)
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)
        for child in self._children.values():
            os.close(child.news)
        os.close(self._wake)
        if waits:  # nobody would end it, and it is of the build that goes
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)


def _tell(fd: int, what: str) -> None:
    if what == "serving":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    try:
        os.write(fd, _CODES[what])
    except BrokenPipeError:
        return  # the zygote is gone; this worker goes on
