"""The state of a file on disk, by which an owner knows its shards again.

Apart from identity.py because the owner compares states at every attach, and the rest of that
module would be its slowest import.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardStat:
    """The state of a file on disk: changes when it is replaced, rewritten or touched."""

    dev: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def capture(cls, file: int | str | os.PathLike[str]) -> ShardStat:
        """Of an open descriptor or a path (links followed). OSError when there is no file."""
        s = os.stat(file)
        return cls(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)

    def changes(self, now: ShardStat) -> str:
        """What differs in `now`, as 'inode 5 -> 9, size 10 -> 12'; empty when nothing does."""
        names = {
            "dev": "device", "inode": "inode", "n_bytes": "size in bytes",
            "mtime_ns": "modification time (ns)", "ctime_ns": "change time (ns)",
        }  # fmt: skip
        return ", ".join(
            f"{label} {getattr(self, field)} -> {getattr(now, field)}"
            for field, label in names.items()
            if getattr(self, field) != getattr(now, field)
        )
