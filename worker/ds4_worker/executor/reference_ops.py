"""The ops of the registry straight from their definitions in `contract/ops.py`, in numpy.

Owns: what an op means, for `reference.py` and the tests. Computes in float64 wherever that is not
plain copying. Inputs come in the order of the registry, absent ones as None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ds4_common.contract.ops import GatedUnit, RouteScore
from ds4_common.errors import ExecutorFailure
from ds4_worker.executor.reference_rows import ROW_KERNELS, Array, Inputs

_LEAST_SUM = 2.0**-14  # of weights that are normalized


def _embed(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    tokens, table = _all(inputs)
    x: Array = a["scale"] * table[tokens]
    return x


def _rms_norm(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    x, weight = _all(inputs[:1])[0], inputs[1]
    exact = x.reshape(len(x), int(a["heads"]), -1).astype(np.float64)
    y: Array = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + a["eps"])
    return (y if weight is None else y * weight).reshape(x.shape)


def _matmul(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    x, weight = _all(inputs[:2])
    y: Array = x @ weight.T
    return y if inputs[2] is None else y + inputs[2]


def _matmul_heads(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    x, weight = _all(inputs)
    parts = x.reshape(len(x), len(weight), -1)
    y: Array = np.einsum("thk,hnk->thn", parts, weight)
    return y.reshape(len(x), -1)


def _rope(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    x, positions = _all(inputs[:2])
    half, at = int(a["rope_dim"]) // 2, int(a["offset"])
    cos, sin = _rotations(positions, inputs[2], a)
    heads = x.reshape(len(x), int(a["heads"]), int(a["dim"])).astype(np.float64)
    first, second = (
        (slice(at, at + 2 * half, 2), slice(at + 1, at + 2 * half, 2))
        if a["style"] == 0
        else (slice(at, at + half), slice(at + half, at + 2 * half))
    )
    y = heads.copy()
    y[..., first] = heads[..., first] * cos - heads[..., second] * sin
    y[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return y.reshape(x.shape)


def _rotations(
    positions: Array, factors: Array | None, a: Mapping[str, Any]
) -> tuple[Array, Array]:
    """cos and sin of every pair's angle, [T, 1, rope_dim / 2]."""
    rope_dim, base, scale = int(a["rope_dim"]), a["base"], a["freq_scale"]
    i = np.arange(rope_dim // 2, dtype=np.float64)
    theta = (positions + a["shift"])[:, None] * base ** (-2 * i / rope_dim)
    if factors is not None:
        theta = theta / factors
    magnitude = a["attn_factor"]
    if a["ext_factor"] > 0:

        def turn(beta: float) -> float:
            """The pair that makes `beta` turns within the original context."""
            turns = a["original_context"] / (2 * math.pi * beta)
            return rope_dim * math.log(turns) / (2 * math.log(base))

        low, high = turn(a["beta_fast"]), turn(a["beta_slow"])
        if a["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(0, low), min(rope_dim - 1, high)
        mix = a["ext_factor"] * (1 - np.clip((i - low) / max(0.001, high - low), 0, 1))
        theta = theta * (scale * (1 - mix) + mix)
        magnitude *= 1 + 0.1 * math.log(1 / scale)
    else:
        theta = theta * scale
    sign = -1 if a["inverse"] else 1
    return magnitude * np.cos(theta)[:, None, :], sign * magnitude * np.sin(theta)[:, None, :]


def _kv_store(inputs: Inputs, a: Mapping[str, Any]) -> None:
    k, v, positions, banks, table, k_plane, v_plane = _all(inputs)
    _store(k, positions, banks, table, k_plane)
    _store(v, positions, banks, table, v_plane)


def _latent_store(inputs: Inputs, a: Mapping[str, Any]) -> None:
    _store(*_all(inputs))


def _store(x: Array, positions: Array, banks: Array, table: Array, plane: Array) -> None:
    page_tokens = plane.shape[1]
    pages = table[banks, positions // page_tokens]
    if (pages < 0).any():
        raise ExecutorFailure("cache store: got a position without a page, expected set_page first")
    plane[pages, positions % page_tokens] = x.reshape(len(x), *plane.shape[2:])


def _attend_paged(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    q, k_plane, v_plane, positions, banks, table = _all(inputs[:6])
    return _attend(q, (k_plane, v_plane), (positions, banks, table), inputs[6], a)


def _attend_latent(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    q, plane, positions, banks, table = _all(inputs[:5])
    planes = (plane, plane[..., : int(a["value_dim"])])
    return _attend(q, planes, (positions, banks, table), inputs[5], {"kv_heads": 1, **a})


def _attend(
    q: Array,
    planes: tuple[Array, Array],
    where: tuple[Array, Array, Array],
    sinks: Array | None,
    a: Mapping[str, Any],
) -> Array:
    (k_plane, v_plane), (positions, banks, table) = planes, where
    heads, kv_heads = int(a["heads"]), int(a["kv_heads"])
    queries = q.reshape(len(q), kv_heads, heads // kv_heads, -1).astype(np.float64)
    y = np.zeros((len(q), heads * int(a["value_dim"])))
    for bank in np.unique(banks):
        rows = np.flatnonzero(banks == bank)
        length = int(positions[rows].max()) + 1
        pages = table[bank, : math.ceil(length / k_plane.shape[1])]
        keys = k_plane[pages].reshape(-1, *k_plane.shape[2:])[:length].astype(np.float64)
        values = v_plane[pages].reshape(-1, *v_plane.shape[2:])[:length].astype(np.float64)
        scores = a["scale"] * np.einsum("tgrd,lgd->tgrl", queries[rows], keys)
        if a["soft_cap"]:
            scores = a["soft_cap"] * np.tanh(scores / a["soft_cap"])
        ahead = np.arange(length)[None, :] - positions[rows][:, None]
        unseen = (ahead > 0) | (ahead <= -(a["window"] or math.inf))
        scores[np.broadcast_to(unseen[:, None, None, :], scores.shape)] = -np.inf
        if sinks is not None:
            sink = np.broadcast_to(sinks.reshape(1, kv_heads, -1, 1), (*scores.shape[:-1], 1))
            scores = np.concatenate([scores, sink], -1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True))[..., :length]
        y[rows] = np.einsum("tgrl,lgd->tgrd", weights, values).reshape(len(rows), -1)
    return y


def _add(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    left, right = _all(inputs)
    y: Array = left + right
    return y


def _glu(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    gate, up = (x.astype(np.float64) for x in _all(inputs))
    if a["limit"]:
        gate, up = np.minimum(gate, a["limit"]), np.clip(up, -a["limit"], a["limit"])
    if a["act"] == GatedUnit.SHIFTED:
        return gate * _sigmoid(a["alpha"] * gate) * (up + 1)
    if a["act"] == GatedUnit.GELU:
        return gate * _sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)) * up
    return gate * _sigmoid(gate) * up


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        y: Array = 1 / (1 + np.exp(-x))
    return y


def _soft_cap(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    (x,) = _all(inputs)
    y: Array = a["cap"] * np.tanh(x.astype(np.float64) / a["cap"])
    return y


def _gate_row(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    x, gate = _all(inputs)
    y: Array = x * _sigmoid(gate.astype(np.float64))
    return y


def _scale_parts(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    x, scales = _all(inputs[:2])
    routes, bias = inputs[2:]
    if routes is None:
        y: Array = scales[0] * x
        return y if bias is None else y + bias
    used = routes.shape[1] // 2
    steps = scales[routes[:, :used].astype(np.int64)]
    y = x.reshape(len(x), used, -1) * steps[:, :, None]
    return y.reshape(x.shape)


def _slice_heads(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    (x,) = _all(inputs)
    first, width = int(a["first"]), int(a["width"])
    heads = x.reshape(len(x), int(a["heads"]), int(a["dim"]))
    return heads[..., first : first + width].reshape(len(x), -1)


def _join_heads(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    left, right = _all(inputs)
    n, heads = len(left), int(a["heads"])
    parts = left.reshape(n, heads, -1)
    own = int(a["width"]) == left.shape[1] + right.shape[1]
    other = right.reshape(n, heads if own else 1, -1)
    joined = (parts, np.broadcast_to(other, (n, heads, other.shape[-1])))
    return np.concatenate(joined, -1).reshape(n, -1)


def _route_experts(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    logits, used = _all(inputs[:1])[0].astype(np.float64), int(a["width"]) // 2
    p = _scores(logits, int(a["score"]))
    candidates = p if inputs[1] is None else p + inputs[1]
    groups = int(a["groups"])
    if a["groups_used"] < groups:
        parts = candidates.reshape(len(p), groups, -1)
        value = np.sort(parts, -1)[..., -int(a["group_top"]) :].sum(-1)
        out = np.argsort(-value, -1, kind="stable")[:, int(a["groups_used"]) :]
        parts = parts.copy()
        np.put_along_axis(parts, out[..., None], -np.inf, 1)
        candidates = parts.reshape(p.shape)
    chosen = np.argsort(-candidates, -1, kind="stable")[:, :used]
    if inputs[3] is not None:
        chosen = inputs[3][inputs[2]].astype(np.int64)
    weights = np.take_along_axis(p, chosen, -1)
    if a["score"] == RouteScore.LOGITS:
        weights = _scores(weights, RouteScore.SOFTMAX)
    if a["normalize"]:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), _LEAST_SUM)
    return np.concatenate([chosen, weights * a["scale"]], -1)


def _scores(logits: Array, kind: int) -> Array:
    if kind == RouteScore.SOFTMAX:
        exact = np.exp(logits - logits.max(-1, keepdims=True))
        p: Array = exact / exact.sum(-1, keepdims=True)
        return p
    if kind == RouteScore.SIGMOID:
        return _sigmoid(logits)
    return np.sqrt(np.logaddexp(0, logits)) if kind != RouteScore.LOGITS else logits


def _matmul_experts(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    x, routes, weight = _all(inputs[:3])
    used = routes.shape[1] // 2
    chosen = routes[:, :used].astype(np.int64)
    columns = x.reshape(len(x), -1, weight.shape[2])
    y = np.empty((len(x), used, weight.shape[1]), x.dtype)
    for token, numbers in enumerate(chosen):
        for j, expert in enumerate(numbers):
            y[token, j] = weight[expert] @ columns[token, j if columns.shape[1] > 1 else 0]
            if inputs[3] is not None:
                y[token, j] += inputs[3][expert]
    return y.reshape(len(x), -1)


def _combine_experts(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    x, routes = _all(inputs)
    used = routes.shape[1] // 2
    y: Array = np.einsum("tjd,tj->td", x.reshape(len(x), used, -1), routes[:, used:])
    return y


def _gather_rows(inputs: Inputs, a: Mapping[str, Any]) -> Array:
    x, rows = _all(inputs)
    y: Array = x[rows]
    return y


def _all(inputs: Inputs) -> list[Array]:
    """Inputs that are all required, for the type checker."""
    return [array for array in inputs if array is not None]


def _round_half(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def _round_bf16(x: Array) -> Array:
    """To nearest even of the upper 16 bits."""
    bits: Array = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).reshape(x.shape)


def _round_q8(x: Array) -> Array:
    """Blocks of 32: the scale is half(amax / 127), codes come from the unrounded one."""
    blocks = x.astype(np.float32).reshape(-1, 32)
    top = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    scale = _round_half(top / np.float32(127))
    rounded: Array = np.rint(blocks * inverse) * scale
    return rounded.reshape(x.shape)


# What the cache makes of a value, by its type.
ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "f32": lambda x: x,
    "f16": _round_half,
    "bf16": _round_bf16,
    "q8_0": _round_q8,
}

KERNELS: dict[str, Callable[[Inputs, Mapping[str, Any]], Array | None]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "matmul": _matmul,
    "matmul_heads": _matmul_heads,
    "rope": _rope,
    "kv_store": _kv_store,
    "attend_paged": _attend_paged,
    "latent_store": _latent_store,
    "attend_latent": _attend_latent,
    "add": _add,
    "glu": _glu,
    "soft_cap": _soft_cap,
    "gate_row": _gate_row,
    "scale_parts": _scale_parts,
    "slice_heads": _slice_heads,
    "join_heads": _join_heads,
    "route_experts": _route_experts,
    "matmul_experts": _matmul_experts,
    "combine_experts": _combine_experts,
    "gather_rows": _gather_rows,
    **ROW_KERNELS,
}
