"""Block layouts: what the bytes mean, the X8 layout and its inverse, and what is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.allocation import Layout
from ds4_common.errors import UnsupportedModel
from ds4_common.quants import (
    QuantType,
    block_bytes,
    block_weights,
    cpu_layout,
    dequantize_rows,
    pack,
    tensor_bytes,
    unpack,
    unpack_planes,
)
from helpers.quant_blocks import (
    ALIGNED_TYPES,
    BLOCK32_TYPES,
    FLOAT_TYPES,
    PLANES_TYPES,
    SUPER_TYPES,
    U8,
    X8_TYPES,
    aligned,
    bits,
    expected_floats,
    packed,
    planes,
    plausible_blocks,
    random_blocks,
)

# Parts of a raw block: where its halves lie, its fifth bits (or None), its body in bytes.
PARTS: dict[QuantType, tuple[list[int], int | None, slice]] = {
    QuantType.Q4_0: ([0], None, slice(2, 18)),
    QuantType.Q4_1: ([0, 2], None, slice(4, 20)),
    QuantType.Q5_0: ([0], 2, slice(6, 22)),
    QuantType.Q5_1: ([0, 2], 4, slice(8, 24)),
    QuantType.Q8_0: ([0], None, slice(2, 34)),
    QuantType.Q2_K: ([80, 82], None, slice(0, 80)),
    QuantType.Q3_K: ([108], None, slice(0, 108)),
    QuantType.Q4_K: ([0, 2], None, slice(4, 144)),
    QuantType.Q5_K: ([0, 2], None, slice(4, 176)),
    QuantType.Q6_K: ([208], None, slice(0, 208)),
}


def q6_k_order() -> list[int]:
    """Raw dword at each place of a Q6_K body: the scales, then by half and four weights of each of
    its quarters the low bits of the quarters 0 and 2, of 1 and 3, and the high bits of all."""
    steps = [(half, j) for half in range(2) for j in range(8)]
    return [48, 49, 50, 51] + [
        at for half, j in steps for at in (16 * half + j, 16 * half + 8 + j, 32 + 8 * half + j)
    ]


def x8_to_raw(quant: QuantType, data: U8, rows: int, cols: int) -> U8:
    """numpy inverse of the X8 layout: docs/layouts.md as a program. Returns [rows, row bytes]."""
    halves, high_at, body = PARTS[quant]
    blocks, size = cols // block_weights(quant), block_bytes(quant)
    groups = data.reshape(rows // 8, blocks, 8 * size)
    raw = np.zeros((rows // 8, blocks, 8, size), np.uint8)
    at = 0
    for half in halves:  # f16 [8]
        raw[..., half : half + 2] = groups[..., at : at + 16].reshape(rows // 8, blocks, 8, 2)
        at += 16
    if high_at is not None:  # byte 4r+t, bit j = fifth bit of weight 4j+t of row r
        plane = groups[..., at : at + 32].reshape(rows // 8, blocks, 8, 4)
        weights = np.unpackbits(plane[..., None], axis=-1, bitorder="little")  # [.., r, t, j]
        ordered = np.swapaxes(weights, -1, -2).reshape(rows // 8, blocks, 8, 32)
        raw[..., high_at : high_at + 4] = np.packbits(ordered, axis=-1, bitorder="little")
        at += 32
    dwords = groups[..., at:].reshape(rows // 8, blocks, -1, 8, 4)  # [.., j, r, t]
    if quant == QuantType.Q6_K:
        dwords = dwords[..., np.argsort(q6_k_order()), :, :]
    raw[..., body] = np.swapaxes(dwords, -3, -2).reshape(rows // 8, blocks, 8, -1)
    return np.swapaxes(raw, 1, 2).reshape(rows, blocks * size)


@settings(max_examples=60, deadline=None)
@given(
    quant=st.sampled_from(X8_TYPES),
    groups=st.integers(1, 5),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_pack_then_unpack_is_the_identity(
    quant: QuantType, groups: int, blocks: int, seed: int
) -> None:
    rows, cols = 8 * groups, block_weights(quant) * blocks
    raw = random_blocks(np.random.default_rng(seed), quant, rows, cols)
    data = packed(quant, raw, cols)
    np.testing.assert_array_equal(x8_to_raw(quant, data, rows, cols), raw)
    back = bytearray(raw.size)
    unpack(quant, data.data, back, rows, cols)
    assert bytes(back) == raw.tobytes()


@pytest.mark.parametrize("quant", X8_TYPES)
def test_row_ranges_packed_in_any_order_give_the_same_tensor(quant: QuantType) -> None:
    rows, cols = 40, 3 * block_weights(quant)
    raw = random_blocks(np.random.default_rng(1), quant, rows, cols)
    target = bytearray(raw.size)
    for row0, row1 in ((24, 40), (0, 8), (8, 24)):
        pack(quant, raw[row0:row1].tobytes(), target, rows, cols, row0, row1)
    assert bytes(target) == packed(quant, raw, cols).tobytes()
    part = bytearray(16 * raw.shape[1])
    unpack(quant, bytes(target), part, rows, cols, 8, 24)
    assert bytes(part) == raw[8:24].tobytes()


def planes_by_definition(quant: QuantType, raw: U8) -> U8:
    """docs/layouts.md in numpy, from blocks [n, block bytes]."""
    n = len(raw)
    if quant == QuantType.IQ2_XXS:
        words = raw[:, 2:].copy().view(np.uint32).reshape(n, 8, 2)
        index = words[:, :, :1].copy().view(np.uint8).reshape(n, 32)
        tails = words[:, :, 1:]
        seven = (tails >> np.array([0, 7, 14, 21], np.uint32) & 127).astype(np.uint8)
        scales, ninth = (2 * (tails >> 28) + 1).astype(np.uint8).reshape(n, 8), raw[:, :0]
    else:
        codes = raw[:, 2:66].copy().view(np.uint16)
        index, seven = (codes & 255).astype(np.uint8), (codes >> 9).astype(np.uint8)
        ninth = np.packbits((codes >> 8 & 1).astype(np.uint8), axis=1, bitorder="little")
        scales = raw[:, 66:]
    seven = seven.reshape(n, 32)
    parity = np.bitwise_count(seven) & 1
    return np.hstack([raw[:, :2], scales, ninth, index, seven | parity << 7])


@pytest.mark.parametrize("quant", PLANES_TYPES)
def test_planes_are_as_documented_and_give_the_raw_blocks_back(quant: QuantType) -> None:
    rows, cols = 5, 768
    raw = random_blocks(np.random.default_rng(3), quant, rows, cols)
    made = planes(quant, raw, cols)
    expected = planes_by_definition(quant, raw.reshape(-1, block_bytes(quant)))
    np.testing.assert_array_equal(made, expected.reshape(-1))
    back = bytearray(raw.size)
    unpack_planes(quant, made.data, back, rows, cols)
    assert bytes(back) == raw.tobytes()
    with pytest.raises(ValueError, match=r"got .* expected"):
        unpack_planes(quant, made.data[1:], back, rows, cols)
    with pytest.raises(ValueError, match="no such CPU layout"):
        unpack_planes(QuantType.Q2_K, made.data, back, rows, cols)


@pytest.mark.parametrize("quant", [*FLOAT_TYPES, *BLOCK32_TYPES, *SUPER_TYPES])
@pytest.mark.parametrize("make", [plausible_blocks, random_blocks])
def test_dequantized_rows_equal_the_gguf_package_bit_for_bit(
    quant: QuantType, make: object
) -> None:
    assert callable(make)
    rows, cols = 24, 512
    raw = make(np.random.default_rng(2), quant, rows, cols)
    with np.errstate(all="ignore"):
        expected = expected_floats(quant, raw)
    got = dequantize_rows(quant, Layout.RAW, raw.reshape(-1).data, rows, cols)
    np.testing.assert_array_equal(bits(np.frombuffer(got, np.float32)), bits(expected.reshape(-1)))
    forms = [(Layout.X8, packed(quant, raw, cols))] if quant in X8_TYPES else []
    forms += [aligned(quant, raw, cols)] if quant in ALIGNED_TYPES else []
    forms += [(Layout.IQ2_PLANES, planes(quant, raw, cols))] if quant in PLANES_TYPES else []
    for layout, data in forms:
        part = dequantize_rows(quant, layout, data.data, rows, cols, 5, 19)
        np.testing.assert_array_equal(
            bits(np.frombuffer(part, np.float32)), bits(expected[5:19].reshape(-1))
        )


@pytest.mark.parametrize("quant", list(QuantType))
def test_sizes_agree_with_the_gguf_package(quant: QuantType) -> None:
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(quant))]
    assert (block_weights(quant), block_bytes(quant)) == (weights, size)
    assert tensor_bytes(quant, 3, 2 * weights) == 6 * size


def test_cpu_layout_interleaves_measured_types_of_fitting_shape_only() -> None:
    assert cpu_layout(QuantType.Q4_1, 576, 1536) == Layout.X8
    assert cpu_layout(QuantType.Q8_0, 49152, 576) == Layout.X8
    assert cpu_layout(QuantType.Q4_1, 12, 576) == Layout.RAW
    assert cpu_layout(QuantType.Q4_K, 64, 512) == Layout.X8
    assert cpu_layout(QuantType.Q4_K, 63, 512) == Layout.RAW
    assert cpu_layout(QuantType.Q6_K, 64, 512) == Layout.X8
    assert cpu_layout(QuantType.Q6_K, 65, 512) == Layout.RAW
    assert cpu_layout(QuantType.IQ4_XS, 64, 512) == Layout.RAW
    assert cpu_layout(QuantType.IQ3_XXS, 64, 512) == Layout.RAW
    assert cpu_layout(QuantType.F32, 8, 32) == Layout.RAW


@pytest.mark.parametrize("ggml_type", [4, 5, 9, 15, 24, 36, 1000])
def test_types_without_kernels_are_refused_by_name(ggml_type: int) -> None:
    with pytest.raises(UnsupportedModel, match=rf"ggml type {ggml_type}: no CPU kernel.*Q4_1"):
        cpu_layout(ggml_type, 8, 256)
    with pytest.raises(UnsupportedModel):
        tensor_bytes(ggml_type, 8, 256)


@pytest.mark.parametrize(
    ("ggml_type", "rows", "cols", "row0", "row1", "raw", "out"),
    [
        (QuantType.Q4_1, 16, 64, 0, 16, 639, 640),  # source one byte short
        (QuantType.Q4_1, 16, 64, 0, 16, 640, 639),  # target one byte short
        (QuantType.Q4_1, 16, 64, 0, 16, 640, 641),
        (QuantType.Q4_1, 16, 64, 4, 12, 320, 640),  # not at a group
        (QuantType.Q4_1, 16, 64, 8, 8, 0, 640),
        (QuantType.Q4_1, 16, 64, 8, 24, 640, 640),
        (QuantType.Q4_1, 16, 64, -8, 8, 640, 640),
        (QuantType.Q4_1, 12, 64, 0, 8, 320, 480),  # rows do not fill groups
        (QuantType.Q4_1, 16, 48, 0, 16, 480, 480),  # cols do not fill blocks
        (QuantType.IQ4_XS, 8, 256, 0, 8, 1088, 1088),  # no such layout
    ],
)
def test_misfitting_pack_requests_are_refused(
    ggml_type: QuantType, rows: int, cols: int, row0: int, row1: int, raw: int, out: int
) -> None:
    with pytest.raises(ValueError, match=r"expected|layout"):
        pack(ggml_type, bytes(raw), bytearray(out), rows, cols, row0, row1)
    with pytest.raises(ValueError, match=r"expected|layout"):
        unpack(ggml_type, bytes(out), bytearray(raw), rows, cols, row0, row1)


def test_a_read_only_target_is_refused() -> None:
    with pytest.raises(BufferError):
        pack(QuantType.Q4_0, bytes(144), memoryview(bytes(144)), 8, 32)


@pytest.mark.parametrize(
    ("layout", "size", "rows", "row0", "row1"),
    [
        (Layout.RAW, 159, 8, 0, 8),
        (Layout.RAW, 160, 8, 0, 9),
        (Layout.RAW, 160, 8, -1, 8),
        (Layout.RAW, 160, 8, 5, 4),
        (Layout.X8, 140, 7, 0, 7),
        (Layout.Q8_0_ALIGNED, 160, 8, 0, 8),
    ],
)
def test_misfitting_dequantize_requests_are_refused(
    layout: Layout, size: int, rows: int, row0: int, row1: int
) -> None:
    with pytest.raises(ValueError, match=r"expected|layout"):
        dequantize_rows(QuantType.Q4_1, layout, bytes(size), rows, 32, row0, row1)
