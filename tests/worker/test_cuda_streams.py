"""CUDA kernels of exchanging streams and of compressed rows, run on the CPU: the CPU's own bits."""

from __future__ import annotations

import numpy as np
import pytest

from ds4_worker.cuda.parameters import (
    Streams,
)
from ds4_worker.executor.reference import KERNELS as DEFINITIONS
from helpers.cuda_kernels import F32, Memory, address, launch
from helpers.kv_table import kv_table
from helpers.quant_blocks import bits
from helpers.vector_table import exp, table

SCALAR, HALF = table(0), kv_table(0)
PAGE = 16


def streams(name: str, width: int, rows: int, y_width: int, inputs: dict[str, F32],
            **fields: float) -> F32:  # fmt: skip
    memory = Memory()
    p = Streams(rows=rows, width=width, **fields)
    for field, values in inputs.items():
        held = memory.array(values.shape, np.float32, values)
        setattr(p, field, address(held))
        if field in "xws":
            setattr(p, f"{field}_stride", held.strides[0])
    y = memory.array((rows, y_width), np.float32)
    p.y, p.y_stride = address(y), y.strides[0]
    launch(name, p)
    return y.copy()


def normalized(c: F32, axis: int, eps: np.float32) -> F32:
    total = np.zeros(len(c), np.float32)
    for part in np.moveaxis(c, axis, 0):
        total = total + part
    factor = np.float32(1) / (total + eps)
    made: F32 = c * (factor[None, :] if axis == 0 else factor[:, None])
    return made


@pytest.mark.parametrize("streams_", [1, 4, 6])
def test_stream_weights_have_the_bits_of_the_cpu(streams_: int) -> None:
    rng, n, eps = np.random.default_rng(1), streams_, np.float32(1e-4)
    width = n * (2 + n)
    mix, base = (rng.normal(0, 2, (2, width)).astype(np.float32) for _ in range(2))
    scale = np.array([[0.7, 1.3, -0.4]], np.float32)
    got = streams(
        "hyper_weights", width, 2, width, {"x": mix, "scale": scale, "base": base[:1]},
        streams=n, iterations=3, eps=1e-4,
    )  # fmt: skip
    one = np.float32(1)
    for row in range(2):
        factor = np.repeat(scale[0], [n, n, n * n])
        x = mix[row] * factor + base[0]
        sigmoid = one / (one + exp(-x))
        c = x[2 * n :].reshape(n, n)
        c = exp(c - c.max(1, keepdims=True))
        total = np.zeros((n, 1), np.float32)
        for j in range(n):
            total = total + c[:, j : j + 1]
        c = normalized(c / total + eps, 0, eps)
        for _ in range(2):
            c = normalized(normalized(c, 1, eps), 0, eps)
        expected = np.concatenate(
            [sigmoid[:n] + eps, np.float32(2) * sigmoid[n : 2 * n], c.ravel()]
        )
        np.testing.assert_array_equal(bits(got[row]), bits(expected))


def test_streams_are_read_and_written_in_order() -> None:
    rng, n, width = np.random.default_rng(2), 4, 300
    s, x = (rng.standard_normal((2, k * width)).astype(np.float32) for k in (n, 1))
    w = rng.standard_normal((2, n * (2 + n))).astype(np.float32)
    read, written = np.zeros((2, width), np.float32), np.zeros((2, n, width), np.float32)
    for row in range(2):
        parts = s[row].reshape(n, width)
        for i in range(n):
            SCALAR.add_scaled(read[row].ctypes.data, parts[i].ctypes.data, float(w[row, i]), width)
        for d in range(n):
            to = written[row, d].ctypes.data
            SCALAR.add_scaled(to, x[row].ctypes.data, float(w[row, n + d]), width)
            for i in range(n):
                weight = float(w[row, 2 * n + i * n + d])
                SCALAR.add_scaled(to, parts[i].ctypes.data, weight, width)
    got = streams("hyper_read", width, 2, width, {"s": s, "w": w}, streams=n)
    np.testing.assert_array_equal(bits(got), bits(read))
    got = streams("hyper_write", width, 2, n * width, {"x": x, "s": s, "w": w}, streams=n)
    np.testing.assert_array_equal(bits(got), bits(written.reshape(2, -1)))


def test_the_hadamard_transform_is_its_definition() -> None:
    x = np.random.default_rng(3).standard_normal((2, 3 * 128)).astype(np.float32)
    got = streams("hadamard", 0, 2, 384, {"x": x}, heads=3, dim=128)
    expected = DEFINITIONS["hadamard"]([x], {"heads": 3})
    assert expected is not None
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)
    again = streams("hadamard", 0, 2, 384, {"x": got}, heads=3, dim=128)
    np.testing.assert_allclose(again, x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", [0, 1])
def test_floats_of_few_bits_are_those_of_the_definition(form: int) -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((3, 2 * 80)) * 10.0 ** rng.uniform(-8, 8, (3, 1))).astype(np.float32)
    x[0, :64] = 0
    got = streams(
        "round_floats", 0, 3, 160, {"x": x}, heads=2, dim=80, format=form, block=32, dims=64
    )
    attributes = {"format": form, "block": 32, "dims": 64, "heads": 2}
    expected = DEFINITIONS["round_floats"]([x], attributes)
    assert expected is not None
    np.testing.assert_array_equal(got, expected.astype(np.float32))
