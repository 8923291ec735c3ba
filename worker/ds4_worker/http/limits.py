"""What one client, and all of them together, may ask of the HTTP server; and deadlines.

Owns: the numbers - also where this process may not have as many descriptors - the account of bodies
in memory, and a timer that is cheap to move.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable

import msgspec

# Descriptors left to files that are opened later, and to clients while they are turned away.
_SPARE_DESCRIPTORS = 16
TURNED_AWAY = _SPARE_DESCRIPTORS // 2
_USED_DESCRIPTORS = 32  # of a worker, where nobody counts them


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client, and all of them together, may ask of the server."""

    header_bytes: int = 64 << 10  # request line and headers together
    headers: int = 128
    target_bytes: int = 8 << 10  # path and query
    body_bytes: int = 64 << 20
    all_bodies_bytes: int = 256 << 20  # of requests being received or handled
    pipelined_requests: int = 64
    connections: int = 1000
    read_seconds: float = 10.0  # silence inside a request
    header_seconds: float = 30.0  # from a request's first byte to the end of its headers
    idle_seconds: float = 75.0  # between requests
    silence_seconds: float = 5.0  # in a stream, until a keepalive is sent
    linger_seconds: float = 2.0  # reading on after an error, so that the client sees the answer


def connections_that_fit(wanted: int) -> int:
    """`wanted`, or as many as this process may have descriptors for (ulimit -n); at least 1."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    try:
        used = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        used = _USED_DESCRIPTORS
    return max(1, min(wanted, limit - used - _SPARE_DESCRIPTORS))


class BodyBudget:
    """Bytes of all request bodies that are being received or handled."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class BodyShare:
    """What one connection holds of a budget."""

    __slots__ = ("_budget", "_held")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    def take(self, n_bytes: int) -> bool:
        """Counts bytes; whether all together still fit."""
        self._held += n_bytes
        self._budget.used += n_bytes
        return self._budget.used <= self._budget.limit

    def give_back(self, n_bytes: int) -> None:
        n_bytes = min(n_bytes, self._held)
        self._held -= n_bytes
        self._budget.used -= n_bytes

    def close(self) -> None:
        self.give_back(self._held)


class Deadline:
    """Calls `on_expiry` once the time that was set last is over. The timer is moved only when it
    fires, so setting it costs little per packet."""

    __slots__ = ("_loop", "_on_expiry", "_timer", "_when")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expiry: Callable[[], None]) -> None:
        self._loop = loop
        self._on_expiry = on_expiry
        self._when: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        self._when = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._when:
            self.cancel()
            self._timer = self._loop.call_at(self._when, self._fired)

    def clear(self) -> None:
        self._when = None

    def cancel(self) -> None:
        """For good, or to set it anew."""
        if self._timer is not None:
            self._timer.cancel()

    def _fired(self) -> None:
        self._timer = None
        if self._when is None:
            return
        if self._loop.time() < self._when:
            self._timer = self._loop.call_at(self._when, self._fired)
        else:
            self._on_expiry()
