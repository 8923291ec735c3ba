"""Loaded kernels: modules, functions, their attributes, prebuilt parameters, launches.

Owns: a module until it is closed. Refuses: to compile; the image is a cubin for this very device
(on the stand-in of the tests, a host library).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

from ds4_common.cuda import driver
from ds4_common.cuda.stream import Stream

Attribute = Literal[
    "MAX_THREADS_PER_BLOCK",
    "SHARED_SIZE_BYTES",
    "CONST_SIZE_BYTES",
    "LOCAL_SIZE_BYTES",
    "NUM_REGS",
    "BINARY_VERSION",
    "MAX_DYNAMIC_SHARED_SIZE_BYTES",
]
Size = tuple[int, int, int]


class Parameters:
    """A kernel's arguments in place, with the array of pointers to them that a launch takes.

    A launch copies the values before it returns, so they may be changed for the next one:
    `parameters[2].value = 7`.
    """

    def __init__(self, values: Sequence[ctypes._SimpleCData[Any] | ctypes.Structure]) -> None:
        self._values = list(values)
        self._pointers = (ctypes.c_void_p * max(len(values), 1))(
            *(ctypes.addressof(value) for value in values)
        )
        self.address = ctypes.addressof(self._pointers)

    def __getitem__(self, index: int) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)


class Function:
    """One kernel of a module."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle: Any = handle
        self.name = name

    def attribute(self, name: Attribute) -> int:
        kinds = driver.bindings().CUfunction_attribute
        kind = getattr(kinds, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(driver.call("cuFuncGetAttribute", kind, self._handle, what=self.name))

    def allow_dynamic_shared(self, n_bytes: int) -> None:
        """More than 48 KiB of dynamic shared memory per block has to be asked for."""
        kinds = driver.bindings().CUfunction_attribute
        kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        what = f"{self.name}, {n_bytes} bytes of shared memory for a block"
        driver.call("cuFuncSetAttribute", self._handle, kind, n_bytes, what=what)

    def launch(
        self,
        stream: Stream,
        grid: Size,
        block: Size,
        parameters: Parameters,
        shared_bytes: int = 0,
    ) -> None:
        driver.call(
            "cuLaunchKernel",
            self._handle,
            *grid,
            *block,
            shared_bytes,
            stream.handle,
            parameters.address,
            0,
            what=f"{self.name}, grid {grid}, block {block}",
        )


class Module:
    """Code on the device. Needs a context."""

    def __init__(self, image: bytes, label: str) -> None:
        self.label = label
        self._handle: Any = driver.call("cuModuleLoadData", image, what=label)

    def function(self, name: str) -> Function:
        """A kernel, and its code on the device: a driver that loads lazily would bring it with the
        first launch, which may be one that a graph captures."""
        what = f"{name} of {self.label}"
        handle = driver.call("cuModuleGetFunction", self._handle, name.encode(), what=what)
        driver.call("cuFuncLoad", handle, what=what)
        return Function(handle, name)

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            driver.give_back("cuModuleUnload", handle, what=self.label)
