"""The journal of a replacement: JSON lines, each on disk before the next step begins.

Owns the file, its lock (one replacement at a time) and what it means for `--resume`. The file is
the only state: whoever reads it knows what was seen, done and refused. It holds the command lines
and DS4_* variables of workers, which may include API keys, so its mode is 0600. Refuses a journal
that is damaged anywhere but in its last line, which a crash may have cut.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ds4_common.errors import Ds4Error, UsageError

Kind = Literal["plan", "begin", "saw", "done", "refused", "end"]


_START = b'{"time":'


class JournalBusy(Ds4Error):
    """Another replacement is running with this journal."""


class Event(msgspec.Struct, frozen=True):
    """`time` in seconds since the epoch; `step` "" for events of the whole run."""

    time: float
    run: str
    kind: Kind
    step: str = ""
    facts: dict[str, Any] = msgspec.field(default_factory=dict)


class Journal:
    """An open journal. A context manager; its lock ends with it."""

    def __init__(self, path: str) -> None:
        """Raises UsageError when the file cannot be opened or read, JournalBusy."""
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise UsageError(f"journal {path}: {error.strerror}; choose one with --log") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.events = self._read()
        except BlockingIOError:
            os.close(self._fd)
            raise JournalBusy(f"another replacement is running: it holds {path}") from None
        except BaseException:
            os.close(self._fd)
            raise
        self.run = self.events[-1].run if self.events else ""

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, kind: Kind, step: str = "", /, **facts: Any) -> None:
        """Appends an event and returns when it is on disk."""
        event = Event(round(time.time(), 3), self.run, kind, step, facts)
        line = msgspec.json.encode(event) + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]
        os.fsync(self._fd)
        self.events.append(event)

    def unfinished(self) -> list[Event]:
        """The events of the last run when it did not end, else nothing."""
        events = [event for event in self.events if event.run == self.run]
        return [] if any(event.kind == "end" for event in events) else events

    def every(self, kind: Kind, step: str) -> list[Mapping[str, Any]]:
        """Facts of this run's such events, in order."""
        return [e.facts for e in self.events if (e.run, e.kind, e.step) == (self.run, kind, step)]

    def facts(self, kind: Kind, step: str = "") -> Mapping[str, Any] | None:
        """Of this run's last such event."""
        for event in reversed(self.events):
            if (event.run, event.kind, event.step) == (self.run, kind, step):
                return event.facts
        return None

    def _read(self) -> list[Event]:
        data = b""
        while chunk := os.pread(self._fd, 1 << 20, len(data)):
            data += chunk
        *lines, cut = data.split(b"\n")
        events = []
        for number, line in enumerate(lines, 1):
            try:
                events.append(msgspec.json.decode(line, type=Event))
            except msgspec.DecodeError as error:
                raise UsageError(
                    f"{self.path}: line {number} is not of a replacement's journal: {error};"
                    " choose another file with --log"
                ) from error
        if cut and not cut.startswith(_START[: len(cut)]):
            raise UsageError(f"{self.path}: not a journal; choose another file with --log")
        if cut:  # a crash while writing: that event did not happen
            os.ftruncate(self._fd, len(data) - len(cut))
        return events


def steps_done(events: list[Event]) -> set[str]:
    """Steps that are done and were not begun again since."""
    last = {event.step: event.kind for event in events if event.kind in ("begin", "done")}
    return {step for step, kind in last.items() if kind == "done"}
