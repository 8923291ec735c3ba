"""Tensors in an owner's device memory: shown to GPU libraries, copied to the host on demand.

Owns what a `Tensor` of `weights` is when its bytes are on a device: the array interface of CUDA and
DLPack show them where they are, read-only; everything that gives host values copies them first.
Mappings, context and lease live until the last tensor, and whatever a library made from one, is
gone. Refuses consumers that cannot be told that memory is read-only.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ds4_common import dlpack
from ds4_common.allocation import Layout, TensorPlace
from ds4_common.cuda import driver
from ds4_common.cuda.ranges import DeviceRanges
from ds4_common.cuda.reading import DeviceReader
from ds4_common.errors import ProtocolError
from ds4_common.gguf.types import GgmlType
from ds4_common.weights import ELEMENTS, Tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_DTYPES: dict[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (dlpack.FLOAT, 32), GgmlType.F16: (dlpack.FLOAT, 16),
    GgmlType.F64: (dlpack.FLOAT, 64), GgmlType.BF16: (dlpack.BFLOAT, 16),
    GgmlType.I8: (dlpack.SIGNED, 8), GgmlType.I16: (dlpack.SIGNED, 16),
    GgmlType.I32: (dlpack.SIGNED, 32), GgmlType.I64: (dlpack.SIGNED, 64),
}  # fmt: skip
_BYTES = (dlpack.UNSIGNED, 8)


class _Shared:
    """The mappings of one attachment. Ends them, and with them the lease, after the last tensor."""

    def __init__(self, ranges: DeviceRanges, lease: object) -> None:
        self.ranges = ranges
        self._lease = lease
        self._lock = threading.Lock()
        # Not at exit: other code that still runs then may show the memory.
        weakref.finalize(self, _end, ranges).atexit = False

    @property
    def ordinal(self) -> int:
        return self.ranges.context.device.ordinal

    def copy(self, address: int, n_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Device bytes on the host. From any thread."""
        host = (ctypes.c_ubyte * n_bytes)()
        with self._lock:
            before = driver.call("cuCtxGetCurrent")
            self.ranges.context.enter()
            try:
                with DeviceReader() as reader:
                    reader.read_into(address, memoryview(host).cast("B"))
            finally:
                driver.call("cuCtxSetCurrent", before)
        return host


def _end(ranges: DeviceRanges) -> None:
    """In whatever thread drops the last tensor; its own context is current again afterwards."""
    before = driver.call("cuCtxGetCurrent")
    ranges.context.enter()
    ranges.close()
    driver.call("cuCtxSetCurrent", before)


class DeviceBytes:
    """Bytes on the device as they lie in the allocation, for libraries that take blocks."""

    __slots__ = ("_shared", "address", "nbytes")

    def __init__(self, shared: _Shared, address: int, n_bytes: int) -> None:
        self._shared, self.address, self.nbytes = shared, address, n_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return _interface(self.address, (self.nbytes,), "|u1")

    def __dlpack__(self, **request: Any) -> Any:
        return _dlpack(self._shared, self.address, (self.nbytes,), _BYTES, self, request)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.KDL_CUDA, self._shared.ordinal


