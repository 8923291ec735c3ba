"""When to stop: signals, an operator's request, or the end of the parent process.

Owns the signal handlers and the descriptors that become readable when it is time: to stop, or (for
SIGUSR2 and operators) to reexec. Every wait of the supervisor goes through `StopWatch.wait`, so a
stop is noticed in any phase, the service manager's watchdog is served in every phase, and an idle
owner without one sleeps in one poll() without a timeout.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from ds4_owner.progress import log

PARENT_POLL_MS = 1000  # only where the kernel has no pidfd
_SIGNALS = 4096  # at once


class Stopped(Exception):
    """It is time to stop."""


class Change:
    """A flag that another thread raises and a poll() sees."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def raise_it(self) -> None:
        os.eventfd_write(self.fd, 1)

    def lower(self) -> None:
        os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class StopWatch:
    """Installs handlers for SIGINT, SIGTERM, SIGUSR2 and, unless it is ignored (nohup), SIGHUP;
    `close` restores what was there. `reexec_fd` is readable when a reexec was asked for."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # A signal that comes just before poll() sleeps would be handled when that returns: never.
        self._signalled, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self.reexec_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.can_reexec = False  # SIGUSR2 is refused, with a line in the log, until it is True
        self._beat: Callable[[], None] | None = None
        self._beat_seconds = self._next_beat = 0.0
        self._parent_pid = 0
        self._parent_fd = -1
        self._parent_polled = False
        self._previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        self._previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._on_reexec)

    def follow(self, parent_pid: int) -> None:
        """Stops when that process is gone. 0: none."""
        if not parent_pid:
            return
        self._parent_pid = parent_pid
        try:
            self._parent_fd = os.pidfd_open(parent_pid)
        except ProcessLookupError:
            self._parent_gone()
        except OSError:  # no pidfd here: _parent_lives asks once a second
            self._parent_polled = True

    def request(self) -> None:
        """Asks for a stop; from any thread or a signal handler."""
        os.eventfd_write(self._event, 1)

    def request_reexec(self) -> None:
        """Makes `reexec_fd` readable; from any thread."""
        os.eventfd_write(self.reexec_fd, 1)

    def beat_every(self, seconds: float, beat: Callable[[], None]) -> None:
        """Calls `beat` now, and at least so often during every wait."""
        self._beat, self._beat_seconds, self._next_beat = beat, seconds, 0.0
        self._beat_if_due()

    def check(self) -> None:
        """Raises Stopped when a stop was asked for."""
        self.wait((), timeout_ms=0)

    def wait(self, fds: Sequence[int], timeout_ms: int | None = None) -> list[int]:
        """The descriptors of `fds` that are readable or closed by their peer; none after
        `timeout_ms`. Raises Stopped."""
        poll = select.poll()
        for fd in (self._event, self._signalled, *fds):
            poll.register(fd, select.POLLIN)
        if self._parent_fd >= 0:
            poll.register(self._parent_fd, select.POLLIN)
        give_up = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while True:
            ready = [fd for fd, _ in poll.poll(self._patience_ms(give_up))]
            if self._signalled in ready:
                os.read(self._signalled, _SIGNALS)
                ready.remove(self._signalled)  # its handler runs before the next poll()
                if not ready:
                    continue
            self._beat_if_due()
            if self._parent_fd in ready or not self._parent_lives():
                self._parent_gone()
                raise Stopped
            if self._event in ready:
                raise Stopped
            if ready or (give_up is not None and time.monotonic() >= give_up):
                return ready

    def _patience_ms(self, give_up: float | None) -> float | None:
        """Until the next thing that is due by itself; None: nothing is."""
        now = time.monotonic()
        due = [] if give_up is None else [1000 * (give_up - now)]
        if self._parent_polled:
            due.append(PARENT_POLL_MS)
        if self._beat is not None:
            due.append(1000 * (self._next_beat - now))
        return max(0.0, min(due)) if due else None

    def _beat_if_due(self) -> None:
        now = time.monotonic()
        if self._beat is not None and now >= self._next_beat:
            self._next_beat = now + self._beat_seconds
            self._beat()

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wake)
        for fd in (self._event, self.reexec_fd, self._parent_fd, self._signalled, self._wake):
            if fd >= 0:
                os.close(fd)

    def _parent_gone(self) -> None:
        log(f"parent pid {self._parent_pid} disappeared; shutting down")
        self.request()

    def _parent_lives(self) -> bool:
        if not self._parent_polled:
            return True
        try:
            os.kill(self._parent_pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True  # it lives, as another user
        return True

    def _on_reexec(self, number: int, frame: FrameType | None) -> None:
        if self.can_reexec:
            self.request_reexec()
        else:
            log("reexec refused: the owner is not ready; ask again when it is")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request()
