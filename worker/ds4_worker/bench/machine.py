"""The machine's own ceilings, measured in the run that uses them.

Owns: plain read bandwidth (native/bandwidth.c) and the rate of a plain file copy. Neither looks at
our own code paths, so a figure given as a share of them cannot flatter itself.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from pathlib import Path

from ds4_common.errors import Ds4Error
from ds4_common.native.lib import load


def read_bandwidth(threads: int, megabytes: int = 512, rounds: int = 7) -> float:
    """Best plain read rate in bytes/s over `megabytes` MiB of anonymous memory."""
    function = load().ds4_read_bandwidth
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_int)
    rate = float(function(megabytes << 20, threads, rounds))
    if rate <= 0:
        raise Ds4Error(f"read bandwidth: cannot measure with {megabytes} MiB and {threads} threads")
    return rate


def warm_page_cache(path: Path) -> None:
    """Reads a file once so that the next reader finds it in the page cache."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(4 << 20)
        while file.readinto(buffer):
            pass


def copy_rate(path: Path, folder: Path = Path("/dev/shm")) -> float:
    """Bytes/s of `cp` of a warm file to a new tmpfs file (the reference for loading weights)."""
    warm_page_cache(path)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        start = time.perf_counter()
        subprocess.run(["cp", "--", path, scratch], check=True)
        return path.stat().st_size / (time.perf_counter() - start)
