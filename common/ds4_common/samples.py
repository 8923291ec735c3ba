"""A hash of parts of a piece of memory, cheap enough to be taken at every attach.

Owns where the 16 samples of 4 KiB lie and how they become one hash. It tells two pieces of memory
apart; it says nothing about single bits elsewhere.
"""

from __future__ import annotations

import xxhash

SAMPLES = 16
SAMPLE_BYTES = 4096


def spans(n_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the samples, in order: the first and the last bytes and places between
    that depend on the size. Those of small memory overlap."""
    last = max(0, n_bytes - SAMPLE_BYTES)
    sample = min(SAMPLE_BYTES, n_bytes)
    return [(last * number // (SAMPLES - 1), sample) for number in range(SAMPLES)]


def digest(parts: list[bytes | memoryview]) -> str:
    """Of the bytes of all spans, in order."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


class Sampler:
    """Takes the samples of memory that streams by from its first byte to its last."""

    def __init__(self, n_bytes: int) -> None:
        self._spans = spans(n_bytes)
        self._parts = [bytearray(size) for _, size in self._spans]
        self._at = 0

    def update(self, view: memoryview) -> None:
        start, end = self._at, self._at + view.nbytes
        for (offset, size), part in zip(self._spans, self._parts, strict=True):
            first, last = max(start, offset), min(end, offset + size)
            if first < last:
                part[first - offset : last - offset] = view[first - start : last - start]
        self._at = end

    def hexdigest(self) -> str:
        return digest([bytes(part) for part in self._parts])
