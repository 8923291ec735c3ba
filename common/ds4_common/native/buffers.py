"""Addresses of Python buffers for native code, read-only ones included, without numpy.

Owns: CPython's buffer protocol through ctypes. `ctypes.from_buffer` refuses read-only memory, which
is what every mapped model is. On the start-up path: imports ctypes and little else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

Buffer = bytes | bytearray | memoryview


class View(ctypes.Structure):
    """CPython's Py_buffer. While it is held, the buffer can be neither resized nor unmapped."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip

    @property
    def address(self) -> int:
        return int(self.buf or 0)

    @property
    def n_bytes(self) -> int:
        return int(self.len)

    def release(self) -> None:
        """Lets the buffer go. Safe to call twice."""
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self))


def hold(buffer: Buffer, *, writable: bool = False) -> View:
    """Holds a contiguous buffer until `release`. Raises BufferError for one that is not contiguous,
    or not writable when asked for."""
    view = View()
    ctypes.pythonapi.PyObject_GetBuffer(
        ctypes.py_object(buffer), ctypes.byref(view), ctypes.c_int(writable)
    )
    return view


@contextmanager
def pinned(buffer: Buffer, *, writable: bool = False) -> Iterator[int]:
    """The address of a contiguous buffer, held meanwhile. Raises BufferError like `hold`."""
    view = hold(buffer, writable=writable)
    try:
        yield view.address
    finally:
        view.release()
