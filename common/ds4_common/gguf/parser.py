"""Parses the header of one GGUF file: metadata and tensor table.

Owns every bounds check on untrusted bytes. Reads with pread through a window of fixed size, so a
file that shrinks while it is read is a GgufError and not a SIGBUS, and memory does not grow with
any number found in the file. Refuses: versions other than 2 and 3, big-endian files, anything cut
off, overlapping, misaligned, duplicated or larger than the limits below. Arrays are stepped over,
not decoded (metadata.py decodes them when asked).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

from ds4_common.errors import GgufError
from ds4_common.gguf.types import FIXED_CODES, GgmlType, ValueType, block_bytes, block_weights
from ds4_common.native import lib

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 256 << 20  # the largest vocabularies need about 15 MiB
MAX_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 18
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 255
MAX_STRING_BYTES = 64 << 20
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 62
WINDOW_BYTES = 1 << 16  # small enough for the heap, which has no page faults to pay

_WALK_DEPTH = 4
_WALK_STEP_BYTES = 12
_WALK_MORE = 1
_WALK_ERRORS = {
    -1: ("metadata array", "an element type outside the format", "a type from 0 to 12"),
    -2: ("metadata array", "elements beyond the end of the file", "elements inside the file"),
    -3: ("metadata array", "arrays nested deeper", f"at most {_WALK_DEPTH} levels"),
}


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """A metadata array that was stepped over: `n_bytes` of elements at `offset` in its file."""

    element_type: ValueType
    count: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One metadata value: int, float, bool, bytes (a string, undecoded) or ArrayInfo."""

    type: ValueType
    value: int | float | bool | bytes | ArrayInfo
    offset: int


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One line of the tensor table; `file_offset` counts from the file's start."""

    name: str
    ggml_type: GgmlType
    dims: tuple[int, ...]
    file_offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """All that one file says about itself."""

    version: int
    alignment: int
    data_offset: int
    entries: dict[str, Entry]
    tensors: tuple[RawTensor, ...]


