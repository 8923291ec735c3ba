"""Whether this machine can share device memory at all, asked without loading the bindings.

Owns the choice of the default backend's condition, and the refusal of `ipc`.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.util import find_spec

LIBRARY = "libcuda.so.1"
IPC_REFUSAL = (
    "backend ipc: such handles end with the CUDA context of the process that made them, and the"
    " resident owner has none; use --backend vmm, which workers of the same age read too"
)


def usable() -> bool:
    """True when there is a driver with a device, and the bindings to talk to it."""
    return driver_found() and bindings_found()


def bindings_found() -> bool:
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def driver_found() -> bool:
    """True when the CUDA driver library loads, initialises and reports a device."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )
