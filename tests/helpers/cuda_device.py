"""Kernels on the CUDA device of this machine, for tests that otherwise run them over fibers.

Owns: this process's context, the modules in it - compiled by NVRTC, or built by g++ where the
device is the stand-in - and pinned host memory, which a device with unified addresses reads and
writes where it lies: so a test's arrays and addresses are the same in both places. No assertions.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from ds4_common.cuda import driver
from ds4_common.cuda.device import Context, probe
from ds4_common.cuda.module import Function, Module, Parameters
from ds4_common.cuda.stream import Stream
from ds4_common.errors import CudaError
from ds4_worker.cuda.kernels import Launch, Unit
from helpers.cuda_executors import code_for
from helpers.cuda_kernels import KernelFault

_OPT_IN_BYTES = 48 << 10
_pinned: dict[int, int] = {}  # start -> end


@cache
def _context() -> tuple[Context, Stream]:
    """For the whole process: a lost context fails all that follows, as it should."""
    return Context(probe()), Stream()


def _pointers(values: ctypes.Structure) -> Iterator[tuple[str, int]]:
    """Fields that hold an address, also of structs inside."""
    for name, kind, *_ in values._fields_:
        value = getattr(values, name)
        if isinstance(value, ctypes.Structure):
            yield from _pointers(value)
        elif kind is ctypes.c_uint64 and value >> 32:
            yield name, value


class DeviceModule:
    """The kernels of a unit; `run` is that of HostModule, but threads have the device's order.

    Refuses addresses of ordinary host memory, which some devices read and others end over."""

    def __init__(self, unit: Unit) -> None:
        context, self._stream = _context()
        self._module = Module(code_for(context.device)(unit), unit.label)
        self._functions: dict[str, Function] = {}

    def run(
        self, name: str, parameters: ctypes.Structure, launch: Launch, descending: bool = False
    ) -> None:
        """Runs the whole grid and waits. Raises KernelFault."""
        for field, value in _pointers(parameters):
            if not any(start <= value < end for start, end in _pinned.items()):
                raise KernelFault(f"{name}: {field}: {value:#x} is not memory that a device sees")
        try:
            if name not in self._functions:
                self._functions[name] = self._module.function(name)
            function, (grid, block, shared_bytes) = self._functions[name], launch
            if shared_bytes > _OPT_IN_BYTES:
                function.allow_dynamic_shared(shared_bytes)
            function.launch(self._stream, grid, block, Parameters([parameters]), shared_bytes)
            self._stream.synchronize()
        except CudaError as error:
            raise KernelFault(f"{name}: {error.code}: {error}") from error


@cache
def device_module(unit: Unit) -> DeviceModule:
    return DeviceModule(unit)


def pinned_bytes(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that the device sees at the address that the host has. Freed after its last view."""
    _context()
    what = f"{n_bytes} bytes of a test"
    address = int(driver.call("cuMemHostAlloc", n_bytes, 0, what=what))
    held = (ctypes.c_uint8 * n_bytes).from_address(address)
    _pinned[address] = address + n_bytes
    weakref.finalize(held, _free, address).atexit = False
    return np.ctypeslib.as_array(held)


def _free(address: int) -> None:
    del _pinned[address]
    driver.give_back("cuMemFreeHost", address)