class _Walk(ctypes.Structure):
    """`ds4_gguf_walk` of native/gguf_walk.c."""

    _fields_ = (
        ("pos", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("left", ctypes.c_uint64 * _WALK_DEPTH),
        ("type", ctypes.c_uint32 * _WALK_DEPTH),
        ("depth", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


@functools.cache
def _walk_array() -> Callable[..., int]:
    function = lib.load().ds4_gguf_walk_array
    function.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.POINTER(_Walk)]
    function.restype = ctypes.c_int
    return function


class _Window:
    """A cursor over the header that holds at most one window of it in memory."""

    def __init__(self, fd: int, path: str, n_bytes: int) -> None:
        self.path, self.n_bytes = path, n_bytes
        self.pos = 0
        self._fd = fd
        self._start = 0
        self._data = b""

    def error(self, what: str, got: object, expected: object, offset: int = -1) -> GgufError:
        return GgufError(self.path, self.pos if offset < 0 else offset, what, got, expected)

    def take(self, n: int, what: str) -> tuple[bytes, int]:
        """Steps over n bytes; returns a buffer and the index in it at which they begin."""
        index = self.pos - self._start
        if index + n > len(self._data):
            self._refill(n, what)
            index = 0
        self.pos += n
        return self._data, index

    def _refill(self, n: int, what: str) -> None:
        left = self.n_bytes - self.pos
        if n > left:
            raise self.error(what, f"end of file after {max(left, 0)} bytes", f"{n} bytes")
        self._check_header_size(n)
        self._data = os.pread(self._fd, min(left, max(n, WINDOW_BYTES)), self.pos)
        self._start = self.pos
        if len(self._data) < n:
            raise self.error(what, "a file that shrank while it was read", f"{self.n_bytes} bytes")

    def _check_header_size(self, n: int = 0) -> None:
        if self.pos + n > MAX_HEADER_BYTES:
            raise self.error(
                "header size", f"more than {self.pos + n} bytes", f"at most {MAX_HEADER_BYTES}"
            )

    def u32(self, what: str) -> int:
        return int.from_bytes(self.blob(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.blob(8, what), "little")

    def blob(self, n: int, what: str) -> bytes:
        data, index = self.take(n, what)
        return data[index : index + n]

    def string(self, limit: int, what: str) -> bytes:
        n = self.u64(f"length of {what}")
        if n > limit:
            raise self.error(f"length of {what}", n, f"at most {limit}", self.pos - 8)
        return self.blob(n, what)

    def skip_array(self, element_type: int, count: int, key: str) -> None:
        """Steps over the elements of an array, nested ones included."""
        walk = _Walk(pos=self.pos, end=self.n_bytes, depth=1)
        walk.type[0], walk.left[0] = element_type, count
        while status := _walk_array()(self._data, self._start, len(self._data), walk):
            self.pos = walk.pos
            if status != _WALK_MORE:
                what, got, expected = _WALK_ERRORS[status]
                raise self.error(f"{what} {key!r}", got, expected)
            # What the walker may need at once; less would let a shrinking file stall it.
            self._refill(min(_WALK_STEP_BYTES, self.n_bytes - walk.pos), f"metadata array {key!r}")
        self.pos = walk.pos
        self._check_header_size()


def parse_header(fd: int, path: str, n_bytes: int) -> Header:
    """Parses the file open at `fd` (borrowed), of `n_bytes`. Raises GgufError, nothing else."""
    window = _Window(fd, path, n_bytes)
    try:
        version = _version(window)
        n_tensors = window.u64("tensor count")
        n_entries = window.u64("metadata count")
        _check_count(window, "tensor count", n_tensors, MAX_TENSORS, 8)
        _check_count(window, "metadata count", n_entries, MAX_ENTRIES, 16)
        entries = _entries(window, n_entries)
        alignment = _alignment(window, entries)
        rows = [_tensor_row(window) for _ in range(n_tensors)]
    except OSError as error:
        raise window.error("read", error, "readable bytes") from error
    data_offset = -(-window.pos // alignment) * alignment
    tensors = tuple(_placed(window, row, data_offset, alignment) for row in rows)
    _check_tensors(window, tensors)
    return Header(version, alignment, data_offset, entries, tensors)


def _version(window: _Window) -> int:
    magic = window.blob(4, "magic")
    if magic != MAGIC:
        raise window.error("magic", magic, MAGIC, 0)
    version = window.u32("version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        got = f"{swapped} in big-endian byte order" if swapped in VERSIONS else version
        raise window.error("version", got, "2 or 3, little-endian", 4)
    return version


def _check_count(window: _Window, what: str, count: int, limit: int, offset: int) -> None:
    if count > limit:
        raise window.error(what, count, f"at most {limit}", offset)


# --- metadata ---


def _entries(window: _Window, count: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for _ in range(count):
        start = window.pos
        raw = window.string(MAX_KEY_BYTES, "metadata key")
        try:
            key = raw.decode()
        except UnicodeDecodeError as error:
            raise window.error("metadata key", raw[:64], "UTF-8", start) from error
        if key in entries:
            raise window.error("metadata key", f"{key!r} twice", "distinct keys", start)
        entries[key] = _entry(window, key)
    return entries


def _value_type(window: _Window, key: str) -> ValueType:
    number = window.u32(f"type of metadata {key!r}")
    if number > ValueType.FLOAT64:
        raise window.error(f"type of metadata {key!r}", number, "0 to 12", window.pos - 4)
    return ValueType(number)


def _entry(window: _Window, key: str) -> Entry:
    value_type = _value_type(window, key)
    offset = window.pos
    if value_type is ValueType.STRING:
        value = window.string(MAX_STRING_BYTES, f"metadata {key!r}")
        return Entry(value_type, value, offset)
    if value_type is ValueType.ARRAY:
        element_type = _value_type(window, key)
        count = window.u64(f"element count of metadata {key!r}")
        start = window.pos
        window.skip_array(element_type, count, key)
        array = ArrayInfo(element_type, count, start, window.pos - start)
        return Entry(value_type, array, offset)
    code = FIXED_CODES[value_type]
    data, index = window.take(struct.calcsize(f"<{code}"), f"metadata {key!r}")
    (number,) = struct.unpack_from(f"<{code}", data, index)
    if value_type is ValueType.BOOL:
        if number > 1:
            raise window.error(f"metadata {key!r}", f"boolean byte {number}", "0 or 1", offset)
        number = bool(number)
    return Entry(value_type, number, offset)


def _alignment(window: _Window, entries: dict[str, Entry]) -> int:
    entry = entries.get("general.alignment")
    if entry is None:
        return DEFAULT_ALIGNMENT
    value = entry.value
    if entry.type is not ValueType.UINT32 or not isinstance(value, int):
        raise window.error("general.alignment", entry.type.name, "UINT32", entry.offset)
    if value == 0 or value & (value - 1):
        raise window.error("general.alignment", value, "a power of two", entry.offset)
    return value


# --- tensor table ---


def _tensor_row(window: _Window) -> tuple[str, GgmlType, tuple[int, ...], int, int]:
    """(name, type, dims, relative offset, file offset of the row)"""
    start = window.pos
    raw = window.string(MAX_NAME_BYTES, "tensor name")
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise window.error("tensor name", raw, "UTF-8", start) from error
    # Names are written unescaped into space-separated manifests.
    if not name or not name.isprintable() or " " in name:
        raise window.error("tensor name", repr(name), "printable characters, no spaces", start)
    n_dims = window.u32(f"dimension count of tensor {name}")
    if n_dims > MAX_DIMS:
        raise window.error(f"dimension count of tensor {name}", n_dims, f"at most {MAX_DIMS}")
    data, index = window.take(8 * n_dims + 12, f"description of tensor {name}")
    *dims, number, relative = struct.unpack_from(f"<{n_dims}QIQ", data, index)
    try:
        ggml_type = GgmlType(number)
    except ValueError as error:
        known = ", ".join(f"{t.value} {t.name}" for t in GgmlType)
        raise window.error(
            f"ggml type of tensor {name}", number, f"one of {known}", start
        ) from error
    # ggml treats a tensor without dimensions as one element.
    return name, ggml_type, tuple(dims) or (1,), relative, start


def _placed(
    window: _Window,
    row: tuple[str, GgmlType, tuple[int, ...], int, int],
    data_offset: int,
    alignment: int,
) -> RawTensor:
    name, ggml_type, dims, relative, start = row
    n_elements = 1
    for dim in dims:
        n_elements *= dim
        if dim == 0 or n_elements > MAX_ELEMENTS:
            raise window.error(
                f"dimensions of tensor {name}",
                list(dims),
                f"none zero, product at most {MAX_ELEMENTS}",
                start,
            )
    weights = block_weights(ggml_type)
    if dims[0] % weights:
        raise window.error(
            f"row length of tensor {name}", dims[0], f"a multiple of {weights}", start
        )
    n_bytes = n_elements // weights * block_bytes(ggml_type)
    if relative % alignment:
        raise window.error(
            f"offset of tensor {name}", relative, f"a multiple of {alignment}", start
        )
    end = data_offset + relative + n_bytes
    if end > window.n_bytes:
        raise window.error(
            f"data of tensor {name}",
            f"{n_bytes} bytes at {data_offset + relative}, ending {end - window.n_bytes} bytes "
            "past the end (is the file truncated?)",
            f"an end at or before {window.n_bytes}",
            start,
        )
    return RawTensor(name, ggml_type, dims, data_offset + relative, n_bytes)


def _check_tensors(window: _Window, tensors: tuple[RawTensor, ...]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise window.error("tensor table", f"{tensor.name} twice", "distinct names")
        names.add(tensor.name)
    in_order = sorted(tensors, key=lambda t: t.file_offset)
    for before, after in itertools.pairwise(in_order):
        end = before.file_offset + before.n_bytes
        if end > after.file_offset:
            raise window.error(
                f"data of tensor {after.name}",
                f"an overlap with {before.name}, which ends at {end}",
                f"a start at or after {end}",
                after.file_offset,
            )
