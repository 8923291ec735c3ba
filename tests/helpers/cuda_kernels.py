"""Kernels built for the host: compiled by g++ over the fibers, loaded, run on numpy arrays.

Owns: the build (one shared library per unit and flags, kept by hash), the ctypes face of the module
table, buffers that stand for device memory, and the one switch between both places: with
DS4_TEST_GPU=1 the same tests run the same kernels on this machine's device. No assertions.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ds4_worker.cuda.compiler import SOURCES, read_sources
from ds4_worker.cuda.kernels import KERNELS, Launch, Unit

if TYPE_CHECKING:
    from helpers.cuda_device import DeviceModule

ON_DEVICE = os.environ.get("DS4_TEST_GPU") == "1"
NATIVE = Path(__file__).resolve().parents[1] / "native"
FIBERS = NATIVE / "cuda_fibers"
FLAGS = (
    "-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared",
    "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", "-DDS4_FIBERS",
)  # fmt: skip
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds4-tests"
FOLDER = CACHE / "cuda-host"


# Set by the test that repeats others under the sanitizers, in a process that has their library.
SANITIZE = os.environ.get("DS4_CUDA_SANITIZE", "")
SANITIZERS = ("-fsanitize=address,alignment", "-fno-sanitize-recover=all", "-g1")


class KernelFault(Exception):
    """A launch that did not return 0, with what the fibers say about it."""


@cache
def _machine_flags() -> tuple[str, ...]:
    """With hardware FMA where the machine has it: same bits as the C library's, and fast."""
    words = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    return ("-mfma",) if "fma" in words else ()


def build(source: Path, options: Sequence[str] = (), key: str = "") -> Path:
    """The shared library of one CUDA C++ file, built when no earlier build fits."""
    flags = (*FLAGS, *_machine_flags(), *(SANITIZERS if SANITIZE else ()), *options)
    text = [source.read_text(), key, *(p.read_text() for p in sorted(FIBERS.iterdir()))]
    text += [(NATIVE / "cuda_module_table.h").read_text(), *flags]
    target = FOLDER / f"{hashlib.sha256(chr(0).join(text).encode()).hexdigest()[:32]}.so"
    if target.exists():
        return target
    FOLDER.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        made = Path(scratch) / "made.so"
        command = [*compiler, "-x", "c++", *flags, *(f"-I{p}" for p in (FIBERS, NATIVE, SOURCES))]
        done = subprocess.run(
            [*command, str(source), "-o", str(made)], capture_output=True, text=True
        )
        if done.returncode:
            raise KernelFault(f"{shlex.join(command)}\n{done.stderr}")
        made.replace(target)
    return target


def build_unit(unit: Unit, options: Sequence[str] = ()) -> Path:
    """The shared library of a unit of the worker."""
    headers = read_sources(unit.file)[1]
    return build(SOURCES / unit.file, (*unit.options(), *options), "\0".join(headers.values()))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
    )


F32 = npt.NDArray[np.float32]

_Entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(_Launch), ctypes.POINTER(ctypes.c_void_p))


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("entry", _Entry),
        ("parameter_bytes", ctypes.POINTER(ctypes.c_uint32)),
        ("parameter_count", ctypes.c_uint32),
        ("most_threads", ctypes.c_uint32),
        ("static_shared_bytes", ctypes.c_uint32),
    )


class _Module(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("kernel_count", ctypes.c_uint32),
        ("kernels", ctypes.POINTER(_Kernel)),
    )


class HostModule:
    """A loaded library of kernels."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        table = _Module.in_dll(self._library, "ds4_cuda_module_table")
        self._kernels = {
            table.kernels[i].name.decode(): table.kernels[i] for i in range(table.kernel_count)
        }
        self._order = ctypes.c_int.in_dll(self._library, "ds4_fibers_order")
        self._library.ds4_fibers_message.restype = ctypes.c_char_p

    @property
    def names(self) -> list[str]:
        return list(self._kernels)

    def parameter_bytes(self, name: str) -> int:
        return int(self._kernels[name].parameter_bytes[0])

    def most_threads(self, name: str) -> int:
        return int(self._kernels[name].most_threads)

    def run(
        self, name: str, parameters: ctypes.Structure, launch: Launch, descending: bool = False
    ) -> None:
        """Runs the whole grid. Raises KernelFault."""
        self._order.value = int(descending)
        how = _Launch(launch.grid, launch.block, launch.shared_bytes)
        pointer = ctypes.c_void_p(ctypes.addressof(parameters))
        code = self._kernels[name].entry(ctypes.byref(how), ctypes.byref(pointer))
        if code:
            raise KernelFault(f"{name}: {code}: {self._library.ds4_fibers_message().decode()}")


@cache
def host_module(unit: Unit) -> HostModule:
    return HostModule(build_unit(unit))


def module_of(unit: Unit) -> HostModule | DeviceModule:
    """The kernels of a unit, wherever these tests run."""
    if not ON_DEVICE:
        return host_module(unit)
    from helpers import cuda_device

    return cuda_device.device_module(unit)


class Memory:
    """Arrays where a device would have them, or has them: aligned to 256 bytes, with room to read
    beyond."""

    def __init__(self) -> None:
        self._kept: list[npt.NDArray[np.uint8]] = []

    def put(self, values: npt.NDArray[Any]) -> int:
        """A copy's address."""
        return self._address(self.array(values.shape, values.dtype, values))

    def array(
        self, shape: tuple[int, ...] | int, dtype: Any, values: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """An array in this memory: a copy of `values`, or bytes that show when they are used."""
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = _bytes(n_bytes + 512)
        raw[:] = 0x7F
        self._kept.append(raw)
        start = -raw.ctypes.data % 256
        made: npt.NDArray[Any] = raw[start : start + n_bytes].view(dtype).reshape(shape)
        if values is not None:
            made[...] = values
        return made

    @staticmethod
    def _address(array: npt.NDArray[Any]) -> int:
        return int(array.ctypes.data)


def _bytes(n_bytes: int) -> npt.NDArray[np.uint8]:
    if not ON_DEVICE:
        return np.empty(n_bytes, np.uint8)
    from helpers import cuda_device

    return cuda_device.pinned_bytes(n_bytes)


def address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def launch(name: str, p: ctypes.Structure, descending: bool = False) -> None:
    """One kernel with its parameters, over the grid that these ask for."""
    kernel = KERNELS[name]
    module_of(Unit(kernel.file)).run(name, p, kernel.launch(p), descending)
