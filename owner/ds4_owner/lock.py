"""The lock file: one owner per lock, released by the kernel when the owner is gone.

Published rule: open with O_CREAT 0600, flock exclusive without waiting, truncate, write the pid.
The lock is the open descriptor, so a killed owner never leaves a stale lock; the file stays.
"""

from __future__ import annotations

import fcntl
import os

from ds4_common.errors import Ds4Error


class LockHeld(Ds4Error):
    """Another owner holds the lock; the message names its pid."""


def acquire(path: str) -> int:
    """Takes the lock and returns its descriptor, which the caller keeps open. Raises Ds4Error."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Ds4Error(
            f"lock open failed {path}: {error.strerror}; try another --lock-file"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise LockHeld(
            f"another weight server owns lock {path}{f' pid={holder}' if holder else ''};"
            " stop it first, or give this one its own --lock-file"
        ) from error
    except OSError as error:
        os.close(fd)
        raise Ds4Error(f"lock write failed {path}: {error.strerror}") from error
    return fd
