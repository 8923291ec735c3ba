"""CUDA kernels over quantized matrices, on any machine: the bits of the scalar definition."""

from __future__ import annotations

import numpy as np
import pytest

from ds4_common.allocation import Layout
from ds4_common.quants import QuantType, block_weights, dequantize_rows
from ds4_worker.cuda import kernels
from ds4_worker.cuda.kernels import Launch, weight_unit
from ds4_worker.cuda.parameters import Embed, Matvec
from helpers.cuda_kernels import KernelFault, Memory, address, module_of
from helpers.cuda_weights import ALL_TYPES, Case, activations, columns_of
from helpers.quant_blocks import (
    bits,
    plausible_blocks,
    random_blocks,
)


@pytest.mark.parametrize("quant", ALL_TYPES, ids=lambda q: q.name)
def test_matvec_has_the_bits_of_the_scalar_definition(quant: QuantType) -> None:
    rng = np.random.default_rng(quant)
    cols = columns_of(quant, 9 if block_weights(quant) == 256 else 70)  # more than one chunk
    for raw in (plausible_blocks(rng, quant, 21, cols), random_blocks(rng, quant, 7, cols)):
        x = activations(rng, 9, cols)
        case = Case(quant, raw, cols, x[:, None])
        expected = bits(case.expected()[:, 0, 0])
        for n, descending, rows, stages in ((1, False, 0, 0), (3, True, 4, 2), (9, False, 2, 3)):
            got = bits(case.matvec(n, descending, rows, stages))
            np.testing.assert_array_equal(got, expected[:n], err_msg=f"{n} columns")


@pytest.mark.parametrize("quant", [QuantType.F16, QuantType.Q4_0, QuantType.IQ2_XXS])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 9])
def test_rings_of_any_depth_have_the_same_bits_however_long_a_row_is(
    quant: QuantType, chunks: int
) -> None:
    rng = np.random.default_rng(chunks)
    weights = 512 if quant == QuantType.F16 else 2048 if quant == QuantType.IQ2_XXS else 1024
    cols = weights * chunks - (256 if chunks > 1 else 0)
    case = Case(
        quant, plausible_blocks(rng, quant, 9, cols), cols, activations(rng, 2, cols)[:, None]
    )
    expected = bits(case.expected()[:, 0, 0])
    for rows in (1, 2, 4):
        for stages in (2, 3, 4):
            got = bits(case.matvec(2, bool(rows % 2), rows, stages))
            np.testing.assert_array_equal(got, expected, err_msg=f"{rows} rows, {stages} stages")


