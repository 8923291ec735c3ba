"""CUDA kernels that look at one row, on any machine: the bits of the CPU executor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.contract.ops import GatedUnit
from ds4_common.quants.native import library
from ds4_worker.cuda.parameters import Quantize, RmsNorm, Rope, RopeAngles, Rowwise
from helpers.cuda_kernels import F32, ON_DEVICE, Memory, address, launch
from helpers.quant_blocks import bits
from helpers.vector_table import table

SCALAR = table(0)
FORMATS = {0: 1, 1: 32, 2: 256}  # activation format -> values of a block
ORDERS = pytest.mark.parametrize("descending", [False, True], ids=["ascending", "descending"])


def wild(rng: np.random.Generator, *shape: int) -> F32:
    """Numbers of all sizes, a few of them not finite."""
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 6, shape)
    x.flat[:: max(1, x.size // 3)] = rng.choice([np.nan, np.inf, -np.inf, 0.0, 1e-42], 1)
    return x.astype(np.float32)


def rows_of(memory: Memory, values: F32, pad: int = 3) -> F32:
    """The same rows, farther apart."""
    wide = memory.array((len(values), values.shape[1] + pad), np.float32)
    wide[:, : values.shape[1]] = values
    return wide[:, : values.shape[1]]


def rowwise(name: str, x: F32, b: F32 | None, width: int, **fields: float) -> F32:
    memory = Memory()
    own, other = rows_of(memory, x), rows_of(memory, x if b is None else b, 1)
    y = rows_of(memory, np.full((len(x), width), -7.0, np.float32), 2)
    p = Rowwise(
        x=address(own), b=address(other), y=address(y), x_stride=own.strides[0],
        b_stride=other.strides[0], y_stride=y.strides[0], rows=len(x), width=width,
        **fields,
    )  # fmt: skip
    launch(name, p)
    return y.copy()


# --- elementwise ---


def test_add_and_scale_are_single_roundings() -> None:
    rng = np.random.default_rng(0)
    a, b = wild(rng, 3, 700), wild(rng, 3, 700)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(bits(rowwise("add", a, b, 700)), bits(a + b))
        scaled = rowwise("scale", a, None, 700, value=0.3)
        np.testing.assert_array_equal(bits(scaled), bits(a * np.float32(0.3)))


@pytest.mark.parametrize("mode", list(GatedUnit))
@pytest.mark.parametrize("limit", [0.0, 7.0])
def test_gated_units_have_the_bits_of_the_cpu(mode: GatedUnit, limit: float) -> None:
    rng = np.random.default_rng(int(mode))
    gate = np.concatenate([wild(rng, 2, 333), rng.normal(0, 8, (2, 333)).astype(np.float32)])
    up = rng.normal(0, 8, gate.shape).astype(np.float32)
    expected = np.empty_like(gate)
    for row in range(len(gate)):
        x, u, y = (v[row].ctypes.data for v in (gate, up, expected))
        if mode == GatedUnit.SILU and limit == 0:
            SCALAR.silu_mul(y, x, u, 333)
        else:
            SCALAR.gated_mul(y, x, u, int(mode), limit, 1.702, 333)
    got = rowwise("glu", gate, up, 333, mode=int(mode), limit=limit, alpha=1.702)
    np.testing.assert_array_equal(bits(got), bits(expected))


def test_soft_cap_has_the_bits_of_the_cpu() -> None:
    x = np.concatenate([np.linspace(-200, 200, 901), [np.inf, -np.inf, np.nan]])
    row = x.astype(np.float32)[None]
    expected = np.empty_like(row)
    SCALAR.soft_cap(expected.ctypes.data, row.ctypes.data, 30.0, row.size)
    np.testing.assert_array_equal(
        bits(rowwise("soft_cap", row, None, row.size, value=30.0)), bits(expected)
    )


def test_gate_row_scales_each_row_by_the_sigmoid_of_its_gate() -> None:
    rng = np.random.default_rng(3)
    x, gate = wild(rng, 4, 65), np.array([[-3], [0], [50], [-100]], np.float32)
    e = np.empty_like(gate)
    SCALAR.exp_scaled(e.ctypes.data, gate.ctypes.data, 0.0, -1.0, 4)
    with np.errstate(all="ignore"):
        expected = x * (np.float32(1) / (np.float32(1) + e))
    np.testing.assert_array_equal(bits(rowwise("gate_row", x, gate, 65)), bits(expected))


def test_parts_are_scaled_by_their_experts_or_by_one_scale_before_a_bias() -> None:
    rng = np.random.default_rng(5)
    x, scales = wild(rng, 3, 2 * 40), rng.standard_normal(5).astype(np.float32)
    routes = np.array([[4, 0, 1, 1], [2, 2, 1, 1], [9, np.nan, 1, 1]], np.float32)
    bias = rng.standard_normal(80).astype(np.float32)
    memory = Memory()
    held = [memory.array(values.shape, np.float32) for values in (scales, bias)]
    held[0][:], held[1][:] = scales, bias
    at = [address(values) for values in held]
    numbers = np.array([[4, 0], [2, 2], [0, 0]])  # none there is counts as the first
    with np.errstate(all="ignore"):
        expected = (x.reshape(3, 2, 40) * scales[numbers][:, :, None]).reshape(3, 80)
        got = rowwise("scale_parts", x, routes, 80, heads=2, dim=5, scales=at[0])
        np.testing.assert_array_equal(bits(got), bits(expected))
        got = rowwise("scale_parts", x, None, 80, dim=5, scales=at[0], bias=at[1])
        np.testing.assert_array_equal(bits(got), bits(x * scales[0] + bias))


# --- moves ---


def test_slices_and_joins_of_heads_move_what_they_say() -> None:
    x = np.arange(2 * 3 * 10, dtype=np.float32).reshape(2, 30)
    sliced = rowwise("slice_heads", x, None, 12, heads=3, dim=10, first=2, part=4)
    np.testing.assert_array_equal(sliced.reshape(2, 3, 4), x.reshape(2, 3, 10)[:, :, 2:6])
    b = -np.arange(2 * 3 * 2, dtype=np.float32).reshape(2, 6)
    joined = rowwise("join_heads", x, b, 36, heads=3, dim=2, part=2)
    expected = np.concatenate([x.reshape(2, 3, 10), b.reshape(2, 3, 2)], -1)
    np.testing.assert_array_equal(joined.reshape(2, 3, 12), expected)
    shared = rowwise("join_heads", x, b[:, :2].copy(), 36, heads=3, dim=0, part=2)
    expected = np.concatenate([x.reshape(2, 3, 10), np.broadcast_to(b[:, None, :2], (2, 3, 2))], -1)
    np.testing.assert_array_equal(shared.reshape(2, 3, 12), expected)


def test_combine_sums_in_the_order_of_the_choice() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 3 * 50)).astype(np.float32)
    routes = rng.standard_normal((2, 6)).astype(np.float32)
    expected = np.zeros((2, 50), np.float32)
    for row in range(2):
        for j in range(3):
            part = np.ascontiguousarray(x[row, 50 * j : 50 * j + 50])
            weight = float(routes[row, 3 + j])
            SCALAR.add_scaled(expected[row].ctypes.data, part.ctypes.data, weight, 50)
    got = rowwise("combine", x, routes, 50, heads=3)
    np.testing.assert_array_equal(bits(got), bits(expected))


def test_gather_takes_the_rows_asked_for_and_no_more_than_are_live() -> None:
    memory = Memory()
    x = memory.array((5, 8), np.float32, np.arange(40, dtype=np.float32).reshape(5, 8))
    rows = memory.array((3,), np.int32, np.array([4, 0, 2], np.int32))
    live = memory.array((1,), np.int32, np.array([2], np.int32))
    y = memory.array((3, 8), np.float32, np.full((3, 8), -1, np.float32))
    p = Rowwise(
        x=address(x), b=address(rows), y=address(y), live=address(live), x_stride=32, y_stride=32,
        rows=3, width=8,
    )  # fmt: skip
    launch("gather_rows", p)
    np.testing.assert_array_equal(y, [*x[[4, 0]], np.full(8, -1)])


def test_pending_tokens_take_their_places_in_the_rows_that_are_live() -> None:
    """A draw that failed gives token 0, which every table has."""
    memory = Memory()
    drawn = memory.array((3,), np.int32, np.array([70, -1, 90], np.int32))
    sources = memory.array((6,), np.int32, np.array([2, -1, 0, 1, 2, 2], np.int32))
    live = memory.array((1,), np.int32, np.array([5], np.int32))
    tokens = memory.array((6,), np.int32, np.arange(1, 7, dtype=np.int32))
    p = Rowwise(
        x=address(drawn), b=address(sources), y=address(tokens), live=address(live), rows=6,
        width=1,
    )  # fmt: skip
    launch("pending_tokens", p)
    np.testing.assert_array_equal(tokens, [90, 2, 70, 0, 90, 6])


# --- activation columns ---


def quantized(x: F32, form: int, columns: int) -> list[bytes]:
    """By the CPU: the bytes of every column of every row."""
    width, made = x.shape[1] // columns, []
    size = library().ds4_act_bytes(form, width)
    for column in np.ascontiguousarray(x).reshape(-1, width):
        out = np.zeros(size + 64, np.uint8)
        start = -out.ctypes.data % 64
        own = column.copy()
        library().ds4_act_quantize(form, own.ctypes.data, width, out.ctypes.data + start, 0)
        made.append(out[start : start + size].tobytes())
    return made


def canonical(column: bytes, form: int, width: int) -> list[object]:
    """What counts in a column: the planes, floats by their bits and every NaN as one."""
    raw = np.frombuffer(column, np.uint8)
    if form == 0:
        return [bits(raw.view(np.float32)).tolist()]
    q, at = raw[:width].tolist(), width if form == 2 else (width + 63) // 64 * 64
    n = width // FORMATS[form]
    if form == 2:
        d = raw[at + 32 * n : at + 36 * n].view(np.float32)
        return [q, raw[at : at + 32 * n].tolist(), bits(d).tolist()]
    floats = raw[at : at + 8 * n].view(np.float32)
    return [q, bits(floats).tolist(), raw[at + 8 * n : at + 12 * n].tolist()]


@settings(max_examples=25)
@given(
    form=st.sampled_from(sorted(FORMATS)), blocks=st.integers(1, 9), columns=st.integers(1, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_quantized_columns_are_those_of_the_cpu(
    form: int, blocks: int, columns: int, seed: int
) -> None:
    memory, width, rng = Memory(), FORMATS[form] * blocks, np.random.default_rng(seed)
    x = wild(rng, 2, width * columns)
    expected = quantized(x, form, columns)
    act = memory.array((2, len(expected[0]) * columns + 64), np.uint8)
    own = rows_of(memory, x)
    p = Quantize(
        x=address(own), act=address(act), x_stride=own.strides[0], act_stride=act.strides[0],
        rows=2, width=width, columns=columns, format=form,
    )  # fmt: skip
    launch("quantize", p, descending=bool(seed % 2))
    got = [
        act[row, c * len(expected[0]) :][: len(expected[0])].tobytes()
        for row in range(2)
        for c in range(columns)
    ]
    assert [canonical(c, form, width) for c in got] == [canonical(c, form, width) for c in expected]


def test_a_gated_unit_quantized_as_it_is_made_is_the_unit_then_quantized() -> None:
    memory, rng = Memory(), np.random.default_rng(8)
    gate, up = (rng.normal(0, 4, (3, 512)).astype(np.float32) for _ in range(2))
    own, other = rows_of(memory, gate), rows_of(memory, up)
    y = rows_of(memory, np.zeros((3, 512), np.float32))
    for form in (1, 2):
        act = memory.array((3, 1024), np.uint8, np.zeros((3, 1024), np.uint8))
        p = Quantize(
            x=address(own), up=address(other), y=address(y), act=address(act),
            x_stride=own.strides[0], up_stride=other.strides[0], y_stride=y.strides[0],
            act_stride=1024, rows=3, width=512, columns=1, format=form, mode=1,
        )  # fmt: skip
        launch("glu_quantize", p)
        made = rowwise("glu", gate, up, 512, mode=1)
        np.testing.assert_array_equal(bits(y), bits(made))
        expected = quantized(made, form, 1)
        for row in range(3):
            got = act[row, : len(expected[row])].tobytes()
            assert canonical(got, form, 512) == canonical(expected[row], form, 512)


# --- norms ---


def norm_by_cpu(x: F32, weight: F32, eps: float) -> F32:
    """One head per row."""
    y = np.empty_like(x)
    for row in range(len(x)):
        own = x[row].copy()
        mean = np.float32(SCALAR.sum_squares(own.ctypes.data, own.size)) / np.float32(own.size)
        factor = np.float32(1) / np.sqrt(mean + np.float32(eps))
        SCALAR.scale_by(
            y[row].ctypes.data, own.ctypes.data, weight.ctypes.data, float(factor), own.size
        )
    return y


@ORDERS
@pytest.mark.parametrize(("heads", "width"), [(1, 768), (1, 96), (5, 40), (3, 256)])
def test_norms_have_the_bits_of_the_cpu(heads: int, width: int, descending: bool) -> None:
    memory, rng = Memory(), np.random.default_rng(width)
    x = rng.normal(0, 3, (3, heads * width)).astype(np.float32)
    weight = memory.array((width,), np.float32, rng.normal(1, 0.1, width).astype(np.float32))
    own, y = rows_of(memory, x), rows_of(memory, x)
    p = RmsNorm(
        x=address(own), weight=address(weight), y=address(y), x_stride=own.strides[0],
        y_stride=y.strides[0], rows=3, heads=heads, width=width, eps=1e-5,
    )  # fmt: skip
    launch("rms_norm", p, descending)
    expected = norm_by_cpu(x.reshape(-1, width), weight, 1e-5).reshape(x.shape)
    np.testing.assert_array_equal(bits(y), bits(expected))


@ORDERS
def test_a_norm_adds_the_residual_before_and_quantizes_after(descending: bool) -> None:
    memory, rng = Memory(), np.random.default_rng(5)
    x, more = (rng.normal(0, 3, (2, 512)).astype(np.float32) for _ in range(2))
    weight = memory.array((512,), np.float32, rng.normal(1, 0.1, 512).astype(np.float32))
    own, add = rows_of(memory, x), rows_of(memory, more)
    total = rows_of(memory, x)
    acts = {
        form: memory.array((2, 1024), np.uint8, np.zeros((2, 1024), np.uint8)) for form in (1, 2)
    }
    p = RmsNorm(
        x=address(own), add=address(add), sum=address(total), weight=address(weight),
        act32=address(acts[1]), act256=address(acts[2]), x_stride=own.strides[0],
        add_stride=add.strides[0], sum_stride=total.strides[0], act32_stride=1024,
        act256_stride=1024, rows=2, heads=1, width=512, eps=1e-6,
    )  # fmt: skip
    launch("rms_norm", p, descending)
    np.testing.assert_array_equal(total, x + more)
    normed = norm_by_cpu(x + more, weight, 1e-6)
    for form, act in acts.items():
        for row, expected in enumerate(quantized(normed, form, 1)):
            got = act[row, : len(expected)].tobytes()
            assert canonical(got, form, 512) == canonical(expected, form, 512)


# --- rope ---


def test_a_norm_without_a_weight_only_scales() -> None:
    memory, rng = Memory(), np.random.default_rng(9)
    x = memory.array((2, 160), np.float32, rng.normal(0, 3, (2, 160)).astype(np.float32))
    y = memory.array((2, 160), np.float32)
    p = RmsNorm(
        x=address(x), y=address(y), x_stride=640, y_stride=640, rows=2, heads=2, width=80, eps=1e-5
    )
    launch("rms_norm", p)
    expected = norm_by_cpu(x.reshape(-1, 80), np.ones(80, np.float32), 1e-5)
    np.testing.assert_array_equal(bits(y.reshape(-1, 80)), bits(expected))


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("style", [0, 1])
@pytest.mark.parametrize("in_place", [False, True])
def test_rope_turns_pairs_as_the_cpu_does(style: int, in_place: bool, inverse: int) -> None:
    memory, rng = Memory(), np.random.default_rng(6)
    heads, dim, first, half, tokens = 3, 80, 8, 33, 4
    x = rng.standard_normal((tokens, heads * dim)).astype(np.float32)
    frequency = memory.array((half,), np.float64, 1e4 ** (-np.arange(half) / half))
    positions = memory.array((tokens,), np.int32, np.array([0, 1, 77, 131071], np.int32))
    cosine, sine = (memory.array((tokens, half), np.float32) for _ in range(2))
    angles = RopeAngles(
        frequency=address(frequency), positions=address(positions), cosine=address(cosine),
        sine=address(sine), magnitude=1.1, tokens=tokens, half=half, shift=2,
    )  # fmt: skip
    launch("rope_angles", angles)
    exact = (positions[:, None] + 2) * frequency
    expected_cosine = np.array([[math.cos(a) * 1.1 for a in row] for row in exact], np.float32)
    expected_sine = np.array([[math.sin(a) * 1.1 for a in row] for row in exact], np.float32)
    ulps = 1 if ON_DEVICE else 0  # the device's own cos and sin, see rope.cu
    np.testing.assert_array_max_ulp(cosine, expected_cosine, ulps)
    np.testing.assert_array_max_ulp(sine, expected_sine, ulps)
    own = rows_of(memory, x)
    y = own if in_place else rows_of(memory, np.zeros_like(x))
    p = Rope(
        x=address(own), y=address(y), cosine=address(cosine), sine=address(sine),
        x_stride=own.strides[0], y_stride=y.strides[0], tokens=tokens, heads=heads, dim=dim,
        first=first, half=half, style=style, inverse=inverse,
    )  # fmt: skip
    launch("rope", p)
    parts, turned = x.reshape(tokens, heads, dim), x.reshape(tokens, heads, dim).copy()
    at = first + np.arange(half) * (1 if style else 2)
    mate = at + (half if style else 1)
    c, s = cosine[:, None], (-sine if inverse else sine)[:, None]
    turned[..., at] = parts[..., at] * c - parts[..., mate] * s
    turned[..., mate] = parts[..., at] * s + parts[..., mate] * c
    np.testing.assert_array_equal(bits(y), bits(turned.reshape(x.shape)))
    # The last head by itself, in other rows: as keys behind queries.
    own, more = rows_of(memory, x[:, : 2 * dim]), rows_of(memory, x[:, 2 * dim :])
    y = own if in_place else rows_of(memory, np.zeros_like(own))
    other = more if in_place else rows_of(memory, np.zeros_like(more))
    p.x, p.y, p.x_stride, p.y_stride = address(own), address(y), own.strides[0], y.strides[0]
    p.more_x, p.more_y, p.heads, p.more_heads = address(more), address(other), 2, 1
    p.more_x_stride, p.more_y_stride = more.strides[0], other.strides[0]
    launch("rope", p)
    whole = np.concatenate([y, other], 1)
    np.testing.assert_array_equal(bits(whole), bits(turned.reshape(x.shape)))
