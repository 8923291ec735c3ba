"""Tells a service manager, or `--reload`, that this worker serves: READY=1 of sd_notify(3)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable


def ready(log: Callable[[str], None]) -> None:
    """Does nothing without NOTIFY_SOCKET. A manager that does not listen is told to the log only:
    it is no reason to stop serving."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.setblocking(False)
            manager.sendto(f"READY=1\nMAINPID={os.getpid()}".encode(), address)
    except OSError as error:
        log(f"service manager at NOTIFY_SOCKET does not listen: {error.strerror}")
