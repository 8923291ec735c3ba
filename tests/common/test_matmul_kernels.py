"""The numerical contract of the matmul kernels: a result depends on nothing but its operands."""

from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.allocation import Layout
from ds4_common.errors import UsageError
from ds4_common.quants import QuantType, block_weights, cpu_layout, dequantize_rows
from ds4_common.quants.native import Isa, library
from helpers.quant_blocks import (
    ALIGNED_TYPES,
    BLOCK32_TYPES,
    F32,
    FLOAT_TYPES,
    HALVES,
    PLANES_TYPES,
    SUPER_TYPES,
    U8,
    X8_TYPES,
    Kernel,
    aligned,
    bits,
    packed,
    planes,
    plausible_blocks,
    random_blocks,
)

ALL_TYPES = (*FLOAT_TYPES, *BLOCK32_TYPES, *SUPER_TYPES)
BEST = Isa(library().ds4_isa_best())
ISAS = [isa for isa in Isa if isa <= BEST and library().ds4_isa_runs(isa)]


def kernels(quant: QuantType, raw: U8, cols: int) -> list[Kernel]:
    """Every kernel that can run this tensor, the scalar one over raw blocks first."""
    rows, forms = len(raw), [(Layout.RAW, raw.reshape(-1))]
    if quant in X8_TYPES and rows % 8 == 0:
        forms.append((Layout.X8, packed(quant, raw, cols)))
    if quant in ALIGNED_TYPES and (quant != QuantType.Q2_K or rows % 2 == 0):
        forms.append(aligned(quant, raw, cols))
    if quant in PLANES_TYPES:
        forms.append((Layout.IQ2_PLANES, planes(quant, raw, cols)))
    return [Kernel(quant, layout, isa, data, rows, cols) for layout, data in forms for isa in ISAS]


