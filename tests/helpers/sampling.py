"""The native sampler by itself, and its rules once more in plain numpy."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ds4_common.native import lib
from ds4_worker.executor.api import Adjustments, Sampling
from ds4_worker.executor.records import (
    SAMPLED_RECORD,
    SAMPLING_BYTES,
    TOP_LOGPROBS,
    pack_sampling,
)

Floats = npt.NDArray[np.float32]
OK, NOT_FINITE, NOTHING_ALLOWED, BAD_ID = 0, 1, 2, 3


@dataclass(frozen=True)
class Drawn:
    token: int
    status: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def draw(
    logits: Floats,
    how: Sampling,
    isa: int = 1,
    mask: Floats | None = None,
    biases: Sequence[tuple[int, float]] = (),
    seen: Sequence[tuple[int, int]] = (),
    by: Callable[[Floats, bytes], bytes] | None = None,
    place: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] = np.ascontiguousarray,
) -> Drawn:
    """One call of the native sampler, or of another one that takes logits and a record. `mask`:
    booleans over the vocabulary; `place` puts what the record points to where `by` can read it."""
    library = lib.load()
    library.ds4_vector_table.restype = ctypes.c_void_p
    table = ctypes.c_void_p(library.ds4_vector_table(isa))
    data = np.ascontiguousarray(logits, np.float32)
    words = None if mask is None else place(mask_words(mask))
    bias_records, seen_records = (
        place(np.frombuffer(b"".join(struct.pack(form, *record) for record in records), np.uint8))
        for form, records in (("<if", biases), ("<ii", seen))
    )
    how = replace(how, mask=0 if words is None else words.ctypes.data)
    if biases or seen:
        how.adjust = replace(
            how.adjust or Adjustments(),
            biases=bias_records.ctypes.data,
            n_biases=len(biases),
            seen=seen_records.ctypes.data,
            n_seen=len(seen),
        )
    record = ctypes.create_string_buffer(SAMPLING_BYTES)
    pack_sampling(memoryview(record).cast("B"), 0, how)
    if by:
        return drawn(by(data, record.raw))
    result = ctypes.create_string_buffer(SAMPLED_RECORD.size)
    scratch = np.empty(12 * len(data), np.uint8)
    library.ds4_sample(
        table, ctypes.c_void_p(data.ctypes.data), ctypes.c_uint32(len(data)), record,
        ctypes.c_void_p(scratch.ctypes.data), result,
    )  # fmt: skip
    return drawn(result.raw)


def drawn(record: bytes) -> Drawn:
    """What a ds4_sampled record says."""
    token, status, logprob, n_top, *rest = SAMPLED_RECORD.unpack(record)
    ids, values = rest[:n_top], rest[TOP_LOGPROBS : TOP_LOGPROBS + n_top]
    return Drawn(token, status, logprob, tuple(zip(ids, values, strict=True)))


def mask_words(allowed: npt.NDArray[np.generic]) -> npt.NDArray[np.uint32]:
    """Bitmask as the executor takes it: token t is bit t % 32 of word t // 32."""
    bits = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32)


def adjusted(
    logits: Floats,
    how: Adjustments,
    biases: Sequence[tuple[int, float]],
    seen: Sequence[tuple[int, int]],
) -> Floats:
    """The logits after biases and penalties, operation by operation in float32."""
    x = logits.copy()
    for token, bias in biases:
        x[token] += np.float32(bias)
    repetition, frequency, presence = map(np.float32, (how.repetition, how.frequency, how.presence))
    for token, count in seen:
        value = x[token]
        value = value / repetition if value > 0 else value * repetition
        value = value - np.float32(count) * frequency
        x[token] = value - presence if count else value
    return x


def random_bits(seed: int, index: int) -> int:
    """Philox4x32-10, straight from its definition."""
    low = 0xFFFFFFFF
    c = [index & low, index >> 32, 0, 0]
    k = [seed & low, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & low, a >> 32 ^ c[3] ^ k[1], a & low]
        k = [k[0] + 0x9E3779B9 & low, k[1] + 0xBB67AE85 & low]
    return c[1] << 32 | c[0]


def kept_tokens(logits: Floats, how: Sampling) -> list[int]:
    """Tokens that may be drawn, best first (equal ones by lower id): the rules by sorting."""
    x = logits.astype(np.float64)
    order = sorted((t for t in range(len(x)) if x[t] > -math.inf), key=lambda t: (-x[t], t))
    if how.top_k > 0:
        order = order[: how.top_k]
    weights = [math.exp((x[t] - x[order[0]]) / how.temperature) for t in order]
    if how.top_p < 1.0:
        total, target, reached = sum(weights), how.top_p * sum(weights), 0.0
        assert total > 0
        count = 0
        while count < len(order) and (reached < target or not count):
            reached += weights[count]
            count += 1
        order = order[:count]
    return [t for t, w in zip(order, weights, strict=False) if w >= how.min_p]
