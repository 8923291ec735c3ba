"""Kernels over the KV cache: every type rounds as told, instruction sets give equal bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.native import lib
from ds4_common.quants.native import Isa, library
from ds4_worker.executor.api import KV_DTYPES
from ds4_worker.executor.reference_ops import ROUNDINGS

Array = npt.NDArray[Any]
_P, _I64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
NUMBERS = {"f16": 0, "f32": 1, "bf16": 2, "q8_0": 3}  # native/kv.h
ISAS = [isa for isa in Isa if library().ds4_isa_runs(isa)]
STORED: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "bf16": np.uint16, "q8_0": np.int8}


class Kernels(ctypes.Structure):
    """native/kv.h ds4_kv."""

    _fields_ = (
        ("type", _INT),
        ("encode", ctypes.CFUNCTYPE(None, _P, _I64, _P, _P)),
        ("score", ctypes.CFUNCTYPE(None, _P, _INT, _I64, _P, _P, _I64, _I64, _P, _I64)),
        ("along", ctypes.CFUNCTYPE(None, _P, _INT, _I64, _P, _P, _I64, _I64, _I64, _P, _I64)),
        (
            "accumulate",
            ctypes.CFUNCTYPE(None, _P, _I64, _INT, _I64, _I64, _P, _P, _I64, _I64, _I64, _P),
        ),
    )


def kernels(dtype: str, isa: int) -> Kernels:
    function = lib.load().ds4_kv_table
    function.restype = ctypes.POINTER(Kernels)
    found: Kernels = function(NUMBERS[dtype], isa).contents
    assert found.type == NUMBERS[dtype]
    return found


def test_no_instruction_set_but_scalar_takes_the_scalar_kernels() -> None:
    function = lib.load().ds4_kv_table
    function.restype = ctypes.c_void_p
    for number in NUMBERS.values():
        scalar, *others = (function(number, isa) for isa in (0, 1, 3, 4))  # native/matmul.h
        assert scalar not in others
    assert function(len(NUMBERS), 0) is None


EACH = pytest.mark.parametrize("dtype", KV_DTYPES)
DIMS = st.sampled_from([5, 8, 32, 40, 64, 96, 128])


def values(n: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(0, 3, n).astype(np.float32)


def at(array: Array) -> int:
    return int(array.ctypes.data)


def encoded(dtype: str, x: Array, isa: int = 1) -> tuple[Array, Array]:
    codes = np.zeros(x.size, STORED[dtype])
    scales = np.zeros(max(1, x.size // 32), np.float16)
    kernels(dtype, isa).encode(at(x), x.size, at(codes), at(scales))
    return codes, scales


def decoded(dtype: str, codes: Array, scales: Array) -> Array:
    if dtype == "q8_0":
        blocks = codes.reshape(-1, 32).astype(np.float32) * scales.astype(np.float32)[:, None]
        return blocks.reshape(-1)
    if dtype == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    return codes.astype(np.float32)


def tile(dtype: str, x: Array, across: bool) -> Array:
    """Rows of positions as a tile of the cache: bytes as native/kv.h lays them out."""
    page, dim = x.shape
    if dtype == "q8_0":
        parts = []
        for first in range(0, dim, 32):
            codes, scales = encoded(dtype, np.ascontiguousarray(x[:, first : first + 32]).ravel())
            block = codes.reshape(page, 32)
            parts += [scales.tobytes(), (block.T if across else block).tobytes()]
        return np.frombuffer(b"".join(parts), np.uint8)
    codes, _ = encoded(dtype, x.ravel())
    rows = codes.reshape(page, dim)
    if across:
        return np.ascontiguousarray(rows.T)
    padded = np.zeros((page, -(-dim // 8) * 8), rows.dtype)
    padded[:, :dim] = rows
    return padded


def fits(dtype: str, dim: int) -> bool:
    return dtype != "q8_0" or dim % 32 == 0


@EACH
@pytest.mark.parametrize("isa", ISAS)
def test_what_is_stored_is_rounded_as_the_reference_says(dtype: str, isa: int) -> None:
    parts = [values(64, seed + 9) * 10.0**seed for seed in range(-9, 5)]
    x = np.concatenate([*parts, np.zeros(32)]).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(decoded(dtype, *encoded(dtype, x, isa)), ROUNDINGS[dtype](x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_halves_are_those_of_numpy_and_of_gguf(dtype: str, isa: int) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    every_half, every_bf16 = (
        every.view(np.float16),
        (every.astype(np.uint32) << 16).view(np.float32),
    )
    between = values(100_000, 1) * np.float32(1e-4) * np.float32(10) ** values(100_000, 2)
    edges = np.array([65519.996, 65520.0, -65520.0, 1e30, 2**-25, 2**-24 * 1.5, 0.0], np.float32)
    x = np.concatenate([every_half.astype(np.float32), every_bf16, between, edges])
    codes = encoded(dtype, x, isa)[0]
    number = ~np.isnan(x)
    with np.errstate(over="ignore"):
        kind = gguf.GGMLQuantizationType.BF16
        theirs = x.astype(np.float16).view(np.uint16)
        if dtype == "bf16":
            theirs = gguf.quants.quantize(x[number], kind).view(np.uint16)
        else:
            theirs = theirs[number]
    assert (codes.view(np.uint16)[number] == theirs).all()
    assert np.isnan(decoded(dtype, codes, codes)[~number]).all()


def test_blocks_are_those_of_the_gguf_package_but_for_ties() -> None:
    x = values(32 * 200, 1)
    ours = decoded("q8_0", *encoded("q8_0", x))
    kind = gguf.GGMLQuantizationType.Q8_0
    theirs = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    differ = ours != theirs
    assert differ.mean() < 1e-3
    scale = np.abs(x.reshape(-1, 32)).max(1).repeat(32) / 127
    assert (np.abs(ours - theirs) <= 1.01 * scale).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@EACH
def test_what_is_not_finite_stays_so(dtype: str, bad: float, isa: int) -> None:
    for place in (0, 7, 31):
        x = values(32, 3)
        x[place] = bad
        assert not np.isfinite(decoded(dtype, *encoded(dtype, x, isa))[place])


def both(dtype: str, run: Callable[[Kernels], Array]) -> Array:
    scalar = run(kernels(dtype, 0))
    for isa in ISAS[1:]:
        assert scalar.tobytes() == run(kernels(dtype, isa)).tobytes()
    return scalar


@EACH
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 6), dim=DIMS, page=st.sampled_from([8, 16, 24, 64]), part=st.integers(1, 8)
)
def test_scores_across_agree_and_are_dot_products(
    dtype: str, rows: int, dim: int, page: int, part: int
) -> None:
    if not fits(dtype, dim):
        return
    tokens8 = min(page, 8 * part)
    q, x = values(rows * dim, 1).reshape(rows, dim), values(page * dim, 2).reshape(page, dim)
    held = tile(dtype, x, across=True)

    def run(made: Kernels) -> Array:
        scores = np.zeros((rows, page + 3), np.float32)
        made.score(at(q), rows, dim, at(held), at(held), page, tokens8, at(scores), scores.shape[1])
        return scores

    scores = both(dtype, run)
    exact = q.astype(np.float64) @ ROUNDINGS[dtype](x).T.astype(np.float64)
    np.testing.assert_allclose(scores[:, :tokens8], exact[:, :tokens8], atol=2e-3)
    assert not scores[:, tokens8:].any()


@EACH
@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 6), dim=DIMS, tokens=st.integers(1, 24))
def test_scores_along_agree_and_are_dot_products(
    dtype: str, rows: int, dim: int, tokens: int
) -> None:
    if not fits(dtype, dim):
        return
    page, width = 24, -(-dim // 8) * 8
    q, x = values(rows * dim, 1).reshape(rows, dim), values(page * dim, 2).reshape(page, dim)
    held = tile(dtype, x, across=False)

    def run(made: Kernels) -> Array:
        scores = np.zeros((rows, page), np.float32)
        made.along(at(q), rows, dim, at(held), at(held), page, width, tokens, at(scores), page)
        return scores

    scores = both(dtype, run)
    exact = q.astype(np.float64) @ ROUNDINGS[dtype](x).T.astype(np.float64)
    np.testing.assert_allclose(scores[:, :tokens], exact[:, :tokens], atol=2e-3)
    assert not scores[:, tokens:].any()


@EACH
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 6),
    first=st.integers(0, 70),
    tokens=st.integers(1, 72),
    dim=DIMS,
    more=st.sampled_from([0, 32]),
)
def test_weighted_values_agree_and_continue_what_is_there(
    dtype: str, rows: int, first: int, tokens: int, dim: int, more: int
) -> None:
    """`more`: dims of a row that are not read, as behind a latent."""
    if not fits(dtype, dim):
        return
    page, vdim = 72, -(-dim // 8) * 8
    first = min(first, page - tokens)
    x = values(page * (dim + more), 5).reshape(page, dim + more)
    held = tile(dtype, x, across=False)
    width = -(-(dim + more) // 8) * 8
    p, before = values(rows * page, 3).reshape(rows, page), values(rows * vdim, 4)

    def run(made: Kernels) -> Array:
        out = before.copy().reshape(rows, vdim)
        made.accumulate(
            at(p), page, rows, first, tokens, at(held), at(held), page, width, vdim, at(out)
        )
        return out

    out = both(dtype, run)[:, :dim]
    kept = ROUNDINGS[dtype](x)[first : first + tokens, :dim].astype(np.float64)
    exact = before.reshape(rows, vdim)[:, :dim] + p[:, :tokens].astype(np.float64) @ kept
    np.testing.assert_allclose(out, exact, atol=2e-3)
