"""What a process has open, as a set: a leak is what came and stayed.

Counts would mix a leak with whatever the garbage collector closes of earlier tests meanwhile.
"""

from __future__ import annotations

import os


def open_fds(pid: int | str = "self") -> frozenset[str]:
    """One entry per open descriptor, `NUMBER TARGET`; OSError when there is no such process."""
    directory = f"/proc/{pid}/fd"
    found = set()
    for name in os.listdir(directory):
        try:
            found.add(f"{name} {os.readlink(f'{directory}/{name}')}")
        except FileNotFoundError:
            continue  # closed meanwhile, as the descriptor of this very listing always is
    return frozenset(found)
