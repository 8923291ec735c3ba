"""Reads model parameters out of GGUF metadata.

Owns: bounds (types are the metadata reader's). Every value comes from a file somebody else wrote,
so each one is checked before it sizes anything. Refuses: numbers out of range and NaN, as
`UnsupportedModel` naming the key, what was got and what was expected; wrong types and missing keys
arrive as the reader's `GgufError`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ds4_common.errors import UnsupportedModel
from ds4_common.gguf import ArrayInfo, Metadata

MAX_EXTENT = 1 << 24  # widest vector, longest context, largest vocabulary we believe
MAX_TEMPLATE = 1 << 20  # characters


def refuse(key: str, got: object, expected: str) -> UnsupportedModel:
    """The error for a metadata value that no recipe can use."""
    return UnsupportedModel(f"metadata {key!r}: got {got}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Access below one architecture's prefix: `count("block_count")` reads `llama.block_count`.
    A `default` of None makes the key required. `read` gathers the names that were asked for."""

    metadata: Metadata
    architecture: str
    read: set[str] = field(default_factory=set, compare=False)

    def key(self, name: str) -> str:
        self.read.add(name)
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.metadata

    def count(
        self, name: str, default: int | None = None, low: int = 1, high: int = MAX_EXTENT
    ) -> int:
        """An integer within [low, high]."""
        return whole(self.metadata, self.key(name), default, low, high)

    def counts(self, name: str, length: int) -> list[int]:
        """One positive integer per layer: the file holds a number for all or an array."""
        key = self.key(name)
        info = self.metadata.get(key)
        if not isinstance(info, ArrayInfo):
            return [self.count(name)] * length
        if info.count != length:
            raise refuse(key, f"{info.count} entries", f"one per layer ({length})")
        values = list(self.metadata.get_ints(key))
        for value in values:
            if not 1 <= value <= MAX_EXTENT:
                raise refuse(key, value, f"integers from 1 to {MAX_EXTENT}")
        return values

    def ratios(self, name: str, length: int, high: int) -> list[int]:
        """The first `length` of an array of integers from 0 to `high`."""
        key = self.key(name)
        values = list(self.metadata.get_ints(key))
        if len(values) < length:
            raise refuse(key, f"{len(values)} entries", f"one per layer ({length})")
        for value in values[:length]:
            if not 0 <= value <= high:
                raise refuse(key, value, f"integers from 0 to {high}")
        return values[:length]

    def numbers(self, name: str, length: int, high: float) -> list[float]:
        """One number from 0 to `high` per layer: the file holds one for all, or an array."""
        key = self.key(name)
        if not isinstance(self.metadata.get(key), ArrayInfo):
            return [self.number(name, high=high)] * length
        values = list(self.metadata.get_floats(key))
        if len(values) < length:
            raise refuse(key, f"{len(values)} entries", f"one per layer ({length})")
        for value in values[:length]:
            if not 0.0 <= value <= high:
                raise refuse(key, value, f"numbers from 0 to {high:g}")
        return values[:length]

    def flag(self, name: str, default: bool) -> bool:
        return self.metadata.get_bool(self.key(name), default)

    def flags(self, name: str, length: int) -> list[bool] | None:
        """One flag per layer, or None where the file holds no array."""
        key = self.key(name)
        info = self.metadata.get(key)
        if not isinstance(info, ArrayInfo):
            return None
        if info.count < length:
            raise refuse(key, f"{info.count} entries", f"one per layer ({length})")
        return [bool(value) for value in self.metadata.get_ints(key)][:length]

    def number(
        self, name: str, default: float | None = None, low: float = 0.0, high: float = 1e12
    ) -> float:
        """A finite number within [low, high]."""
        key = self.key(name)
        if default is not None and key not in self.metadata:
            return default
        value = self.metadata.get_float(key)
        if not math.isfinite(value) or not low <= value <= high:
            raise refuse(key, value, f"a number from {low:g} to {high:g}")
        return value

    def number_or_none(self, name: str, default: float, low: float, high: float = 1e6) -> float:
        """A number within [low, high], or 0, which stands for none."""
        key = self.key(name)
        if key in self.metadata and self.metadata.get_float(key) == 0.0:
            return 0.0
        return self.number(name, default, low, high)

    def text(self, name: str, default: str) -> str:
        return self.metadata.get_str(self.key(name), default)


def whole(metadata: Metadata, key: str, default: int | None, low: int, high: int) -> int:
    """The integer under a full key, within [low, high]."""
    if default is not None and key not in metadata:
        return default
    value = metadata.get_int(key)
    if not low <= value <= high:
        raise refuse(key, value, f"an integer from {low} to {high}")
    return value
