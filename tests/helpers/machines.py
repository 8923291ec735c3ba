"""A machine that says what a test wants: the files below --root that ds4-guard reads."""

from __future__ import annotations

import os
from pathlib import Path

GIB = 1 << 30


class Machine:
    """`root` holds /proc and /sys as the guard is to see them. Every change is atomic."""

    def __init__(self, root: Path, available_gib: float = 64.0) -> None:
        self.root = root
        self.write("proc/self/cgroup", "0::/user.slice/session.scope\n")
        self.set_available(available_gib)
        self.set_pressure(0.0)

    def write(self, path: str, text: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(target.name + ".new")
        fresh.write_text(text)
        os.replace(fresh, target)
        return target

    def set_available(self, gib: float) -> None:
        kib = int(gib * GIB) // 1024
        self.write("proc/meminfo", f"MemTotal: {128 * GIB // 1024} kB\nMemAvailable: {kib} kB\n")

    def set_pressure(self, full_avg10: float) -> None:
        tail = "avg60=0.00 avg300=0.00 total=0"
        lines = f"some avg10=99.00 {tail}\nfull avg10={full_avg10:.2f} {tail}\n"
        self.write("proc/pressure/memory", lines)
