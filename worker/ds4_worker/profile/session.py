"""A tmux session with an owner that stays and a worker that is started over and over.

Owns: panes by role, marked by a tmux option, so that windows may be renamed and moved, and an
existing session can be joined. Panes outlive their commands and show how those ended. A worker is
ended by a signal to the worker itself: its profiler then sees it end and writes its report. No
owner is signalled, but by `close` when it is told to. Needs tmux 3.2 and libtmux.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ds4_common.errors import Ds4Error, UsageError
from ds4_worker.profile import commands, tools
from ds4_worker.profile.commands import Settings

if TYPE_CHECKING:
    import libtmux

_ROLE = "@ds4_role"  # of a pane
_SETTINGS = "@ds4_profile"  # of the session
_PANES = f"#{{pane_id}} #{{pane_pid}} #{{pane_dead}} #{{{_ROLE}}}"
_STATUS_LINES = 14
_SIZE = ("-x", "160", "-y", "50")  # until a terminal looks
_END_SECONDS = 600.0  # a profiler may take minutes to write what it saw
_INHERITED = ("PATH", "PYTHONPATH")  # a running tmux server has those of its own first terminal


@dataclass(frozen=True, slots=True)
class Pane:
    id: str
    pid: int
    dead: bool


class ProfileSession:
    """One tmux session, present or not yet."""

    def __init__(self, server: libtmux.Server, name: str) -> None:
        self._server = server
        self.name = name

    @classmethod
    def find(cls, name: str, socket_name: str | None) -> ProfileSession:
        """Raises UsageError naming what has to be installed."""
        if tools.find_program("tmux") is None:
            raise UsageError("no program tmux here; install it with: apt-get install tmux")
        try:
            import libtmux
        except ModuleNotFoundError as error:
            raise UsageError(f"{error}; install it with: pip install 'ds4[tmux]'") from error
        return cls(libtmux.Server(socket_name=socket_name), name)

    def exists(self) -> bool:
        return bool(self._server.has_session(self.name))

    def panes(self) -> dict[str, Pane]:
        """Our panes by role."""
        if not self.exists():
            return {}
        found = {}
        for line in self._tmux("list-panes", "-s", "-t", self.name, "-F", _PANES):
            id_, pid, dead, *role = line.split(" ")
            if role and role[0]:
                found[role[0]] = Pane(id_, int(pid), dead == "1")
        return found

    def settings(self) -> Settings:
        """What the session was opened with. Raises UsageError for one that is not ours."""
        stored = []
        if self.exists():
            stored = self._tmux("show-options", "-qv", "-t", self.name, _SETTINGS)
        if not stored:
            raise UsageError(
                f"there is no profiling session {self.name}; open one with: ds4-profile open"
            )
        return msgspec.json.decode(stored[0], type=Settings)

    def open(self, settings: Settings, *, owner_runs: bool) -> list[str]:
        """Opens what is missing; what runs already is left alone. Returns the roles started."""
        runs = {role for role, pane in self.panes().items() if not pane.dead}
        started = []
        if not owner_runs and "owner" not in runs:
            self._start("owner", commands.owner(settings))
            started.append("owner")
        if "worker" not in runs:
            self._start_worker(settings)
            started.append("worker")
        if "status" not in runs:
            self._start("status", commands.status(settings))
            started.append("status")
        if settings.requests and "worker" in started:
            self._start("load", commands.load(settings))
            started.append("load")
        return started

    def restart(self, settings: Settings) -> None:
        """Ends the worker, waits for the tool's report, starts another and the load again."""
        self.end_worker()
        self._start_worker(settings)
        if settings.requests:
            self._start("load", commands.load(settings))

    def end_worker(self) -> None:
        """Returns when nothing runs in the worker's pane. Raises Ds4Error when that takes long."""
        self._end("worker", _end_workers)

    def close(self, *, owner: bool) -> None:
        """Ends the worker and removes its panes; the owner of this session only when asked for."""
        self.end_worker()
        if owner:
            self._end("owner", lambda pid: os.kill(pid, signal.SIGTERM))
        for role, pane in self.panes().items():
            if role != "owner" or owner:
                self._tmux("kill-pane", "-t", pane.id)

    def _end(self, role: str, ask: Callable[[int], None]) -> None:
        pane = self.panes().get(role)
        if pane is None or pane.dead:
            return
        try:
            pidfd = os.pidfd_open(pane.pid)
        except ProcessLookupError:
            return
        try:
            ask(pane.pid)
            if not select.select([pidfd], [], [], _END_SECONDS)[0]:
                raise Ds4Error(
                    f"the {role}'s window still runs pid {pane.pid} after {_END_SECONDS:g} s; "
                    "look there, and end it with Ctrl-C"
                )
        finally:
            os.close(pidfd)

    def _start_worker(self, settings: Settings) -> None:
        os.makedirs(settings.folder, exist_ok=True)
        report = commands.report_path(settings)
        self._start("worker", commands.worker(settings, report))
        self._tmux("set-option", "-t", self.name, _SETTINGS, msgspec.json.encode(settings).decode())

    def _start(self, role: str, command: Sequence[str]) -> None:
        """Runs a command in the pane of a role, made if there is none."""
        pane = self.panes().get(role)
        id_ = self._make(role) if pane is None else pane.id
        kept = [f"{name}={os.environ[name]}" for name in _INHERITED if name in os.environ]
        environment = [word for pair in kept for word in ("-e", pair)]
        line = commands.shell_line(list(command))
        self._tmux("respawn-pane", "-k", "-t", id_, *environment, line)

    def _make(self, role: str) -> str:
        """A pane that waits for its command. It stays when that ends."""
        new = ("-d", "-P", "-F", "#{pane_id}")
        wait = "exec cat"
        worker = self.panes().get("worker")
        if not self.exists():
            made = self._tmux("new-session", *new, *_SIZE, "-s", self.name, "-n", role, wait)
        elif role == "status" and worker is not None:
            size = ("-l", str(_STATUS_LINES))
            made = self._tmux("split-window", *new, *size, "-t", worker.id, wait)
        else:
            made = self._tmux("new-window", *new, "-t", f"{self.name}:", "-n", role, wait)
        self._tmux("set-option", "-p", "-t", made[0], "remain-on-exit", "on")
        self._tmux("set-option", "-p", "-t", made[0], _ROLE, role)
        return made[0]

    def _tmux(self, *words: str) -> list[str]:
        """The lines a tmux command prints. Raises Ds4Error with what it complains about."""
        done = self._server.cmd(words[0], *words[1:])
        if done.stderr:
            raise Ds4Error(f"tmux {words[0]}: {' '.join(done.stderr)}")
        return list(done.stdout)


def _end_workers(root: int) -> None:
    """SIGTERM to the workers among a process and its descendants; to the whole group where there
    is none yet. Profilers are other programs, and end with what they profile."""
    import psutil

    interpreter = os.path.realpath(sys.executable)
    found = 0
    with suppress(psutil.NoSuchProcess):  # it ended by itself
        top = psutil.Process(root)
        for process in (top, *top.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                ours = any(w == "ds4_worker.cli" or w.endswith("/ds4-server") for w in words)
                if ours and os.path.realpath(process.exe()) == interpreter:
                    process.terminate()
                    found += 1
    if not found:
        with suppress(ProcessLookupError):
            os.killpg(root, signal.SIGINT)
