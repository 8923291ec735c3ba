"""The weights an owner holds, for any Python process: read-only tensors by GGUF name.

    import ds4_common

    with ds4_common.attach("/run/ds4/w") as model:
        norm = model["blk.0.attn_norm.weight"].array()     # numpy view of the owner's memory
        q = model["blk.0.attn_q.weight"].numpy()           # dequantized float32, your copy

Owns: names to bytes, and how long they stay mapped. The lease and each mapping live until the last
object that shows them is gone: `close` gives up this object's share, so an array that outlives it
stays valid, and `ds4-weight-server status` goes on listing the process. Nothing can be written.
Refuses types of blocks where an element type is needed. Memory of a device: device_weights.
numpy is imported by the methods that return arrays, never before. Guide: docs/weights.md.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ds4_common import client, quants, tensor_directory
from ds4_common.allocation import Layout, TensorPlace
from ds4_common.closing import Closing
from ds4_common.errors import ProtocolError, UsageError
from ds4_common.gguf.types import GgmlType
from ds4_common.mapping import Mapping as MappedMemory
from ds4_common.protocol import ModelRecord

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Types whose elements numpy knows, as type strings of the array interface.
ELEMENTS: dict[GgmlType, str] = {
    GgmlType.F32: "<f4",
    GgmlType.F16: "<f2",
    GgmlType.F64: "<f8",
    GgmlType.I8: "|i1",
    GgmlType.I16: "<i2",
    GgmlType.I32: "<i4",
    GgmlType.I64: "<i8",
}
_DLPACK_CPU = (1, 0)  # kDLCPU, device 0


class _Lease:
    """Ends the lease of a connection when the last object that needs it is gone."""

    def __init__(self, connection: client.OwnerConnection) -> None:
        weakref.finalize(self, connection.close)


def _region(mapping: MappedMemory, lease: _Lease) -> ctypes.Array[ctypes.c_ubyte]:
    """A mapping as a buffer that is unmapped with its last view, and holds the lease until then."""
    region = (ctypes.c_ubyte * mapping.n_bytes).from_address(mapping.address)
    region.lease = lease  # type: ignore[attr-defined]
    # Not at exit: other code that still runs then may hold views.
    weakref.finalize(region, mapping.close).atexit = False
    return region


class Tensor:
    """One tensor where it lies in the owner's memory. Keeps that memory mapped."""

    __slots__ = ("_memory", "_region", "dims", "ggml_type", "layout", "model", "name", "offset")

    def __init__(self, place: TensorPlace, region: ctypes.Array[ctypes.c_ubyte]) -> None:
        """Raises ProtocolError for a place outside the allocation."""
        if not 0 <= place.offset <= place.offset + place.n_bytes <= len(region):
            raise ProtocolError(
                f"tensor {place.name}: {place.n_bytes} bytes at {place.offset} of allocation "
                f"{place.allocation}, which has {len(region)}"
            )
        self.model, self.name, self.dims = place.model, place.name, place.dims
        self.ggml_type, self.layout, self.offset = (
            GgmlType(place.ggml_type), place.layout, place.offset,
        )  # fmt: skip
        self._region = region
        whole = memoryview(region).cast("B").toreadonly()
        self._memory = whole[place.offset : place.offset + place.n_bytes]

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.ggml_type.name} {list(self.shape)} {self.layout.name}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents in numpy's order, the contiguous one last: `dims` reversed."""
        return self.dims[::-1]

    @property
    def memory(self) -> memoryview:
        """The bytes as they lie in the allocation, in `layout` (docs/layouts.md). Never a copy."""
        return self._memory

    def raw(self) -> memoryview:
        """The blocks as in the GGUF file. The owner's memory for layout RAW; otherwise a copy,
        made by this call (X8 and planes: unpacked in C; aligned artifacts: with numpy)."""
        if self.layout is Layout.RAW:
            return self._memory
        if self.layout is Layout.X8:
            rows, cols = self._matrix
            blocks = bytearray(len(self._memory))
            quants.unpack(self.ggml_type, self._memory, blocks, rows, cols)
            return memoryview(blocks).toreadonly()
        if self.layout is Layout.IQ2_PLANES:
            rows, cols = self._matrix
            blocks = bytearray(quants.tensor_bytes(self.ggml_type, rows, cols))
            quants.unpack_planes(self.ggml_type, self._memory, blocks, rows, cols)
            return memoryview(blocks).toreadonly()
        from ds4_common.quants import aligned

        return aligned.unpack(self.layout, self._memory, self.dims)

    def numpy(self) -> npt.NDArray[np.float32]:
        """All weights as float32 of `shape`: always a new array of yours. Raises UnsupportedModel
        for a type that has no dequantizer here."""
        return self.rows(0, self._matrix[0]).reshape(self.shape)

    def rows(self, first: int, end: int) -> npt.NDArray[np.float32]:
        """Rows [first, end) as float32 [end - first, dims[0]]; the outer dims count as one. For
        tensors too large to be dequantized whole. Raises ValueError, UnsupportedModel."""
        import numpy as np

        rows, cols = self._matrix
        if not 0 <= first <= end <= rows:
            raise ValueError(f"{self.name}: rows [{first}, {end}) of {rows}")
        if self.ggml_type in ELEMENTS:
            return self.array().reshape(rows, cols)[first:end].astype(np.float32)
        values = quants.dequantize_rows(
            self.ggml_type, self.layout, self._memory, rows, cols, first, end
        )
        return np.frombuffer(values, np.float32).reshape(end - first, cols)

    def array(self) -> npt.NDArray[Any]:
        """The owner's memory as a read-only numpy array of `shape`: F16, F32, F64 and integers.
        Raises TypeError for every other type."""
        import numpy as np

        return np.frombuffer(self._memory, np.dtype(self._element())).reshape(self.shape)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What `array` shows, without numpy here. Absent for types without numpy elements."""
        if self.ggml_type not in ELEMENTS:
            raise AttributeError(f"{self.name}: {self.ggml_type.name} has no array interface")
        address = ctypes.addressof(self._region) + self.offset
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self._element(),
            "data": (address, True),  # read-only
        }

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """What `np.asarray` makes of types without an array interface: `numpy()`."""
        if copy is False:
            raise ValueError(f"{self.name}: {self.ggml_type.name} becomes an array by copying only")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __dlpack__(self, **request: Any) -> Any:
        """What `array` shows as a DLPack capsule, flagged read-only. Raises BufferError for a
        consumer that cannot be told so (it does not ask for version 1), and for other types."""
        if self.ggml_type not in ELEMENTS:
            raise BufferError(f"{self.name}: {self.ggml_type.name} has no DLPack type; use numpy()")
        return self.array().__dlpack__(**request)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU

    @property
    def _matrix(self) -> tuple[int, int]:
        """(rows, cols): every dim but the contiguous one counts as rows."""
        return math.prod(self.dims[1:]), self.dims[0] if self.dims else 1

    def _element(self) -> str:
        element = ELEMENTS.get(self.ggml_type)
        if element is None:
            raise TypeError(
                f"{self.name} is {self.ggml_type.name}, which numpy has no type for; use numpy() "
                "for float32 values or raw() for the blocks"
            )
        return element


class Weights(Closing, Mapping[str, Tensor]):
    """The tensors of one model by name, in the order of their places. A context manager."""

    def __init__(
        self, model: ModelRecord, tensors: Mapping[str, Tensor], lease: _Lease, owner_pid: int
    ) -> None:
        self.model = model
        self.owner_pid = owner_pid
        self._tensors = dict(tensors)
        self._lease: _Lease | None = lease

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._tensors)} tensors"
        return f"<Weights {self.model.id}: {state}>"

    def close(self) -> None:
        """Gives up this object's share. Lease and mappings end with the last tensor, view or array
        that shows them, which is now unless you kept one."""
        self._tensors.clear()
        self._lease = None

    @property
    def closed(self) -> bool:
        return self._lease is None

    def names(self) -> list[str]:
        return list(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        if self.closed:
            raise ValueError("these weights are closed; attach again")
        try:
            return self._tensors[name]
        except KeyError:
            import difflib

            near = difflib.get_close_matches(name, self._tensors, 3)
            hint = f"; near: {', '.join(near)}" if near else ""
            raise KeyError(f"model {self.model.id} has no tensor {name}{hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def attach(
    manifest: str | os.PathLike[str],
    *,
    model: str | None = None,
    name: str = "",
    wait_seconds: float = 0.0,
) -> Weights:
    """Maps the weights of one model of an owner and holds a lease (role `reader`) while in use.

    `model`: "base", "mtp" or "drafter"; None: base, or whatever is served in its place. `name` is
    shown by `status`. `wait_seconds`: how long to wait for an owner that is loading. No byte is
    read here: pages come when they are touched. Device memory is mapped on its device, and tensors
    are `device_weights.DeviceTensor`. Raises OwnerUnavailable, IdentityError (a model file changed
    since it was loaded), BackendError and CudaError (memory that cannot be mapped here), UsageError
    (no such model).
    """
    with ExitStack() as undo:
        connection = client.connect(os.fspath(manifest), "reader", name, wait_seconds)
        undo.callback(connection.close)
        directory = _directory(connection)
        chosen = _choose(connection.welcome.models, model)
        places = [p for p in directory if p.model == chosen.id]
        tensors_of = _mapper(connection, sorted({p.allocation for p in places}))
        undo.pop_all()
    lease = _Lease(connection)
    return Weights(chosen, tensors_of(places, lease), lease, connection.owner_pid)


def _mapper(
    connection: client.OwnerConnection, ids: list[int]
) -> Callable[[list[TensorPlace], _Lease], dict[str, Tensor]]:
    """Maps allocations; what makes tensors from places in them, which then own the mappings."""
    if connection.welcome.device is not None:
        from ds4_common import device_weights
        from ds4_common.cuda.ranges import map_ranges

        ranges = map_ranges(connection, ids)
        return lambda places, lease: device_weights.tensors(places, ranges, lease)
    mapped = connection.map_allocations(ids)

    def tensors(places: list[TensorPlace], lease: _Lease) -> dict[str, Tensor]:
        regions = {allocation: _region(memory, lease) for allocation, memory in mapped.items()}
        return {p.name: Tensor(p, regions[p.allocation]) for p in places}

    return tensors


def _choose(models: list[ModelRecord], wanted: str | None) -> ModelRecord:
    by_id = {model.id: model for model in models}
    chosen = models[0] if wanted is None else by_id.get(wanted)  # base is first when it is served
    if chosen is None:
        raise UsageError(f"the owner serves no model {wanted!r}; it has {', '.join(by_id)}")
    return chosen


def _directory(connection: client.OwnerConnection) -> list[TensorPlace]:
    if connection.blob_record(tensor_directory.BLOB_NAME) is None:
        raise ProtocolError(
            f"owner of {connection.manifest_path} has no tensor directory: it was started by an "
            "older version; restart it with this one"
        )
    blob = connection.blob(tensor_directory.BLOB_NAME)
    places = tensor_directory.decode(blob.view)
    blob.close()
    return places
