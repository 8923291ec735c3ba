"""The guard's JSONL log: one object a line, every line fsynced.

Owns the log file. Lines are written by a thread, because an fsync can hang for seconds on a host
that runs out of memory, which is when the guard must keep looking. Refuses to lose a line in
silence: the first failure is kept in `failure` for the guard to act on.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from queue import SimpleQueue

import msgspec

from ds4_common.errors import GuardRefusal

CLOSE_SECONDS = 5.0  # for a disk that hangs; a line lost here was not written by a live disk


class Log:
    """`path` None: no file, every call does nothing."""

    def __init__(self, path: str | None) -> None:
        """Raises GuardRefusal when the file cannot be opened."""
        self.path = path
        self.failure: OSError | None = None
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer: threading.Thread | None = None
        self._fd = -1
        if path is not None:
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(path, flags, 0o600)  # it holds the command's arguments
            except OSError as error:
                raise GuardRefusal(f"cannot open --log {path}: {error.strerror}") from error
            self._is_file = stat.S_ISREG(os.fstat(self._fd).st_mode)  # pipes cannot be synced

    def write_now(self, event: str, **fields: object) -> None:
        """Writes before anything depends on it. Raises GuardRefusal."""
        if self._fd >= 0:
            try:
                self._append(_line(event, fields))
            except OSError as error:
                raise GuardRefusal(f"cannot write --log {self.path}: {error.strerror}") from error

    def start(self) -> None:
        """Starts the writer. It inherits the caller's signal mask."""
        if self._fd >= 0:
            self._writer = threading.Thread(target=self._run, name="log", daemon=True)
            self._writer.start()

    def write(self, event: str, **fields: object) -> None:
        """Hands a line to the writer; never blocks."""
        if self._writer is not None:
            self._lines.put(_line(event, fields))

    def close(self) -> None:
        """Waits until every line is on disk, at most CLOSE_SECONDS."""
        if self._writer is not None:
            self._lines.put(None)
            self._writer.join(CLOSE_SECONDS)
            if self._writer.is_alive():
                self.failure = TimeoutError(None, f"no answer for {CLOSE_SECONDS:.0f} s")
                return
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if self.failure is None:
                try:
                    self._append(line)
                except OSError as error:
                    self.failure = error

    def _append(self, line: bytes) -> None:
        while line:  # a full disk takes a part first, then says so
            line = line[os.write(self._fd, line) :]
        if self._is_file:
            os.fsync(self._fd)


def _line(event: str, fields: dict[str, object]) -> bytes:
    return msgspec.json.encode({"time": round(time.time(), 3), "event": event, **fields}) + b"\n"
