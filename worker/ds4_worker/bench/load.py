"""Loading: bytes per second from a warm file to ready ranges, hashed and packed.

Owns: comparing the owner's own loading time (its `loaded` line: read, pack, hash, write) with `cp`
of the same file to tmpfs, alternating in one run.
"""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

from ds4_common.errors import Ds4Error
from ds4_worker.bench import machine, processes
from ds4_worker.bench.report import Row, summarise

_LOADED = re.compile(r"loaded .* in ([0-9.]+) s")


def measure(model: Path, runs: int, *flags: str) -> list[Row]:
    """GB/s of file bytes; `cp` beside it; and the whole start from exec to `ready`."""
    size = model.stat().st_size
    copies, loads, starts = [], [], []
    for _ in range(runs):
        copies.append(machine.copy_rate(model) / 1e9)
        machine.warm_page_cache(model)
        with tempfile.TemporaryDirectory(prefix="ds4-bench-") as folder:
            run = Path(folder)
            start = time.perf_counter()
            with processes.owner(model, run, *flags):
                starts.append((time.perf_counter() - start) * 1e3)
            found = _LOADED.search((run / "owner.log").read_text())
            if not found:
                raise Ds4Error(f"no `loaded` line in the log of the owner of {model}")
            loads.append(size / float(found.group(1)) / 1e9)
    reference = sorted(copies)[len(copies) // 2]
    return [
        summarise("cp to tmpfs", "GB/s", copies),
        summarise(
            "load, hashed and packed",
            "GB/s",
            loads,
            reference=reference,
            reference_name="cp",
            goal=">= 0.70",
        ),
        summarise("owner: exec to ready", "ms", starts),
    ]
