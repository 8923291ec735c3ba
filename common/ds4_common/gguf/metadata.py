"""Typed access to the metadata of a GGUF file.

Owns: decoding of lazily skipped arrays and the getters that recipes use. Refuses to convert: an
integer is not a float and a string is not a list; the GgufError names the key.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, TypeVar, overload

from ds4_common.errors import GgufError
from ds4_common.gguf.parser import ArrayInfo, Entry
from ds4_common.gguf.types import FIXED_CODES, FLOAT_TYPES, INTEGER_TYPES, ValueType
from ds4_common.native import lib

D = TypeVar("D")


class _Required:
    """The default of a getter that has none."""


_REQUIRED: Final = _Required()


@functools.cache
def _string_ends() -> Callable[..., int]:
    function = lib.load().ds4_gguf_string_ends
    function.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


class Metadata(Mapping[str, int | float | bool | str | ArrayInfo]):
    """Key to value: scalars decoded, arrays as ArrayInfo until a getter reads them.

    `read(offset, n_bytes)` returns bytes of the file. All getters raise GgufError, with the key in
    its text, for a missing key without default and for a value of another type.
    """

    def __init__(
        self, path: str, entries: Mapping[str, Entry], read: Callable[[int, int], bytes]
    ) -> None:
        self._path, self._entries, self._read = path, entries, read

    def __getitem__(self, key: str) -> int | float | bool | str | ArrayInfo:
        value = self._entries[key].value
        # A description that is not UTF-8 must stay printable; get_str is strict.
        return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def type_of(self, key: str) -> ValueType:
        """The type in the file; KeyError for a missing key."""
        return self._entries[key].type

    # --- scalars ---

    @overload
    def get_int(self, key: str) -> int: ...
    @overload
    def get_int(self, key: str, default: D) -> int | D: ...
    def get_int(self, key: str, default: D | _Required = _REQUIRED) -> int | D:
        """The value of any integer type."""
        entry = self._typed(key, INTEGER_TYPES, default)
        return entry.value if isinstance(entry, Entry) else entry  # type: ignore[return-value]

    @overload
    def get_float(self, key: str) -> float: ...
    @overload
    def get_float(self, key: str, default: D) -> float | D: ...
    def get_float(self, key: str, default: D | _Required = _REQUIRED) -> float | D:
        """The value of FLOAT32 or FLOAT64."""
        entry = self._typed(key, FLOAT_TYPES, default)
        return entry.value if isinstance(entry, Entry) else entry  # type: ignore[return-value]

    @overload
    def get_bool(self, key: str) -> bool: ...
    @overload
    def get_bool(self, key: str, default: D) -> bool | D: ...
    def get_bool(self, key: str, default: D | _Required = _REQUIRED) -> bool | D:
        entry = self._typed(key, (ValueType.BOOL,), default)
        return entry.value if isinstance(entry, Entry) else entry  # type: ignore[return-value]

    @overload
    def get_str(self, key: str) -> str: ...
    @overload
    def get_str(self, key: str, default: D) -> str | D: ...
    def get_str(self, key: str, default: D | _Required = _REQUIRED) -> str | D:
        """The string, which must be UTF-8."""
        entry = self._typed(key, (ValueType.STRING,), default)
        if not isinstance(entry, Entry):
            return entry
        assert isinstance(entry.value, bytes)
        try:
            return entry.value.decode()
        except UnicodeDecodeError as error:
            raise GgufError(
                self._path, entry.offset, f"metadata {key!r}", error.reason, "UTF-8"
            ) from error

    # --- arrays ---

    @overload
    def get_strings(self, key: str) -> list[bytes]: ...
    @overload
    def get_strings(self, key: str, default: D) -> list[bytes] | D: ...
    def get_strings(self, key: str, default: D | _Required = _REQUIRED) -> list[bytes] | D:
        """The elements of a string array, undecoded: tokens need not be UTF-8."""
        info = self._array(key, (ValueType.STRING,), default)
        if not isinstance(info, ArrayInfo):
            return info
        data = self._read(info.offset, info.n_bytes)
        ends = array.array("Q", bytes(8 * info.count))
        if _string_ends()(data, len(data), info.count, ends.buffer_info()[0]):
            raise GgufError(
                self._path,
                info.offset,
                f"metadata {key!r}",
                "other bytes than when the file was opened",
                "an unchanged file",
            )
        starts = itertools.chain((0,), ends)
        return [data[start + 8 : end] for start, end in zip(starts, ends, strict=False)]

    @overload
    def get_ints(self, key: str) -> array.array[int]: ...
    @overload
    def get_ints(self, key: str, default: D) -> array.array[int] | D: ...
    def get_ints(self, key: str, default: D | _Required = _REQUIRED) -> array.array[int] | D:
        """The elements of an array of integers or booleans, in its own element width."""
        info = self._array(key, INTEGER_TYPES | {ValueType.BOOL}, default)
        if not isinstance(info, ArrayInfo):
            return info
        numbers = self._numbers(info)
        if info.element_type is ValueType.BOOL and max(numbers, default=0) > 1:
            raise GgufError(
                self._path, info.offset, f"metadata {key!r}", "a boolean byte above 1", "0 or 1"
            )
        return numbers

    @overload
    def get_floats(self, key: str) -> array.array[float]: ...
    @overload
    def get_floats(self, key: str, default: D) -> array.array[float] | D: ...
    def get_floats(self, key: str, default: D | _Required = _REQUIRED) -> array.array[float] | D:
        """The elements of an array of FLOAT32 or FLOAT64."""
        info = self._array(key, FLOAT_TYPES, default)
        return self._numbers(info) if isinstance(info, ArrayInfo) else info

    # --- inside ---

    def _numbers(self, info: ArrayInfo) -> array.array[Any]:
        numbers: array.array[Any] = array.array(FIXED_CODES[info.element_type])
        numbers.frombytes(self._read(info.offset, info.n_bytes))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _typed(self, key: str, wanted: Collection[ValueType], default: D | _Required) -> Entry | D:
        entry = self._entries.get(key)
        if entry is None:
            if isinstance(default, _Required):
                raise GgufError(self._path, 0, f"metadata {key!r}", "no such key", _names(wanted))
            return default
        if entry.type not in wanted:
            raise GgufError(
                self._path, entry.offset, f"metadata {key!r}", _describe(entry), _names(wanted)
            )
        return entry

    def _array(
        self, key: str, wanted: Collection[ValueType], default: D | _Required
    ) -> ArrayInfo | D:
        entry = self._typed(key, (ValueType.ARRAY,), default)
        if not isinstance(entry, Entry):
            return entry
        info = entry.value
        assert isinstance(info, ArrayInfo)
        if info.element_type not in wanted:
            raise GgufError(
                self._path,
                entry.offset,
                f"metadata {key!r}",
                _describe(entry),
                f"ARRAY of {_names(wanted)}",
            )
        return info


def _names(types: Collection[ValueType]) -> str:
    return " or ".join(t.name for t in sorted(types))


def _describe(entry: Entry) -> str:
    if isinstance(entry.value, ArrayInfo):
        return f"ARRAY of {entry.value.count} {entry.value.element_type.name}"
    return entry.type.name
