"""`--reload`: serve from a source tree, and restart by takeover whenever it changes.

Owns: one worker process, and the watch over the sources of ds4_worker and ds4_common and the paths
given besides. A change rebuilds the native library if C changed, starts a new worker, and leaves
the rest to takeover: the old worker serves until the new one is ready. A build that fails, or a
worker that ends before it is ready, changes nothing; the next change is the next try. The owner is
never touched: its sources are not watched.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import cache_from_source

import ds4_common
import ds4_worker
from ds4_common.errors import UsageError
from ds4_common.log import write_line
from ds4_common.native import lib

_LOOK_SECONDS = 0.2
_NATIVE_SUFFIXES = (".c", ".h")
_SKIPPED_SUFFIXES = (".pyc", ".so", ".o", ".swp")

Snapshot = dict[str, tuple[int, int]]  # path: modification time in ns, size


def log(text: str) -> None:
    write_line(f"ds4-server: reload: {text}")


def run(argv: Sequence[str], paths: Sequence[str]) -> int:
    """Serves with `argv` until told to stop; the exit code of the last worker."""
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(f"--reload {path}: there is no such file or folder")
    roots = [*ds4_worker.__path__, *ds4_common.__path__, *paths]
    with tempfile.TemporaryDirectory(prefix="ds4-reload-") as folder:
        with _Reload(argv, roots, os.path.join(folder, "notify")) as reload:
            return reload.run()


def snapshot(roots: Sequence[str]) -> Snapshot:
    """Every file below `roots` that somebody may edit."""
    found: Snapshot = {}
    for path in _files(roots):
        try:
            info = os.stat(path)
        except OSError:
            continue  # an editor's file that is gone again
        found[path] = (info.st_mtime_ns, info.st_size)
    return found


def _files(roots: Sequence[str]) -> Iterator[str]:
    for root in roots:
        if os.path.isfile(root):
            yield root
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            for name in names:
                if not name.startswith(".") and not name.endswith(_SKIPPED_SUFFIXES):
                    if "." in name:  # not what a build or an editor writes beside
                        yield os.path.join(folder, name)


def changed(before: Snapshot, now: Snapshot) -> list[str]:
    return sorted(p for p in before.keys() | now.keys() if before.get(p) != now.get(p))


def _drop_bytecode(paths: Sequence[str]) -> None:
    """Bytecode is known by the second and the size of its source: two edits may share both."""
    for path in paths:
        if path.endswith(".py"):
            with suppress(FileNotFoundError):
                os.unlink(cache_from_source(path))


class _Reload:
    """At most one worker serves and one is coming; those before them are finishing."""

    def __init__(self, argv: Sequence[str], roots: Sequence[str], notify_path: str) -> None:
        self._command = [sys.executable, "-P", "-m", "ds4_worker.cli", *argv]
        self._roots = roots
        self._environment = os.environ | {"NOTIFY_SOCKET": notify_path}
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._notify.bind(notify_path)
        self._notify.setblocking(False)
        self._serving: subprocess.Popen[bytes] | None = None
        self._coming: subprocess.Popen[bytes] | None = None
        self._going: list[subprocess.Popen[bytes]] = []
        self._native_stale = False
        self._stopping = False
        self._code = 0

    def __enter__(self) -> _Reload:
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._notify.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = True
        for process in self._all():
            process.send_signal(number)

    def _all(self) -> list[subprocess.Popen[bytes]]:
        return [p for p in (self._serving, self._coming, *self._going) if p is not None]

    def run(self) -> int:
        known = snapshot(self._roots)
        self._start()
        unsettled = False
        while not self._stopping:
            self._wait()
            now = snapshot(self._roots)
            if paths := changed(known, now):
                shown = ", ".join(os.path.relpath(path) for path in paths[:5])
                log(f"changed: {shown}{', ...' if len(paths) > 5 else ''}")
                self._native_stale |= any(path.endswith(_NATIVE_SUFFIXES) for path in paths)
                _drop_bytecode(paths)
                unsettled, known = True, now
            elif unsettled:  # the editor is done
                unsettled = False
                if self._build():
                    self._start()
        while self._all():
            self._wait()
        return self._code

    def _build(self) -> bool:
        """Whether the native library is that of the sources."""
        if not self._native_stale:
            return True
        script = os.path.join(os.path.dirname(lib.__file__), "build.py")
        done = subprocess.run([sys.executable, script], capture_output=True, text=True)
        if done.returncode:
            log(f"the native library cannot be built; nothing changes\n{done.stderr.strip()}")
            return False
        log("the native library is rebuilt")
        self._native_stale = False
        return True

    def _start(self) -> None:
        if self._coming is not None:  # of sources that are old by now
            self._coming.kill()
            self._going.append(self._coming)
        self._coming = subprocess.Popen(self._command, env=self._environment)

    def _wait(self) -> None:
        """Until something happened, or it is time to look at the sources."""
        select.select([self._wake, self._notify.fileno()], [], [], _LOOK_SECONDS)
        try:
            os.read(self._wake, 512)
        except BlockingIOError:
            pass  # it was not a signal
        self._hear()
        self._reap()

    def _hear(self) -> None:
        """Moves a worker that says READY=1 to the place of the one before."""
        while True:
            try:
                message = self._notify.recv(4096).decode(errors="replace").split("\n")
            except BlockingIOError:
                return
            coming = self._coming
            if coming is None or f"MAINPID={coming.pid}" not in message:
                continue
            if self._serving is not None:
                self._going.append(self._serving)
                log(f"worker pid {coming.pid} has taken over from pid {self._serving.pid}")
            self._serving, self._coming = coming, None

    def _reap(self) -> None:
        self._going = [process for process in self._going if process.poll() is None]
        if self._coming is not None and (code := self._coming.poll()) is not None:
            self._coming, self._code = None, code
            goes_on = f"pid {self._serving.pid} goes on" if self._serving else "none serves"
            log(f"the new worker ended with exit code {code} before it was ready; {goes_on}")
        if self._serving is not None and (code := self._serving.poll()) is not None:
            self._serving, self._code = None, code
            if not self._stopping and self._coming is None:
                log(f"the worker ended with exit code {code}; waiting for a change")
