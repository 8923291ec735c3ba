"""Residual streams that exchange, and attention over compressed rows, from their definitions.

Owns: what the ops of the second half of `contract/ops.py` mean, in numpy, for `reference_ops.py`
and the tests. Small floats are rounded from float32; everything else is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4_common.contract.ops import SmallFloat

Array = npt.NDArray[Any]
Inputs = Sequence[Array | None]


def _hyper_weights(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    mix, scale, base = _all(inputs)
    n, eps = int(a["streams"]), a["eps"]
    steps = np.repeat(scale.astype(np.float64), [n, n, n * n] if mix.shape[1] > n else [n])
    m = mix.astype(np.float64) * steps + base
    read: Array = 1 / (1 + np.exp(-m[:, :n])) + eps
    if mix.shape[1] == n:
        return read
    write = 2 / (1 + np.exp(-m[:, n : 2 * n]))
    cross = m[:, 2 * n :].reshape(-1, n, n)
    cross = np.exp(cross - cross.max(2, keepdims=True))
    cross = cross / cross.sum(2, keepdims=True) + eps
    cross = cross / (cross.sum(1, keepdims=True) + eps)
    for _ in range(int(a["iterations"]) - 1):
        cross = cross / (cross.sum(2, keepdims=True) + eps)
        cross = cross / (cross.sum(1, keepdims=True) + eps)
    return np.concatenate([read, write, cross.reshape(len(m), -1)], 1)


def _hyper_read(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    s, w = _all(inputs)
    n = s.shape[1] // int(a["width"])
    x: Array = np.einsum("tnd,tn->td", s.reshape(len(s), n, -1).astype(np.float64), w[:, :n])
    return x


def _hyper_write(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    y, s, w = _all(inputs)
    n = s.shape[1] // y.shape[1]
    streams = s.reshape(len(s), n, -1).astype(np.float64)
    cross = w[:, 2 * n :].reshape(-1, n, n)
    mixed: Array = np.einsum("tid,tij->tjd", streams, cross) + w[:, n : 2 * n, None] * y[:, None]
    return mixed.reshape(s.shape)


def _hadamard(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    (x,) = _all(inputs)
    y = x.reshape(len(x), int(a["heads"]), -1).astype(np.float64)
    dim = y.shape[-1]
    bits = np.arange(dim)
    signs = np.array([[(-1) ** bin(i & j).count("1") for j in bits] for i in bits])
    mixed: Array = y @ signs.T / math.sqrt(dim)
    return mixed.reshape(x.shape)


# Greatest value, bits of the mantissa, least exponent, and the least `amax` of a block.
_SMALL = {SmallFloat.E4M3: (448.0, 3, -6, 1e-4), SmallFloat.E2M1: (6.0, 1, 0, 6.0 * 2.0**-126)}


def _round_floats(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    (x,) = _all(inputs)
    most, bits, least, floor = _SMALL[SmallFloat(int(a["format"]))]
    y = x.reshape(len(x), int(a["heads"]), -1).astype(np.float32)
    dims = int(a["dims"])
    blocks = y[..., :dims].reshape(*y.shape[:2], -1, int(a["block"]))
    amax = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(floor))
    fraction, exponent = np.frexp(amax / np.float32(most))  # amax / most = fraction * 2^exponent
    scale = np.exp2(exponent - (fraction == 0.5)).astype(np.float64)
    scaled = np.clip(blocks / scale, -most, most)
    step = np.exp2(np.maximum(np.frexp(scaled)[1] - 1, least) - bits)
    rounded = np.rint(scaled / step) * step * scale
    result = y.astype(np.float64)
    result[..., :dims] = rounded.reshape(*y.shape[:2], dims)
    return result.reshape(x.shape)


def _compress(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    """Window by window where a window ends; the state keeps running sums between steps."""
    k, gate, bias, positions, banks, table, state = _all(inputs)
    ratio, dim = int(a["ratio"]), state.shape[-1]
    page_tokens = a["page_tokens"]
    y = np.zeros((len(k), dim))
    for token, (position, bank) in enumerate(zip(positions, banks, strict=True)):
        held = state[table[bank, position // page_tokens], 0]
        if position % page_tokens == 0:
            if position:
                held[:] = state[table[bank, position // page_tokens - 1], 0]
            else:
                _clear(held)
        overlaps = len(held) == 6
        if position % ratio == 0:
            if overlaps:
                held[3:] = held[:3]
            _clear(held[:3])
        scores = (gate[token] + bias[position % ratio]).reshape(-1, dim)
        for part, score in enumerate(scores):
            value = k[token].reshape(-1, dim)[part]
            _add_score(held[3 * part : 3 * part + 3], score, value)
        if position % ratio == ratio - 1:
            _, total, weighted = held[-3:]
            y[token] = weighted / total
    return y


def _clear(running: Array) -> None:
    running[0::3], running[1::3], running[2::3] = -np.inf, 0, 0


def _add_score(running: Array, score: Array, value: Array) -> None:
    top = np.maximum(running[0], score)
    keep, take = np.exp(running[0] - top), np.exp(score - top)
    running[0], running[1] = top, running[1] * keep + take
    running[2] = running[2] * keep + take * value


def _store_rows(inputs: Inputs, a: Mapping[str, Any]) -> None:
    x, positions, banks, table, plane = _all(inputs)
    ratio, records = int(a["ratio"]), plane.shape[1]
    for row, position, bank in zip(x, positions, banks, strict=True):
        if (position + 1) % ratio == 0:
            record = position // ratio
            plane[table[bank, record // records], record % records, 0] = row


def _rows_of(plane: Array, pages: Array, first: int, end: int) -> Array:
    """Rows [first, end) of a sequence."""
    numbers = np.arange(first, end)
    records = plane.shape[1]
    rows: Array = plane[pages[numbers // records], numbers % records, 0].astype(np.float64)
    return rows


def _index_rows(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    q, w, plane, positions, banks, table = _all(inputs)
    chosen = np.full((len(q), int(a["width"])), -1.0)
    queries = q.reshape(len(q), int(a["heads"]), -1).astype(np.float64)
    for token, (position, bank) in enumerate(zip(positions, banks, strict=True)):
        rows = _rows_of(plane, table[bank], 0, (position + 1) // int(a["ratio"]))
        scores = a["scale"] * w[token].astype(np.float64) @ np.maximum(queries[token] @ rows.T, 0)
        best = np.sort(np.argsort(-scores, kind="stable")[: chosen.shape[1]])
        chosen[token, : len(best)] = best
    return chosen


def _attend_rows(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    q, recent, positions, banks, table = _all(inputs[:5])
    compressed, chosen, sinks = inputs[5:8]
    heads, dim = int(a["heads"]), recent.shape[-1]
    y = np.zeros((len(q), heads, dim))
    for token, (position, bank) in enumerate(zip(positions, banks, strict=True)):
        first = max(0, position + 1 - int(a["window"]))
        rows = _rows_of(recent, table[bank], first, position + 1)
        if compressed is not None:
            more = _rows_of(compressed, table[bank], 0, (position + 1) // int(a["ratio"]))
            if chosen is not None:
                more = more[chosen[token][chosen[token] >= 0].astype(np.int64)]
            rows = np.concatenate([rows, more])
        scores = a["scale"] * q[token].reshape(heads, dim).astype(np.float64) @ rows.T
        if sinks is not None:
            scores = np.concatenate([scores, sinks[:, None]], 1)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights = (weights / weights.sum(1, keepdims=True))[:, : len(rows)]
        y[token] = weights @ rows
    return y.reshape(len(q), -1)


def _all(inputs: Inputs) -> list[Array]:
    return [array for array in inputs if array is not None]


ROW_KERNELS: dict[str, Callable[[Inputs, Mapping[str, Any]], Array | None]] = {
    "hyper_weights": _hyper_weights,
    "hyper_read": _hyper_read,
    "hyper_write": _hyper_write,
    "hadamard": _hadamard,
    "round_floats": _round_floats,
    "compress": _compress,
    "store_rows": _store_rows,
    "index_rows": _index_rows,
    "attend_rows": _attend_rows,
}
