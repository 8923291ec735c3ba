"""The profilers a worker can run under, as commands.

Owns: for each tool its command line, the file it writes, how to look at it, and how to install what
is missing. Pure, but for the search in PATH. Refuses tools that are not installed (UsageError).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds4_common.errors import UsageError

NO_TOOL = "none"
_NVTX = ("env", "DS4_NVTX=1")  # the worker names its steps for these tools


@dataclass(frozen=True, slots=True)
class Tool:
    """`prefix(report)` goes before the worker's command; `view` shows a report."""

    name: str
    suffix: str
    prefix: Callable[[str], list[str]]
    view: str
    install: str


def _nsys(report: str) -> list[str]:
    # The report is written when the worker ends; the profiler itself never has to be stopped.
    flags = ["--trace=cuda,nvtx,osrt", "--wait=primary", "--force-overwrite=true"]
    return [*_NVTX, "nsys", "profile", *flags, f"--output={report}"]


def _ncu(report: str) -> list[str]:
    flags = ["--nvtx", "--target-processes", "application-only", "--force-overwrite"]
    return [*_NVTX, "ncu", *flags, "--export", report]


def _perf(report: str) -> list[str]:
    # From Python 3.12 on the interpreter can name its own frames for perf.
    python = ["env", "PYTHONPERFSUPPORT=1"] if sys.version_info >= (3, 12) else []
    return [*python, "perf", "record", "-F", "499", "-g", "-o", report, "--"]


def _py_spy(report: str) -> list[str]:
    return ["py-spy", "record", "--native", "--format", "speedscope", "-o", report, "--"]


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "nsys", ".nsys-rep", _nsys, "nsys stats {report}",
            "Nsight Systems: https://developer.nvidia.com/nsight-systems, or the package"
            " nsight-systems-cli of NVIDIA's repository",
        ),
        Tool(
            "ncu", ".ncu-rep", _ncu, "ncu --import {report}",
            "Nsight Compute: https://developer.nvidia.com/nsight-compute, or the package"
            " nsight-compute of NVIDIA's repository",
        ),
        Tool(
            "perf", ".data", _perf, "perf report -i {report}",
            "apt-get install linux-perf (Debian) or linux-tools-generic (Ubuntu)",
        ),
        Tool(
            "py-spy", ".speedscope.json", _py_spy, "https://www.speedscope.app, with {report}",
            "pip install py-spy",
        ),
    )
}  # fmt: skip


def find_program(name: str) -> str | None:
    """Path of a program in PATH, or beside the interpreter, where pip puts it."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    return shutil.which(name) or (beside if os.access(beside, os.X_OK) else None)


def require(name: str) -> None:
    """Raises UsageError with the way to install a tool that is missing."""
    if name != NO_TOOL and find_program(name) is None:
        raise UsageError(f"--tool {name}: no program {name} here; install {TOOLS[name].install}")


def next_report(folder: str, name: str, taken: Sequence[str]) -> str:
    """`folder/worker-<n>` with the tool's suffix; no file of `taken` begins like it."""
    number = 1
    while any(entry.startswith(f"worker-{number}.") for entry in taken):
        number += 1
    return os.path.join(folder, f"worker-{number}{TOOLS[name].suffix}")


def wrapped(name: str, report: str, command: Sequence[str]) -> list[str]:
    """The worker's command under a tool that writes to `report`."""
    if name == NO_TOOL:
        return list(command)
    # A tool beside the interpreter need not be in the window's PATH.
    path = find_program(name) or name
    return [path if word == name else word for word in TOOLS[name].prefix(report)] + list(command)
