"""Device memory: shareable VMM allocations and their mappings, plain buffers, pinned host memory.

Owns: the handles and addresses it hands out, until they are closed. A failure half-way leaves
nothing behind. Refuses: sizes that are no multiple of the granularity, and descriptors that the
driver does not take for device memory.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from typing import Any

from ds4_common.cuda import driver
from ds4_common.cuda.device import Device
from ds4_common.errors import (
    CudaContextLost,
    CudaDescriptorError,
    CudaError,
    CudaGranularityError,
    CudaOutOfMemory,
)


def granularity(device: Device, *, recommended: bool = True) -> int:
    """The bytes that sizes and offsets of shareable memory on the device are multiples of."""
    flags = driver.bindings().CUmemAllocationGranularity_flags
    prefix = "CU_MEM_ALLOC_GRANULARITY_"
    flag = getattr(flags, prefix + ("RECOMMENDED" if recommended else "MINIMUM"))
    return int(driver.call("cuMemGetAllocationGranularity", _properties(device), flag))


class Allocation:
    """Device memory that can be exported and mapped. Needs no context to be made or exported.

    `close` drops this handle; the memory lives while any handle, descriptor or mapping does.
    """

    def __init__(self, handle: Any, n_bytes: int, label: str) -> None:
        self._handle: Any = handle
        self.n_bytes = n_bytes
        self.label = label

    @classmethod
    def create(cls, device: Device, n_bytes: int, label: str) -> Allocation:
        """Raises CudaOutOfMemory, and CudaGranularityError for a size the device cannot give."""
        unit = granularity(device, recommended=False)
        if n_bytes <= 0 or n_bytes % unit:
            raise CudaGranularityError(
                f"{label}: device memory comes in multiples of {unit} bytes: got {n_bytes}"
            )
        what = f"{label}, {n_bytes} bytes"
        return cls(
            driver.call("cuMemCreate", n_bytes, _properties(device), 0, what=what), n_bytes, label
        )

    @classmethod
    def import_fd(cls, borrowed_fd: int, n_bytes: int, label: str) -> Allocation:
        """Memory that another process exported; the descriptor stays the caller's.

        The driver does not tell its size: mapping more than there is fails with
        CudaDescriptorError in `Mapping`. Raises CudaDescriptorError for any other descriptor.
        """
        kind = _handle_kind()
        try:
            handle = driver.call("cuMemImportFromShareableHandle", borrowed_fd, kind, what=label)
        except (CudaOutOfMemory, CudaContextLost):
            raise
        except CudaError as error:
            raise CudaDescriptorError(
                f"{label}: descriptor {borrowed_fd} is no device memory of this machine's driver:"
                f" {error}; is the owner of the weights still the one that sent it?"
            ) from error
        return cls(handle, n_bytes, label)

    def export_fd(self) -> int:
        """A new descriptor for the memory, closed on exec (no driver promises that); closing it is
        the caller's business."""
        kind = _handle_kind()
        fd = driver.call("cuMemExportToShareableHandle", self._handle, kind, 0, what=self.label)
        os.set_inheritable(fd, False)
        return int(fd)

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise CudaError(f"{self.label}: the device memory was released")
        return self._handle

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            driver.give_back("cuMemRelease", handle, what=self.label)

    def __enter__(self) -> Allocation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Reservation:
    """A span of device addresses without memory. Needs a context."""

    def __init__(self, n_bytes: int, alignment: int = 0) -> None:
        self.n_bytes = n_bytes
        self._address: Any = driver.call(
            "cuMemAddressReserve", n_bytes, alignment, 0, 0, what=f"{n_bytes} bytes of addresses"
        )
        self.address = int(self._address)

    def close(self) -> None:
        if self.address:
            driver.give_back("cuMemAddressFree", self._address, self.n_bytes)
            self.address = 0


class Mapping:
    """An allocation at an address of its own, read-only or writable, for one device."""

    def __init__(self, allocation: Allocation, device: Device, *, writable: bool) -> None:
        self.label, self.n_bytes, self.writable = allocation.label, allocation.n_bytes, writable
        self._stack = ExitStack()
        with ExitStack() as undo:
            reservation = Reservation(allocation.n_bytes)
            undo.callback(reservation.close)
            self.address = reservation.address
            map_at(self.address, allocation)
            undo.callback(
                driver.give_back, "cuMemUnmap", self.address, self.n_bytes, what=self.label
            )
            set_access(self.address, self.n_bytes, device, writable=writable, label=self.label)
            self._stack = undo.pop_all()

    def close(self) -> None:
        self.address = 0
        self._stack.close()

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def set_access(address: int, n_bytes: int, device: Device, *, writable: bool, label: str) -> None:
    """Whether the device may write the mappings of that span; it must cover them whole."""
    types = driver.bindings()
    flags = types.CUmemAccess_flags
    access = types.CUmemAccessDesc()
    access.location = _location(device)
    access.flags = (
        flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if writable
        else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    )
    driver.call("cuMemSetAccess", address, n_bytes, [access], 1, what=label)


class DeviceBuffer:
    """Plain device memory of this process: scratch and caches. Needs a context."""

    def __init__(self, n_bytes: int, label: str) -> None:
        self.n_bytes, self.label = n_bytes, label
        self._pointer: Any = driver.call(
            "cuMemAlloc", max(n_bytes, 1), what=f"{label}, {n_bytes} bytes"
        )
        self.address = int(self._pointer)

    def close(self) -> None:
        if self.address:
            self.address = 0
            driver.give_back("cuMemFree", self._pointer, what=self.label)

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PinnedBuffer:
    """Page-locked host memory, which copies to and from the device need to be asynchronous."""

    def __init__(self, n_bytes: int, label: str) -> None:
        self.n_bytes, self.label = n_bytes, label
        flags = 0
        self.address = int(
            driver.call("cuMemHostAlloc", n_bytes, flags, what=f"{label}, {n_bytes} bytes")
        )
        array = (ctypes.c_char * n_bytes).from_address(self.address)
        self.view = memoryview(array).cast("B")

    def close(self) -> None:
        """The caller has waited for the copies that use it."""
        if self.address:
            self.view.release()
            address, self.address = self.address, 0
            driver.give_back("cuMemFreeHost", address, what=self.label)

    def __enter__(self) -> PinnedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def map_at(address: int, allocation: Allocation) -> None:
    """Puts an allocation at a reserved address; `set_access` makes it usable. Raises
    CudaDescriptorError when it is not as large as it was said to be."""
    what = f"{allocation.label}, {allocation.n_bytes} bytes"
    try:
        driver.call("cuMemMap", address, allocation.n_bytes, 0, allocation.handle, 0, what=what)
    except (CudaOutOfMemory, CudaContextLost):
        raise
    except CudaError as error:
        raise CudaDescriptorError(
            f"{allocation.label}: the device memory cannot be mapped with {allocation.n_bytes}"
            f" bytes: {error}; the descriptor is of another size than announced"
        ) from error


def _location(device: Device) -> Any:
    types = driver.bindings()
    location = types.CUmemLocation()
    location.type = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device.ordinal
    return location


def _properties(device: Device) -> Any:
    types = driver.bindings()
    properties = types.CUmemAllocationProp()
    properties.type = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _handle_kind()
    properties.location = _location(device)
    return properties


def _handle_kind() -> Any:
    kinds = driver.bindings().CUmemAllocationHandleType
    return kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