class DeviceTensor(Tensor):
    """A tensor where it lies on the device. `raw`, `numpy` and `rows` copy to the host."""

    __slots__ = ("_bytes", "_place", "_shared")

    def __init__(self, place: TensorPlace, shared: _Shared) -> None:
        """Raises ProtocolError for a place outside the allocation."""
        held = shared.ranges[place.allocation]
        if not 0 <= place.offset <= place.offset + place.n_bytes <= held.n_bytes:
            raise ProtocolError(
                f"tensor {place.name}: {place.n_bytes} bytes at {place.offset} of allocation "
                f"{place.allocation}, which has {held.n_bytes}"
            )
        self.model, self.name, self.dims = place.model, place.name, place.dims
        self.ggml_type, self.layout, self.offset = (
            GgmlType(place.ggml_type), place.layout, place.offset,
        )  # fmt: skip
        self._place, self._shared = place, shared
        self._bytes = DeviceBytes(shared, held.address + place.offset, place.n_bytes)

    @property
    def device_memory(self) -> DeviceBytes:
        """The bytes as they lie in the allocation, in `layout`. Never a copy."""
        return self._bytes

    @property
    def memory(self) -> memoryview:
        raise TypeError(
            f"{self.name} is in device memory: device_memory shows it to GPU libraries, raw() "
            "copies it to the host"
        )

    def raw(self) -> memoryview:
        """The blocks as in the GGUF file, copied to the host by this call."""
        return self._on_host().raw()

    def rows(self, first: int, end: int) -> npt.NDArray[np.float32]:
        """Rows [first, end) as float32; of raw tensors only those are copied."""
        rows, cols = self._matrix
        if self.layout is not Layout.RAW or not 0 <= first <= end <= rows:
            return self._on_host().rows(first, end)
        row_bytes = self._bytes.nbytes // rows
        return self._on_host(first * row_bytes, (cols, end - first)).rows(0, end - first)

    def array(self) -> npt.NDArray[Any]:
        self._element()
        raise TypeError(
            f"{self.name} is in device memory, which numpy cannot show: use numpy() for a copy, or "
            "__cuda_array_interface__ or DLPack with a GPU library"
        )

    @property
    def __array_interface__(self) -> dict[str, Any]:
        raise AttributeError(f"{self.name} is in device memory")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The device's memory, read-only. Absent for types without elements that numpy knows."""
        if self.ggml_type not in ELEMENTS:
            raise AttributeError(
                f"{self.name}: {self.ggml_type.name} has no array interface; use device_memory"
            )
        return _interface(self._bytes.address, self.shape, self._element())

    def __dlpack__(self, **request: Any) -> Any:
        """A read-only DLPack capsule of the device's memory. Raises BufferError for a consumer that
        does not ask for version 1, and for types of blocks."""
        dtype = _DTYPES.get(self.ggml_type)
        if dtype is None:
            raise BufferError(
                f"{self.name}: {self.ggml_type.name} has no DLPack type; use device_memory or "
                "numpy()"
            )
        return _dlpack(self._shared, self._bytes.address, self.shape, dtype, self, request)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.KDL_CUDA, self._shared.ordinal

    def _on_host(self, at: int = 0, dims: tuple[int, ...] | None = None) -> Tensor:
        """A copy of the bytes from `at` on: all of them, or those of `dims`."""
        n_bytes = self._bytes.nbytes
        if dims is not None:
            rows, _ = self._matrix
            n_bytes = n_bytes // rows * dims[1]
        copied = self._shared.copy(self._bytes.address + at, n_bytes)
        place = replace(self._place, offset=0, n_bytes=n_bytes, dims=dims or self.dims)
        return Tensor(place, copied)


def tensors(
    places: Sequence[TensorPlace], ranges: DeviceRanges, lease: object
) -> dict[str, Tensor]:
    """Tensors by name. The ranges are theirs from now on."""
    shared = _Shared(ranges, lease)
    return {place.name: DeviceTensor(place, shared) for place in places}


def _interface(address: int, shape: tuple[int, ...], typestr: str) -> dict[str, Any]:
    """Version 3; no stream: the bytes never change, so nothing is to be waited for."""
    return {
        "version": 3,
        "shape": shape,
        "typestr": typestr,
        "data": (address, True),  # read-only
        "strides": None,
        "stream": None,
    }


def _dlpack(
    shared: _Shared, address: int, shape: tuple[int, ...], dtype: tuple[int, int], owner: object,
    request: dict[str, Any],
) -> Any:  # fmt: skip
    version, device = request.get("max_version"), request.get("dl_device")
    if version is None or version[0] < 1:
        raise BufferError("read-only memory needs a consumer of DLPack 1.0 or later (max_version)")
    if device is not None and tuple(device) != (dlpack.KDL_CUDA, shared.ordinal):
        raise BufferError(f"device {device} was asked for; the memory is on CUDA {shared.ordinal}")
    if request.get("copy"):
        raise BufferError("this memory is shown, not copied; copy it with the consumer")
    return dlpack.capsule(address, shape, dtype, shared.ordinal, owner)