def activations(rng: np.random.Generator, n: int, cols: int) -> F32:
    """Columns of different sizes; the last one has an all-zero stretch."""
    x = rng.standard_normal((n, cols)) * 10.0 ** rng.uniform(-3, 3, (n, 1))
    x[-1, : cols // 2] = 0.0
    return x.astype(np.float32)


def assert_all_agree(quant: QuantType, raw: U8, cols: int, x: F32) -> None:
    """Scalar, vector, raw, X8, aligned, every batch width and every row split: one set of bits."""
    rows = len(raw)
    reference = bits(kernels(quant, raw, cols)[0].run(x))
    for kernel in kernels(quant, raw, cols):
        granule = library().ds4_row_granule(quant, kernel.layout)
        for n in sorted({1, 2, 3, len(x)} & set(range(1, len(x) + 1))):
            cuts = range(granule, rows, granule)
            for splits in ((), tuple(cuts), (cuts[len(cuts) // 2],) if cuts else ()):
                np.testing.assert_array_equal(
                    bits(kernel.run(x[:n], splits)),
                    reference[:n],
                    err_msg=f"{quant.name} {kernel.layout.name} {kernel.isa.name} n={n} {splits}",
                )


@pytest.mark.parametrize("quant", ALL_TYPES)
@pytest.mark.parametrize("rows", [8, 13, 40])
def test_every_kernel_of_a_type_gives_the_same_bits(quant: QuantType, rows: int) -> None:
    rng = np.random.default_rng(rows)
    cols = block_weights(quant) * 3 if block_weights(quant) > 32 else 32 * 27
    raw = plausible_blocks(rng, quant, rows, cols)
    assert_all_agree(quant, raw, cols, activations(rng, 6, cols))


@pytest.mark.parametrize("quant", ALL_TYPES)
def test_blocks_of_random_bytes_give_the_same_bits(quant: QuantType) -> None:
    rng = np.random.default_rng(7)
    cols = 2 * max(block_weights(quant), 16)
    raw = random_blocks(rng, quant, 48, cols)  # about one scale in 32 is infinite or NaN
    assert_all_agree(quant, raw, cols, activations(rng, 5, cols))


@pytest.mark.parametrize("n", [4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 71, 266, 515])
@pytest.mark.parametrize("quant", ALL_TYPES)
def test_every_number_of_columns_gives_the_same_bits(quant: QuantType, n: int) -> None:
    rng = np.random.default_rng(8)
    cols = max(block_weights(quant), 64)
    raw, x = plausible_blocks(rng, quant, 24, cols), activations(rng, n, cols)
    reference = bits(kernels(quant, raw, cols)[0].run(x))
    for kernel in kernels(quant, raw, cols)[1:]:
        np.testing.assert_array_equal(bits(kernel.run(x)), reference, err_msg=f"{kernel.layout}")


@pytest.mark.parametrize("rows", [17, 24, 31, 32, 33, 48, 49, 72])
@pytest.mark.parametrize("quant", SUPER_TYPES)
def test_every_number_of_rows_gives_the_same_bits_with_many_columns(
    quant: QuantType, rows: int
) -> None:
    rng = np.random.default_rng(12)
    raw, x = plausible_blocks(rng, quant, rows, 512), activations(rng, 19, 512)
    reference = bits(kernels(quant, raw, 512)[0].run(x))
    for kernel in kernels(quant, raw, 512)[1:]:
        for splits in ((), (8,), (24,)):  # a panel that ends inside the matrix
            if all(split < rows for split in splits):
                np.testing.assert_array_equal(
                    bits(kernel.run(x, splits)), reference, err_msg=f"{kernel.layout} {splits}"
                )


@pytest.mark.parametrize("n", [8, 10, 14, 134])
@pytest.mark.parametrize("rows", [8, 24, 35, 48, 64])
@pytest.mark.parametrize("quant", BLOCK32_TYPES)
def test_panels_of_rows_that_end_early_give_the_same_bits(
    quant: QuantType, rows: int, n: int
) -> None:
    rng = np.random.default_rng(rows)
    cols = 1200 // block_weights(quant) * block_weights(quant)  # stretches of different lengths
    raw, x = plausible_blocks(rng, quant, rows, cols), activations(rng, n, cols)
    reference = bits(kernels(quant, raw, cols)[0].run(x))
    for kernel in kernels(quant, raw, cols)[1:]:
        for splits in ((), (8,), (16,)):
            if all(split < rows for split in splits):
                np.testing.assert_array_equal(
                    bits(kernel.run(x, splits)),
                    reference,
                    err_msg=f"{kernel.layout.name} {kernel.isa.name} {splits}",
                )


@pytest.mark.parametrize("quant", ALL_TYPES)
def test_more_weights_and_columns_than_any_tile_give_the_same_bits(quant: QuantType) -> None:
    rng = np.random.default_rng(9)
    cols = 2304  # more blocks than are unpacked at a time, and no multiple of that
    raw, x = plausible_blocks(rng, quant, 24, cols), activations(rng, 37, cols)
    reference = bits(kernels(quant, raw, cols)[0].run(x))
    for kernel in kernels(quant, raw, cols)[1:]:
        np.testing.assert_array_equal(bits(kernel.run(x)), reference, err_msg=f"{kernel.layout}")


@pytest.mark.parametrize("cols", [1024, 4096, 4352])
@pytest.mark.parametrize("quant", [*BLOCK32_TYPES, *SUPER_TYPES])
def test_one_column_of_short_and_of_long_rows_has_equal_bits(quant: QuantType, cols: int) -> None:
    rng = np.random.default_rng(cols + quant)  # kernels read them along one run of memory or two
    raw, x = plausible_blocks(rng, quant, 24, cols), activations(rng, 2, cols)[:1]
    reference = bits(kernels(quant, raw, cols)[0].run(x))
    for kernel in kernels(quant, raw, cols)[1:]:
        assert np.array_equal(bits(kernel.run(x)), reference), kernel


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16, 33])
@pytest.mark.parametrize("quant", ALIGNED_TYPES)
def test_rows_of_one_expert_of_an_aligned_tensor_give_the_bits_of_its_raw_matrix(
    quant: QuantType, n: int
) -> None:
    rng = np.random.default_rng(n)
    rows, cols, experts = 18, 1280, 3  # an odd number of blocks, sections that need padding
    raw, x = plausible_blocks(rng, quant, rows * experts, cols), activations(rng, n, cols)
    layout, data = aligned(quant, raw, cols, experts)
    for expert in range(experts):
        own = raw[expert * rows : (expert + 1) * rows]
        reference = bits(Kernel(quant, Layout.RAW, Isa.SCALAR, own.reshape(-1), rows, cols).run(x))
        for isa in ISAS:
            for first, end in ((0, rows), (4, 14)):  # all of it, and a thread's share
                at = expert * rows + first
                part = Kernel(quant, layout, isa, data, end - first, cols, at, len(raw))
                np.testing.assert_array_equal(
                    bits(part.run(x)), reference[:, first:end], err_msg=f"{isa.name} {expert}"
                )


def restore_scales(quant: QuantType, raw: U8, scales: U8) -> U8:
    """`raw` blocks with the half-precision fields of `scales`."""
    size = library().ds4_block_bytes(quant)
    out, source = raw.reshape(-1, size), scales.reshape(-1, size)
    for at in HALVES[quant]:
        out[:, at : at + 2] = source[:, at : at + 2]
    return out


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("quant", [*BLOCK32_TYPES, *SUPER_TYPES])
def test_extreme_quants_never_saturate(quant: QuantType, fill: int) -> None:
    """Largest and smallest quants and sub-scales against activations of +-127 throughout."""
    cols = 2 * block_weights(quant)
    raw = plausible_blocks(np.random.default_rng(9), quant, 24, cols)
    scales = raw.copy()
    raw[:] = fill
    raw.reshape(-1, library().ds4_block_bytes(quant))[:] = restore_scales(quant, raw, scales)
    x = np.ones((9, cols), np.float32)  # enough rows and columns for the kernels of many
    x[1] = -1.0
    x[2, ::2] = -1.0
    assert_all_agree(quant, raw, cols, x)


@settings(max_examples=40, deadline=None)
@given(
    quant=st.sampled_from(ALL_TYPES),
    rows=st.integers(1, 35),
    blocks=st.integers(1, 5),
    n=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_any_shape_gives_the_same_bits(
    quant: QuantType, rows: int, blocks: int, n: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    cols = blocks * block_weights(quant)
    raw = random_blocks(rng, quant, rows, cols)
    assert_all_agree(quant, raw, cols, activations(rng, n, cols))


@pytest.mark.parametrize("quant", ALL_TYPES)
def test_result_is_as_near_the_exact_product_as_the_activations_allow(quant: QuantType) -> None:
    rng = np.random.default_rng(10)
    rows, cols = 16, 1024
    raw = plausible_blocks(rng, quant, rows, cols)
    x = rng.standard_normal((5, cols)).astype(np.float32)
    weights = np.frombuffer(
        dequantize_rows(quant, Layout.RAW, raw.reshape(-1).data, rows, cols), np.float32
    ).reshape(rows, cols)
    exact = x.astype(np.float64) @ weights.T.astype(np.float64)
    scale = np.abs(x).astype(np.float64) @ np.abs(weights).T.astype(np.float64)
    if quant in FLOAT_TYPES:
        bound = scale * 2.0**-20
    else:  # half a step of amax / 127 per value of its block, plus float rounding
        block = 32 if quant in BLOCK32_TYPES else 256
        step = np.abs(x).reshape(5, -1, block).max(-1).repeat(block, -1) / 127
        bound = (step / 2 * 1.001) @ np.abs(weights).T + scale * 2.0**-20
    for kernel in kernels(quant, raw, cols):
        assert (np.abs(kernel.run(x) - exact) <= bound).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quant", [QuantType.Q4_1, QuantType.Q4_K, QuantType.F16])
def test_a_broken_activation_breaks_its_own_column_only(quant: QuantType, isa: Isa) -> None:
    rng = np.random.default_rng(11)
    cols = 512
    raw = plausible_blocks(rng, quant, 8, cols)
    x = rng.standard_normal((6, cols)).astype(np.float32)
    kernel = Kernel(quant, Layout.RAW, isa, raw.reshape(-1), 8, cols)
    healthy = kernel.run(x)
    x[2, 3] = np.nan
    broken = kernel.run(x)
    assert np.isnan(broken[2]).all()
    np.testing.assert_array_equal(np.delete(broken, 2, 0), np.delete(healthy, 2, 0))


def block_case(values: list[float], size: int) -> F32:
    x = np.zeros(size, np.float32)
    x[: len(values)] = values
    return x


SPECIAL = [
    [0.0, -0.0],
    [np.inf, 1.0],
    [-np.inf],
    [np.nan, 3.0],
    [3.4e38, -1.0],
    [1e-30, 1e-31],
    [9.99e-31],
    [1e-45],
    [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5],  # ties go to the even neighbour
]


@pytest.mark.parametrize("values", SPECIAL, ids=repr)
@pytest.mark.parametrize("quant", [QuantType.Q8_0, QuantType.Q6_K])
def test_quantizer_gives_the_same_bits_on_special_values(
    quant: QuantType, values: list[float]
) -> None:
    cols, raw = 512, np.zeros(0, np.uint8)
    x = block_case(values, cols)[None]
    columns = [Kernel(quant, Layout.RAW, isa, raw, 0, cols).quantize(x) for isa in ISAS]
    used = 512 + (12 * 16 if quant == QuantType.Q8_0 else 36 * 2)
    for column in columns[1:]:
        same = column[0, :used].view(np.float32), columns[0][0, :used].view(np.float32)
        np.testing.assert_array_equal(bits(same[0]), bits(same[1]))
    assert columns[0][0, :512].view(np.int8).min() >= -127


def test_quantizer_rounds_ties_to_even_and_reports_exact_sums() -> None:
    x = block_case([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5], 32)[None]
    column = Kernel(QuantType.Q8_0, Layout.RAW, Isa.SCALAR, np.zeros(0, np.uint8), 0, 32)
    out = column.quantize(x)[0]
    assert out[:8].view(np.int8).tolist() == [127, 0, 2, 2, 0, -2, 126, 0]
    d, s = out[64:72].view(np.float32)
    assert (d, s, out[72:76].view(np.int32)[0]) == (1.0, 255.0, 255)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(1, 4), wide=st.booleans())
def test_quantizer_gives_the_same_bits_on_any_float_bits(
    seed: int, blocks: int, wide: bool
) -> None:
    rng = np.random.default_rng(seed)
    quant, cols = (QuantType.Q4_K, 256 * blocks) if wide else (QuantType.Q4_0, 32 * blocks)
    pattern = rng.integers(0, 2**32, (3, cols), dtype=np.uint32)
    pattern[1] &= 0xBFFFFFFF  # no infinities or NaNs
    pattern[2] &= 0x83FFFFFF  # mostly tiny
    x: npt.NDArray[np.float32] = pattern.view(np.float32)
    used = cols + (cols // 256 * 36 if wide else (64 - cols % 64) % 64 + cols // 32 * 12)
    columns = [
        Kernel(quant, Layout.RAW, isa, np.zeros(0, np.uint8), 0, cols).quantize(x) for isa in ISAS
    ]
    start = cols if wide else -(-cols // 64) * 64  # the padding after q is nobody's
    for column in columns[1:]:
        np.testing.assert_array_equal(column[:, :cols], columns[0][:, :cols])
        planes = [
            np.ascontiguousarray(c[:, start:used]).view(np.float32) for c in (column, columns[0])
        ]
        np.testing.assert_array_equal(bits(planes[0]), bits(planes[1]))


def test_half_precision_conversion_is_exact_for_every_bit_pattern() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    got = np.frombuffer(
        dequantize_rows(QuantType.F16, Layout.RAW, halves.view(np.uint8).data, 1, 65536), np.float32
    )
    with np.errstate(invalid="ignore"):
        expected = halves.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(bits(got), bits(expected))


def test_isa_can_be_lowered_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from ds4_common.quants.native import library; print(library().ds4_isa_best())"
    for value, expected in (("scalar", "0"), ("", str(int(BEST))), ("avx1024", "-1")):
        monkeypatch.setenv("DS4_ISA", value)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr


def test_an_unknown_isa_in_the_environment_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DS4_ISA", "avx1024")
    with pytest.raises(
        UsageError,
        match="DS4_ISA: got 'avx1024', expected one of "
        "scalar, avx2, neon, avxvnni, avx512, amx, i8mm",
    ):
        cpu_layout(QuantType.Q4_1, 8, 32)


@pytest.mark.parametrize(
    ("ggml_type", "layout", "isa"),
    [
        (4, 0, 0),
        (999, 0, 1),
        (15, 1, 1),
        (0, 1, 0),
        (3, 2, 1),
        (3, 4, 0),
        (3, 0, 7),
        (3, 0, -1),
        (16, 8, 0),
        (17, 4, 1),
        (10, 4, 0),
        (8, 5, 0),
        (8, 7, 0),
        (10, 9, 0),
    ],
)
def test_unknown_combinations_have_no_kernel(ggml_type: int, layout: int, isa: int) -> None:
    assert not library().ds4_matmul_kernel(ggml_type, layout, isa)


def test_every_type_has_a_kernel_for_every_isa() -> None:
    assert {int(t) for t in gguf.GGMLQuantizationType} >= {int(t) for t in QuantType}
    for quant in QuantType:
        for isa in ISAS:
            assert library().ds4_matmul_kernel(quant, Layout.RAW, isa)
            x8 = library().ds4_matmul_kernel(quant, Layout.X8, isa)
            assert bool(x8) == (quant in X8_TYPES)


@pytest.mark.parametrize(
    ("form", "cols"), [(1, 0), (1, -32), (1, 33), (2, 32), (2, 255), (3, 32), (-1, 32), (0, 0)]
)
def test_unfit_activation_columns_have_no_size(form: int, cols: int) -> None:
    assert library().ds4_act_bytes(form, cols) == 0
