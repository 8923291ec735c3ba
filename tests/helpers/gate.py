"""Lets a test decide when a `FakeExecutor` runs its next step."""

from __future__ import annotations

import threading

DEADLINE_SECONDS = 10.0


class Gate:
    """A `before_step` that lets the engine run one step per permit, until it is opened for good."""

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._open = threading.Event()
        self._permits = threading.Semaphore(0)

    def __call__(self) -> None:
        self._entered.release()
        if not self._open.is_set():
            assert self._permits.acquire(timeout=DEADLINE_SECONDS), "nobody opened the gate"

    def allow(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._permits.release()

    def open(self) -> None:
        self._open.set()
        self._permits.release()

    def wait_until_a_step_is_due(self) -> None:
        assert self._entered.acquire(timeout=DEADLINE_SECONDS), "the engine ran no step"
