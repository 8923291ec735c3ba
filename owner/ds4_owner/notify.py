"""Tells a service manager how the owner is doing: the datagrams of sd_notify(3).

Owns: state changes, progress, the descriptor store's messages, the watchdog's interval. Does
nothing without NOTIFY_SOCKET; a manager that does not listen is logged and is no reason to drop the
weights. Nothing here waits for the manager for long.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from ds4_owner.progress import gib, log

SEND_SECONDS = 5.0
BARRIER_SECONDS = 5.0
STATUS_SECONDS = 1.0  # between two progress messages
EXTEND_SECONDS = 120  # how much longer a load may be silent than its last message


def notify(state: str, fds: Sequence[int] = (), *, wait: bool = True) -> bool:
    """Sends e.g. "READY=1", with descriptors; whether it was sent. `wait`: for room in the
    manager's queue. An address that begins with @ is in the abstract namespace."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            # A manager that hangs fills its queue; it must not take us along.
            limit = struct.pack("ll", int(SEND_SECONDS), 0)
            manager.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
            manager.sendmsg([state.encode()], ancillary, flags, address)
    except OSError as error:
        log(f"service manager at NOTIFY_SOCKET does not listen: {error.strerror}")
        return False
    return True


def barrier() -> None:
    """Returns when the manager has handled everything sent so far, or after a while."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        sent = notify("BARRIER=1", [writer])
    finally:
        os.close(writer)
    poll = select.poll()
    poll.register(reader, 0)  # POLLHUP: the manager closed its copy
    try:
        if sent and not poll.poll(BARRIER_SECONDS * 1000):
            log("service manager does not handle its messages")
    finally:
        os.close(reader)


def watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """How often WATCHDOG=1 is due at least, or None: this process is not watched."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isdigit() or not int(text) or pid not in ("", str(os.getpid())):
        return None
    return int(text) / 1e6


def monotonic_usec() -> int:
    return time.monotonic_ns() // 1000


class LoadNews:
    """Progress of a load, at most once a second, and that it needs more time."""

    def __init__(self) -> None:
        self._last = 0.0

    def update(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._last < STATUS_SECONDS:
            return
        self._last = now
        share = 100 * done_bytes // total_bytes if total_bytes else 0
        notify(
            f"STATUS={phase}: {share} % of {gib(total_bytes)}\n"
            f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1_000_000}"
        )