@pytest.mark.parametrize("quant", [QuantType.F16, QuantType.Q8_0, QuantType.Q4_K])
def test_matrices_that_meet_the_same_columns_are_computed_together(quant: QuantType) -> None:
    """Of 21, 9 and 2 rows, one with a bias; no block goes over the end of a matrix."""
    rng = np.random.default_rng(11)
    cols, rows = columns_of(quant, 3), (21, 9, 2)
    x = activations(rng, 9, cols)[:, None]
    cases = [Case(quant, plausible_blocks(rng, quant, n, cols), cols, x) for n in rows]
    bias = cases[0].memory.array((9,), np.float32, rng.standard_normal(9).astype(np.float32))
    for per_warp in (1, 2, 4):
        made = [case.product(9) for case in cases]
        for _, y in made:
            y[:] = np.nan
        p = made[0][0]
        for i, (more, _) in enumerate(made[1:]):
            p.more_weight[i], p.more_y[i], p.more_y_stride[i] = more.weight, more.y, more.y_stride
            p.more_rows[i] = more.rows
        p.more_bias[0] = address(bias)
        launch = kernels.matvec_launch(p, quant)
        p.warp_rows = per_warp
        blocks = sum(-(-n // (4 * per_warp)) for n in rows)
        cases[0].run(
            "matvec", p, Launch((launch.grid[0], blocks, 1), launch.block, launch.shared_bytes)
        )
        for number, (case, (_, y)) in enumerate(zip(cases, made, strict=True)):
            expected = case.expected()[:, 0, 0]
            np.testing.assert_array_equal(
                bits(y), bits(expected + bias if number == 1 else expected)
            )


def test_a_small_matrix_has_blocks_for_all_multiprocessors() -> None:
    """Nearly two for each of the 132 of an H200, from 1024 rows on; pairs of rows stay together."""
    for rows, layout, per_warp in (
        (512, 0, 1),
        (1024, 0, 1),
        (2048, 0, 2),
        (4096, 0, 4),
        (9, 6, 2),
    ):
        p = Matvec(rows=rows, cols=4096, columns=1, experts=1, used=1)
        launch = kernels.matvec_launch(p, QuantType.Q2_K, layout)
        assert p.warp_rows == per_warp
        assert launch.grid[1] == -(-rows // (4 * per_warp))
    p = Matvec(rows=2048, cols=4096, columns=1, experts=64, used=8)
    assert kernels.matvec_experts_launch(p, QuantType.Q2_K).grid[:2] == (128, 8)


@pytest.mark.parametrize("quant", ALL_TYPES, ids=lambda q: q.name)
def test_embed_has_the_bits_of_the_scalar_definition(quant: QuantType) -> None:
    rng = np.random.default_rng(quant)
    cols, memory = columns_of(quant, 3), Memory()
    raw = np.concatenate(
        [plausible_blocks(rng, quant, 5, cols), random_blocks(rng, quant, 3, cols)]
    )
    table = memory.array(raw.shape, np.uint8, raw)
    tokens = memory.array((4,), np.int32, np.array([7, 0, 5, 0], np.int32))
    y = memory.array((4, cols), np.float32)
    p = Embed(
        table=address(table), tokens=address(tokens), y=address(y), table_rows=8,
        y_stride=y.strides[0], rows=4, cols=cols, factor=1.0,
    )  # fmt: skip
    module = module_of(weight_unit(quant))
    launch = kernels.embed_launch(p)
    module.run("embed", p, launch)
    rows = dequantize_rows(quant, Layout.RAW, raw.tobytes(), 8, cols)
    expected = np.asarray(rows, np.float32).reshape(8, cols)[tokens]
    np.testing.assert_array_equal(bits(y), bits(expected))


# --- many columns ---


@pytest.mark.parametrize("quant", ALL_TYPES, ids=lambda q: q.name)
def test_products_of_many_columns_have_the_bits_of_the_scalar_definition(quant: QuantType) -> None:
    rng = np.random.default_rng(quant + 100)
    cols = columns_of(quant, 3 if block_weights(quant) == 256 else 7)
    raw = np.concatenate(
        [plausible_blocks(rng, quant, 67, cols), random_blocks(rng, quant, 3, cols)]
    )
    case = Case(quant, raw, cols, activations(rng, 70, cols)[:, None])
    live = case.memory.array((1,), np.int32, np.array([67], np.int32))
    p, y = case.product(70, live=address(live))
    y[:] = -5
    case.matmul(p, descending=bool(quant % 2))
    np.testing.assert_array_equal(bits(y[:67]), bits(case.expected()[:67, 0, 0]))
    assert (y[67:] == -5).all()


@pytest.mark.parametrize("cols", [1, 7, 33, 45])
def test_floats_of_any_width_have_the_same_bits_in_tiles(cols: int) -> None:
    """The last chunk of a tile is short, and chains differ in length. Zeros of either sign and
    values that underflow would show a product too many."""
    rng = np.random.default_rng(cols)
    weights = rng.standard_normal((35, cols)).astype(np.float32) * np.float32(1e-30)
    weights[3] = -0.0
    x = activations(rng, 66, cols) * np.float32(1e-12)
    case = Case(QuantType.F32, weights.view(np.uint8).reshape(35, -1), cols, x[:, None])
    p, y = case.product(66)
    case.matmul(p)
    np.testing.assert_array_equal(bits(y), bits(case.expected()[:, 0, 0]))
    np.testing.assert_array_equal(bits(y), bits(case.matvec(66)))


def test_a_bias_is_added_once_to_every_output() -> None:
    quant, rng = QuantType.Q4_K, np.random.default_rng(1)
    case = Case(
        quant, plausible_blocks(rng, quant, 20, 256), 256, activations(rng, 3, 256)[:, None]
    )
    bias = case.memory.array((20,), np.float32, rng.standard_normal(20).astype(np.float32))
    expected = bits(case.expected()[:, 0, 0] + bias)
    p, y = case.product(3, bias=address(bias))
    case.run("matvec", p, kernels.matvec_launch(p, quant))
    np.testing.assert_array_equal(bits(y), expected)
    p, y = case.product(3, bias=address(bias))
    case.matmul(p)
    np.testing.assert_array_equal(bits(y), expected)


def test_a_launch_with_too_many_threads_is_refused_as_a_driver_would() -> None:
    module = module_of(weight_unit(QuantType.Q8_0))
    with pytest.raises(KernelFault, match="matvec: 1"):
        module.run("matvec", Matvec(), Launch((1, 1, 1), (256, 1, 1)))
