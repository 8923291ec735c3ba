"""The loader child's end of the packets between it and its owner (job.py)."""

from __future__ import annotations

import socket
import sys
import time

from ds4_common import fdpass
from ds4_owner import job

PROGRESS_SECONDS = 0.1  # between two reports, at least


class Channel:
    """Sends to the owner and receives from it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._last_progress = 0.0

    def receive(self) -> tuple[job.ToChild, list[int]]:
        """The next packet and its descriptors. Exits when the owner is gone or has no more use."""
        data, fds = fdpass.receive(self._sock)
        if not data:
            sys.exit(0)
        return job.decode_to_child(data), fds

    def send(self, message: job.ToOwner) -> None:
        fdpass.send(self._sock, job.encode(message))

    def log(self, line: str) -> None:
        self.send(job.Log(line))

    def progress(self, phase: str, done_bytes: int, total_bytes: int, *, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self.send(job.Progress(phase, done_bytes, total_bytes))
