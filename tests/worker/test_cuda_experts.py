"""Each column meets the matrix of its own expert, head or artifact, with the bits of the scalar."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest

from ds4_common.allocation import Artifact, ArtifactKind, Layout
from ds4_common.quants import QuantType, dequantize_rows
from ds4_owner.artifacts import artifact_bytes, build_artifact
from ds4_worker.cuda import kernels
from ds4_worker.cuda.kernels import Launch, Unit
from ds4_worker.cuda.limits import GRID_LIMITS
from ds4_worker.cuda.parameters import Embed, Matmul, Matvec, SortExperts
from helpers.cuda_kernels import F32, Memory, address, module_of
from helpers.cuda_weights import Case, activations, columns_of
from helpers.quant_blocks import (
    FLOAT_TYPES,
    bits,
    plausible_blocks,
)


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
