"""The machine before, between and after: memory, swap, pressure, and who uses how much.

Owns the readings that a replacement shows and compares. NVML is asked where it is installed and
works; where it is not, the list comes from /proc alone and says so. Read-only.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ds4_common.errors import CudaOutOfMemory
from ds4_owner.progress import size
from ds4_owner.replace import processes

if TYPE_CHECKING:
    from ds4_common.cuda.device import Device

SHOWN_BYTES = 256 << 20  # smaller processes that nobody marked are left out of the list
MAX_ROWS = 24
STRANGE_WEIGHTS = "uses weights of another owner, or of one that is gone; stays"


class Machine(msgspec.Struct, frozen=True):
    """Bytes, and the percentage of time in which everybody waited for memory (PSI full avg10)."""

    total: int
    available: int
    cached: int
    shared: int
    swap_total: int
    swap_free: int
    pressure: float | None  # None: this kernel does not measure it

    def __str__(self) -> str:
        swap = f"{size(self.swap_total - self.swap_free)} of {size(self.swap_total)} swap used"
        pressure = "not measured" if self.pressure is None else f"{self.pressure:.2f} %"
        return (
            f"{size(self.available)} of {size(self.total)} available, {size(self.shared)} shared,"
            f" {size(self.cached)} page cache, {swap}, memory pressure (full, 10 s) {pressure}"
        )


class Process(msgspec.Struct, frozen=True):
    """A process that uses memory. `gpu_bytes` None: it has no GPU context that NVML knows of."""

    pid: int
    user: str
    mark: str  # "" for strangers, else what it is to us
    resident_bytes: int
    shared_bytes: int
    gpu_bytes: int | None
    command: str


def read_machine(root: str = "/") -> Machine:
    """Memory, swap and pressure now. `root`: where proc is, for tests."""
    fields = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (
            line.partition(":") for line in Path(root, "proc/meminfo").read_text().splitlines()
        )
        if value.endswith("kB")
    }
    return Machine(
        total=fields["MemTotal"], available=fields["MemAvailable"], cached=fields["Cached"],
        shared=fields["Shmem"], swap_total=fields["SwapTotal"], swap_free=fields["SwapFree"],
        pressure=_pressure(root),
    )  # fmt: skip


def _pressure(root: str) -> float | None:
    try:
        text = Path(root, "proc/pressure/memory").read_text()
    except OSError:  # absent, or not enabled (psi=1)
        return None
    found = re.search(r"^full avg10=([\d.]+)", text, re.MULTILINE)
    return float(found[1]) if found else None


def device_free(device: Device) -> tuple[int, int]:
    """(free, total) bytes as the device's driver counts. It answers only in a context, which needs
    memory itself: a device too full for one has nothing free. Raises CudaError's kinds."""
    from ds4_common.cuda.device import Context

    try:
        with Context(device) as context:
            return context.memory_info()
    except CudaOutOfMemory:
        return 0, device.total_bytes


def gpu_processes() -> tuple[dict[int, int], str]:
    """(pid -> GPU bytes, where from). NVML reports no bytes on unified memory: those count as 0.

    Every failure of NVML is a reason in the second part, because /proc still has an answer."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {}, "no NVML (nvidia-ml-py is not installed); from /proc alone"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {}, f"NVML does not work here ({error}); from /proc alone"
    used: dict[int, int] = {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
                used[process.pid] = used.get(process.pid, 0) + (process.usedGpuMemory or 0)
    except nvml.NVMLError as error:
        return used, f"NVML lists no compute processes ({error}); from /proc alone"
    finally:
        nvml.nvmlShutdown()
    return used, "GPU processes from NVML, host memory from /proc"


def list_processes(marks: Mapping[int, str]) -> tuple[list[Process], str]:
    """(processes with memory worth showing, the largest first; where the list comes from)."""
    import psutil

    gpu, source = gpu_processes()
    rows: list[Process] = []
    for process in psutil.process_iter(["pid", "username", "memory_info", "cmdline", "name"]):
        info = process.info
        memory, pid = info["memory_info"], info["pid"]
        resident = memory.rss if memory else 0  # None: not ours to read
        mark = marks.get(pid) or (STRANGE_WEIGHTS if processes.uses_weights(pid) else "")
        if pid in gpu or mark or resident >= SHOWN_BYTES:
            command = " ".join(info["cmdline"] or ()) or f"[{info['name']}]"
            shared = memory.shared if memory else 0
            rows.append(
                Process(
                    pid, info["username"] or "?", mark, resident, shared,
                    gpu.get(pid), command,
                )
            )  # fmt: skip
    rows.sort(key=lambda row: (not row.mark, -(row.resident_bytes + (row.gpu_bytes or 0))))
    return rows[:MAX_ROWS], source


def process_lines(rows: list[Process]) -> list[str]:
    """A line per process, for people."""
    return [
        f"pid {row.pid} {row.user} {row.mark or 'unrelated'}: {size(row.resident_bytes)} resident"
        f" ({size(row.shared_bytes)} shared)"
        + ("" if row.gpu_bytes is None else f", {size(row.gpu_bytes)} GPU")
        + f": {row.command[:100]}"
        for row in rows
    ]
