"""What the guard sees of the machine, read below a root folder so that tests can present anything.

Owns /proc/pressure/memory; memory itself is read by budget.py. Refuses to guess: what cannot be
read is None, and policy.py says what that means.
"""

from __future__ import annotations

from pathlib import Path

from ds4_owner.budget import available_memory
from ds4_owner.guard.policy import Sample


def take_sample(root: str, now: float) -> Sample:
    """MemAvailable and memory pressure, seen at `now` (seconds, monotonic)."""
    try:
        available = available_memory(root)
    except (OSError, KeyError):
        available = None
    return Sample(now, available, read_full_avg10(root))


def read_full_avg10(root: str) -> float | None:
    """Percent of the last 10 s in which all tasks waited for memory; None without PSI."""
    try:
        text = Path(root, "proc/pressure/memory").read_text()
    except OSError:  # no such file, or EOPNOTSUPP where PSI is compiled in but off
        return None
    for line in text.splitlines():
        kind, *fields = line.split()
        if kind == "full":
            values = dict(field.split("=", 1) for field in fields)
            return float(values["avg10"])
    return None
