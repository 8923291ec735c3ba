"""DLPack capsules of device memory, made by hand: no array library is needed to hand a tensor out.

Owns the structures of DLPack 1.0 and their life: what a capsule shows stays referenced until its
consumer lets go. Every capsule is flagged read-only; a consumer that cannot be told so (it does not
ask for version 1) is refused by the caller.
"""

from __future__ import annotations

import ctypes
from typing import Any

KDL_CUDA = 2
SIGNED, UNSIGNED, FLOAT, BFLOAT = 0, 1, 2, 4  # DLDataTypeCode
_READ_ONLY = 1
_NAME = b"dltensor_versioned"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


_held: dict[int, tuple[object, ...]] = {}  # by address of the _Managed: all that it points to


def _delete(address: int) -> None:
    _held.pop(address, None)


def _dispose(capsule: int) -> None:
    """Of a capsule: nobody consumed it if it still has its name."""
    if _is_valid(capsule, _NAME):
        _delete(_pointer(capsule, _NAME))


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DELETER, _DESTRUCTOR = _CALLBACK(_delete), _CALLBACK(_dispose)  # never freed: C code calls them
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def capsule(
    address: int, shape: tuple[int, ...], dtype: tuple[int, int], device: int, owner: object
) -> Any:
    """A `dltensor_versioned` of contiguous memory on CUDA device `device`; `dtype` is (code, bits).
    `owner` lives as long as it or what is made from it."""
    extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    managed = _Managed(
        1, 0, None, ctypes.cast(_DELETER, ctypes.c_void_p), _READ_ONLY,
        _Tensor(address, _Device(KDL_CUDA, device), len(shape), _Type(*dtype, 1),
                ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64)), None, 0),
    )  # fmt: skip
    where = ctypes.addressof(managed)
    _held[where] = (managed, extents, owner)
    return _new(where, _NAME, ctypes.cast(_DESTRUCTOR, ctypes.c_void_p))
