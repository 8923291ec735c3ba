"""CUDA kernels over quantized matrices, on any machine: the bits of the scalar definition."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest

from ds4_common.allocation import Artifact, ArtifactKind, Layout
from ds4_common.quants import QuantType, block_weights, dequantize_rows
from ds4_common.quants.native import Isa
from ds4_owner.artifacts import artifact_bytes, build_artifact
from ds4_worker.cuda import kernels
from ds4_worker.cuda.kernels import Launch, Unit, weight_unit
from ds4_worker.cuda.limits import GRID_LIMITS
from ds4_worker.cuda.parameters import Embed, Matmul, Matvec, SortExperts
from helpers.cuda_kernels import F32, KernelFault, Memory, address, module_of
from helpers.quant_blocks import (
    BLOCK32_TYPES,
    FLOAT_TYPES,
    SUPER_TYPES,
    U8,
    Kernel,
    bits,
    plausible_blocks,
    random_blocks,
)

QUANTIZED = (*BLOCK32_TYPES, *SUPER_TYPES)
ALL_TYPES = (*FLOAT_TYPES, *QUANTIZED)


def columns_of(quant: QuantType, blocks: int) -> int:
    return max(block_weights(quant), 32) * blocks


class Case:
    """Matrices of one type in device memory, activations, and the scalar answer.

    raw [experts * rows, row bytes]; x [tokens, places, cols]: the columns of each token.
    """

    def __init__(
        self, quant: QuantType, raw: U8, cols: int, x: F32, experts: int = 1, layout: int = 0
    ) -> None:
        self.quant, self.raw, self.layout, self.x = quant, raw, layout, x
        self.rows, self.cols, self.experts = len(raw) // experts, cols, experts
        self.memory = Memory()
        tall = Kernel(quant, Layout.RAW, Isa.SCALAR, raw.reshape(-1), len(raw), cols)
        columns = tall.quantize(x.reshape(-1, cols)).reshape(*x.shape[:2], -1)
        self.acts = self.memory.array(columns.shape, np.uint8, columns)
        held = raw if not layout else repacked(layout, raw, cols, experts)
        self.weight = self.memory.array(held.shape, np.uint8, held)

    def expected(self) -> F32:
        """[tokens, places, experts, rows]: every column against every matrix."""
        parts = self.raw.reshape(self.experts, self.rows, -1)
        flat = self.x.reshape(-1, self.cols)
        made = [
            Kernel(self.quant, Layout.RAW, Isa.SCALAR, part.reshape(-1), self.rows, self.cols)
            for part in parts
        ]
        return np.stack([kernel.run(flat) for kernel in made], 1).reshape(
            *self.x.shape[:2], self.experts, self.rows
        )

    def product(self, tokens: int, used: int = 1, **fields: int) -> tuple[Matvec, F32]:
        """Parameters for the first tokens, and where the outputs will be."""
        y = self.memory.array((tokens, used * self.rows + 5), np.float32)
        p = Matvec(
            weight=address(self.weight), acts=address(self.acts), y=address(y),
            act_stride=self.acts.strides[0], y_stride=y.strides[0], rows=self.rows,
            cols=self.cols, columns=tokens, experts=self.experts, used=used,
            act_columns=self.x.shape[1], **fields,
        )  # fmt: skip
        return p, y[:, : used * self.rows]

    def run(self, name: str, p: ctypes.Structure, launch: Launch, descending: bool = False) -> None:
        unit = weight_unit(self.quant, self.layout)
        module_of(unit).run(name, p, launch, descending)

    def matmul(self, p: Matvec, descending: bool = False) -> None:
        """The dense product on tensor cores."""
        whole = Matmul(product=p)
        self.run("matmul", whole, kernels.matmul_launch(whole, self.quant), descending)

    def matvec(self, columns: int, descending: bool = False, rows: int = 0, stages: int = 0) -> F32:
        """y [columns, rows]; cut as the launch has it, or so many rows to a warp and so deep a
        ring."""
        p, y = self.product(columns)
        launch = kernels.matvec_launch(p, self.quant, self.layout)
        if rows:
            p.warp_rows, p.stages = rows, stages
            shared = kernels.matvec_shared_bytes(self.quant, self.layout, min(columns, 8), stages)
            grid = (launch.grid[0], -(-self.rows // (4 * rows)), 1)
            launch = Launch(grid, launch.block, shared)
        self.run("matvec", p, launch, descending)
        return y.copy()


def repacked(layout: int, raw: U8, cols: int, experts: int) -> U8:
    """The artifact of raw rows, as the loader makes it."""
    rows = len(raw) // experts
    made = Artifact(ArtifactKind(layout), cols, rows, experts, "weight")
    out = bytearray(artifact_bytes(made.kind, cols, rows, experts))
    data = raw.tobytes()

    def read(offset: int, view: memoryview) -> None:
        view[:] = data[offset : offset + len(view)]

    build_artifact(made, 0, read, memoryview(out))
    return np.frombuffer(out, np.uint8)


def activations(rng: np.random.Generator, n: int, cols: int) -> F32:
    x = rng.standard_normal((n, cols)) * 10.0 ** rng.uniform(-3, 3, (n, 1))
    x[-1, : cols // 2] = 0.0
    return x.astype(np.float32)


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


# --- experts ---


def chosen(case: Case, tokens: int, used: int, rng: np.random.Generator) -> F32:
    """Rows of routes; token 0 takes one expert more often than any model would."""
    routes = case.memory.array((tokens, 2 * used + 2), np.float32)
    for row in routes:
        row[:used] = rng.permutation(case.experts)[:used]
    routes[0, :used] = routes[0, 0]
    return routes


@pytest.mark.parametrize("own", [False, True], ids=["one column", "a column each"])
@pytest.mark.parametrize("quant", [*FLOAT_TYPES, QuantType.Q8_0, QuantType.Q2_K, QuantType.MXFP4])
def test_each_column_meets_the_matrix_of_its_expert(quant: QuantType, own: bool) -> None:
    rng = np.random.default_rng(6)
    cols, experts, used, tokens, rows = columns_of(quant, 2), 5, 3, 6, 22
    raw = plausible_blocks(rng, quant, experts * rows, cols)
    x = activations(rng, tokens * (used if own else 1), cols)
    case = Case(quant, raw, cols, x.reshape(tokens, -1, cols), experts)
    routes = chosen(case, tokens, used, rng)
    bias = rng.standard_normal((experts, rows)).astype(np.float32)
    held = case.memory.array(bias.shape, np.float32, bias)
    fields = {
        "routes": address(routes), "route_stride": routes.strides[0], "bias": address(held),
    }  # fmt: skip
    everything, expected = case.expected(), np.empty((tokens, used, rows), np.float32)
    for token in range(tokens):
        for j in range(used):
            expert = int(routes[token, j])
            expected[token, j] = everything[token, j if own else 0, expert] + bias[expert]
    p, y = case.product(tokens, used, **fields)
    case.run("matvec_experts", p, kernels.matvec_experts_launch(p, quant))
    np.testing.assert_array_equal(bits(y), bits(expected.reshape(tokens, -1)))
    p, y = case.product(tokens, used, **fields)
    sort = SortExperts(
        routes=address(routes), routes_stride=routes.strides[0], tokens=tokens, used=used,
        experts=experts, tile_columns=kernels.MATMUL_TILE,
    )  # fmt: skip
    tiles = sort_into(case.memory, sort)
    grouped = Matmul(product=p, sorted=sort.columns, tiles=sort.tiles, n_tiles=sort.n_tiles)
    case.run("matmul", grouped, kernels.matmul_experts_launch(grouped, quant))
    assert len(tiles) <= kernels.most_expert_tiles(tokens, used, experts)
    np.testing.assert_array_equal(bits(y), bits(expected.reshape(tokens, -1)))


def sort_into(memory: Memory, sort: SortExperts) -> npt.NDArray[np.int32]:
    """Runs sort_experts; the tiles it made."""
    most = kernels.most_expert_tiles(sort.tokens, sort.used, sort.experts)
    most = max(most, sort.tokens * sort.used if sort.tile_columns < kernels.MATMUL_TILE else 0)
    columns = memory.array((sort.tokens * sort.used,), np.int32)
    tiles, count = memory.array((most, 4), np.int32), memory.array((1,), np.int32)
    sort.columns, sort.tiles, sort.n_tiles = (address(a) for a in (columns, tiles, count))
    kernel = kernels.KERNELS["sort_experts"]
    module_of(Unit(kernel.file)).run("sort_experts", sort, kernel.launch(sort))
    made: npt.NDArray[np.int32] = tiles[: count[0]]
    return made


@pytest.mark.parametrize("tile_columns", [2, 64])
def test_columns_are_sorted_by_expert_in_their_order(tile_columns: int) -> None:
    rng, memory, tokens, used, experts = np.random.default_rng(7), Memory(), 40, 4, 300
    numbers = rng.integers(0, experts, (tokens, used)) * rng.integers(0, 2, (tokens, used))
    routes = memory.array((tokens, 8), np.float32)
    routes[:, :4] = numbers
    sort = SortExperts(
        routes=address(routes), routes_stride=32, tokens=tokens, used=used, experts=experts,
        tile_columns=tile_columns,
    )  # fmt: skip
    tiles = sort_into(memory, sort)
    flat = numbers.reshape(-1)
    order = np.argsort(flat, kind="stable")
    columns = np.ctypeslib.as_array(
        (ctypes.c_int32 * len(flat)).from_address(sort.columns), (len(flat),)
    )
    np.testing.assert_array_equal(columns, order)
    covered = [c for e, at, n, _ in tiles.tolist() for c in order[at : at + n] if flat[c] == e]
    assert covered == order.tolist()
    assert tiles[:, 2].max() <= tile_columns


def test_without_routes_there_is_a_matrix_per_head() -> None:
    quant, rng = QuantType.Q5_0, np.random.default_rng(8)
    heads, rows, cols, tokens = 3, 18, 64, 2
    raw = plausible_blocks(rng, quant, heads * rows, cols)
    x = activations(rng, tokens * heads, cols).reshape(tokens, heads, cols)
    case = Case(quant, raw, cols, x, heads)
    p, y = case.product(tokens, heads)
    case.run("matvec_experts", p, kernels.matvec_experts_launch(p, quant))
    everything = case.expected()
    expected = np.stack([everything[:, h, h] for h in range(heads)], 1)
    np.testing.assert_array_equal(bits(y), bits(expected.reshape(tokens, -1)))


BEYOND = GRID_LIMITS[1] + 11


@pytest.mark.parametrize("quant", [*FLOAT_TYPES, QuantType.Q8_0], ids=lambda q: q.name)
def test_more_places_of_tokens_than_a_grid_has_in_y_are_all_computed(quant: QuantType) -> None:
    rng = np.random.default_rng(9)
    cols, experts, used = columns_of(quant, 1), 2, 2
    tokens = BEYOND // used
    raw = plausible_blocks(rng, quant, experts, cols)
    few = Case(quant, raw, cols, activations(rng, 5, cols)[:, None], experts)
    expected = few.expected()[:, 0, :, 0]  # [5, experts]
    acts = few.memory.array((tokens, few.acts.shape[-1]), np.uint8)
    acts[:] = few.acts[np.arange(tokens) % 5, 0]
    routes = few.memory.array((tokens, used), np.float32)
    routes[:] = np.stack([np.arange(tokens) // 3 % 2, np.arange(tokens) // 7 % 2], 1)
    y = few.memory.array((tokens, used), np.float32)
    p = Matvec(
        weight=address(few.weight), acts=address(acts), y=address(y), routes=address(routes),
        act_stride=acts.strides[0], y_stride=y.strides[0], route_stride=routes.strides[0],
        rows=1, cols=cols, columns=tokens, experts=experts, used=used, act_columns=1,
    )  # fmt: skip
    launch = kernels.matvec_experts_launch(p, quant)
    assert tokens * used > GRID_LIMITS[1]
    assert launch.grid[2] > 1
    few.run("matvec_experts", p, launch)
    number = np.arange(tokens)[:, None] % 5
    np.testing.assert_array_equal(bits(y), bits(expected[number, routes.astype(int)]))


def test_tiles_of_experts_beyond_the_y_of_a_grid_are_those_of_the_list() -> None:
    """A grid as it is folded, made small: tensor cores on 65536 tiles would take minutes here."""
    quant, rng = QuantType.Q8_0, np.random.default_rng(10)
    cols, experts, used, tokens, rows = 64, 5, 2, 7, 20
    raw = plausible_blocks(rng, quant, experts * rows, cols)
    case = Case(quant, raw, cols, activations(rng, tokens, cols)[:, None], experts)
    routes = chosen(case, tokens, used, rng)
    p, y = case.product(tokens, used, routes=address(routes), route_stride=routes.strides[0])
    y[:] = np.nan
    sort = SortExperts(
        routes=address(routes), routes_stride=routes.strides[0], tokens=tokens, used=used,
        experts=experts, tile_columns=kernels.MATMUL_TILE,
    )  # fmt: skip
    tiles = sort_into(case.memory, sort)
    grouped = Matmul(product=p, sorted=sort.columns, tiles=sort.tiles, n_tiles=sort.n_tiles)
    assert len(tiles) in (4, 5)
    case.run("matmul", grouped, Launch((1, 2, 3), (128, 1, 1)))
    everything = case.expected()[:, 0]
    expected = [[everything[t, int(routes[t, j])] for j in range(used)] for t in range(tokens)]
    np.testing.assert_array_equal(bits(y), bits(np.stack(expected).reshape(tokens, -1)))


# --- artifacts ---


def test_transposed_value_heads_give_the_bits_of_their_raw_rows() -> None:
    """Kind 7: the last 128 rows of each head of [heads (nope + 128), K]."""
    quant, rng = QuantType.Q8_0, np.random.default_rng(7)
    heads, nope, cols, tokens = 16, 128, 512, 2  # a published shape
    raw = plausible_blocks(rng, quant, heads * (nope + 128), cols)
    values = np.ascontiguousarray(
        raw.reshape(heads, nope + 128, -1)[:, nope:].reshape(heads * 128, -1)
    )
    x = activations(rng, tokens * heads, cols).reshape(tokens, heads, cols)
    case = Case(quant, values, cols, x, heads)
    made = Artifact(ArtifactKind.MLA_KV_B, cols, len(raw), 1, "weight")
    out, data = bytearray(artifact_bytes(made.kind, cols, len(raw), 1)), raw.tobytes()

    def read(offset: int, view: memoryview) -> None:
        view[:] = data[offset : offset + len(view)]

    build_artifact(made, 0, read, memoryview(out))
    held = np.frombuffer(out, np.uint8)
    case.weight, case.layout = case.memory.array(held.shape, np.uint8, held), kernels.VALUE_HEADS
    p, y = case.product(tokens, heads)
    case.run("matvec_experts", p, kernels.matvec_experts_launch(p, quant, kernels.VALUE_HEADS))
    everything = case.expected()
    expected = np.stack([everything[:, h, h] for h in range(heads)], 1)
    np.testing.assert_array_equal(bits(y), bits(expected.reshape(tokens, -1)))


@pytest.mark.parametrize(("layout", "kind"), kernels.ARTIFACT_LAYOUTS.items())
def test_artifacts_give_the_bits_of_the_raw_tensor(layout: int, kind: int) -> None:
    quant, rng = QuantType(kind), np.random.default_rng(layout)
    experts, used, rows, cols, tokens = (1 if layout == 5 else 3), 2, 22, 1024, 3
    raw = plausible_blocks(rng, quant, experts * rows, cols)
    case = Case(quant, raw, cols, activations(rng, tokens, cols)[:, None], experts, layout)
    everything = case.expected()[:, 0]
    routes = chosen(case, tokens, used, rng)
    p, y = case.product(tokens, used, routes=address(routes), route_stride=routes.strides[0])
    expected = np.stack(
        [[everything[t, int(routes[t, j])] for j in range(used)] for t in range(tokens)]
    )
    launch = kernels.matvec_experts_launch(p, quant, layout)
    case.run("matvec_experts", p, launch)
    np.testing.assert_array_equal(bits(y), bits(expected.reshape(tokens, -1)))
    p, y = case.product(tokens, used, routes=address(routes), route_stride=routes.strides[0])
    p.warp_rows, p.stages = 4, 3
    shared = kernels.matvec_shared_bytes(quant, layout, 1, 3)
    case.run("matvec_experts", p, Launch((2, *launch.grid[1:]), launch.block, shared), True)
    np.testing.assert_array_equal(bits(y), bits(expected.reshape(tokens, -1)))
    if experts == 1:
        for per_warp, stages in ((0, 0), (4, 4)):
            got = case.matvec(tokens, rows=per_warp, stages=stages)
            np.testing.assert_array_equal(bits(got), bits(everything[:, 0]))
        p, y = case.product(tokens)
        case.matmul(p)
        np.testing.assert_array_equal(bits(y), bits(everything[:, 0]))
    floats_at = case.memory.array((rows, cols), np.float32)
    table = Embed(
        table=address(case.weight), y=address(floats_at),
        table_rows=experts * rows, y_stride=4 * cols, rows=rows, cols=cols, factor=1.0,
    )  # fmt: skip
    case.run("embed", table, kernels.embed_launch(table))
    floats = dequantize_rows(quant, Layout.RAW, raw.tobytes(), len(raw), cols, 0, rows)
    np.testing.assert_array_equal(floats_at.reshape(-1), np.asarray(floats, np.float32))


def test_a_launch_with_too_many_threads_is_refused_as_a_driver_would() -> None:
    module = module_of(weight_unit(QuantType.Q8_0))
    with pytest.raises(KernelFault, match="matvec: 1"):
        module.run("matvec", Matvec(), Launch((1, 1, 1), (256, 1, 1)))
