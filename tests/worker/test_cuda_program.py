"""Planning of the CUDA executor: pure, so on any machine."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ds4_common.allocation import Layout
from ds4_common.contract import image as im
from ds4_common.contract.lower import lower_image
from ds4_common.errors import ExecutorFailure, UnsupportedModel
from ds4_common.gguf import GgmlType
from ds4_worker.cuda import kernels as ks
from ds4_worker.executor.api import KV_DTYPES, MOST_BIASES, ExecutorConfig
from ds4_worker.executor.cpu import CpuExecutor
from ds4_worker.executor.cuda_cache import cache_layout, kv_type
from ds4_worker.executor.cuda_counts import MOST_DRAWN, SEEN_ROOM
from ds4_worker.executor.cuda_places import NOTE_BYTES, buckets, floats_of
from ds4_worker.executor.cuda_program import partial_bytes
from ds4_worker.executor.cuda_rows import fused
from ds4_worker.executor.records import SAMPLED_RECORD, SAMPLING_BYTES
from ds4_worker.executor.rope_frequencies import factors_of, frequencies
from golden import tiny as golden
from helpers.cuda_executors import BLOCKS, WEIGHTS, places_of, planned
from helpers.executors import cpu_executor
from helpers.prepared import Prepared, prepare_file
from helpers.tiny_gguf import TinyLlama, write_llama

CONFIG = ExecutorConfig(banks=3, context_tokens=640, batch_tokens=64, batch_outputs=8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    spec = TinyLlama(
        head_dim=32, n_heads=6, n_kv_heads=2, width=192, ffn=160, context=640, biases=True,
        rope_freqs=True, weights=(GgmlType.Q8_0, GgmlType.F16, GgmlType.Q4_1),
    )  # fmt: skip
    return prepare_file(write_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", spec))


@pytest.fixture(scope="module")
def image(tiny: Prepared) -> im.Image:
    return lower_image(tiny.bundle, any_layout=True)


# --- places ---


def test_pieces_of_a_block_are_disjoint_and_inside(image: im.Image) -> None:
    places, config = places_of(image, CONFIG), CONFIG
    of_draws = 4 * -(-image.vocabulary // 32) + 8 * MOST_BIASES
    drawn = 8 * -(-4 * MOST_DRAWN // 8)
    most_lists = of_draws * config.batch_outputs + 8 * SEEN_ROOM + drawn * config.banks
    pieces = {
        "fixed": [(o, 4 * floats_of(image.weights[n])) for n, o in places.vectors.items()]
        + [
            (offset, 4 * image.ropes[turn.rope].rope_dim)
            for offset, turn in zip(places.frequencies, places.turns, strict=True)
        ],
        "work": [
            (places.scratch[0], image.token_bytes * config.batch_tokens),
            (places.scratch[1], image.row_bytes * config.batch_outputs),
            (places.partials, partial_bytes(image, config)[0]),
            (places.draws[2], 8 * image.vocabulary * config.batch_outputs),
            *(
                (offset, 2 * image.ropes[turn.rope].rope_dim * config.batch_tokens)
                for pair, turn in zip(places.angles, places.turns, strict=True)
                for offset in pair
            ),
        ],
        "draws": [
            (places.draws[0], SAMPLED_RECORD.size * config.batch_outputs),
            (places.draws[1], 4 * config.batch_outputs),
        ],
        "step": [
            (0, 12),
            *(
                (offset, 4 * config.batch_tokens)
                for offset in (places.step.tokens, places.step.positions, places.step.banks)
            ),
            (places.step.rows, 4 * config.batch_outputs),
            (places.step.sources, 4 * config.batch_tokens),
            (places.step.samplings, SAMPLING_BYTES * config.batch_outputs),
            (places.step.notes, NOTE_BYTES * config.banks),
            (places.step.again, 4 * config.banks),
            (places.step.keeps, 4 * config.banks),
            (places.step.lists, most_lists),
        ],
    }
    assert places.blocks["counts"] == 4 * (image.vocabulary + 1) * config.banks
    for block, held in pieces.items():
        ordered = sorted(held)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(ordered)), block
        assert sum(ordered[-1]) <= places.blocks[block], block
    assert places.blocks["table"] == 4 * 3 * 10
    (history,) = places.cache.histories
    assert places.blocks["cache"] >= history.page_bytes * history.pages


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_page_is_that_of_the_cpu_executor(tiny: Prepared, kv_dtype: str) -> None:
    config = replace(CONFIG, kv_dtype=kv_dtype)
    executor: CpuExecutor = cpu_executor(tiny, config)
    layout = cache_layout(lower_image(tiny.bundle), config, kv_type(kv_dtype))
    assert layout.histories[0].page_bytes == executor.page_bytes
    assert layout.histories[1:] == executor.windows
    executor.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_tokens": 641}, "context_tokens: got 641, expected 1 to 640"),
        ({"banks": 0}, "banks: got 0"),
        ({"batch_tokens": 65536}, "batch_tokens: got 65536, expected 1 to 65535"),
        ({"kv_dtype": "q4_0"}, "kv_dtype: got 'q4_0'"),
    ],
)
def test_capacities_out_of_range_are_refused(
    image: im.Image, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExecutorFailure, match=message):
        places_of(image, replace(CONFIG, **changes))


@given(st.integers(1, 65535))
def test_every_step_has_a_graph_of_less_than_twice_its_size(batch_tokens: int) -> None:
    sizes = buckets(batch_tokens)
    assert sizes[0] == 1
    assert sizes[-1] == batch_tokens
    assert all(a < b <= 2 * a for a, b in pairwise(sizes))


# --- launches ---


def test_many_tokens_change_the_way_of_products_and_attention_and_nothing_else(
    image: im.Image,
) -> None:
    ways = {"matmul": "matvec", "attend_whole": "attend_parts"}
    program = planned(image, CONFIG)
    one, many = program.launches(1), program.launches(64)
    few = [launch.kernel for launch in one if launch.kernel != "attend_fold"]
    assert [ways.get(launch.kernel, launch.kernel) for launch in many] == few
    assert {launch.kernel for launch in many if launch.unit.file == "weights.cu"} == {
        "embed", "matmul",
    }  # fmt: skip
    assert {launch.kernel for launch in many if launch.unit.file == "floats.cu"} == {"matmul"}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> im.Image:
    case = golden.cases_of("mixtral")[0]
    path = tmp_path_factory.mktemp("experts") / "experts.gguf"
    golden.write_gguf(case, path, [GgmlType.Q8_0, GgmlType.F16])
    return lower_image(prepare_file(path).bundle, any_layout=True)


def test_columns_are_sorted_once_for_each_choice_of_experts(experts: im.Image) -> None:
    config = replace(CONFIG, context_tokens=experts.context_tokens)
    many = planned(experts, config).launches(64)
    kernels = [launch.kernel for launch in many]
    assert kernels.count("sort_experts") == kernels.count("route") > 1
    grouped = [p for p in many if p.kernel == "matmul" and p.parameters.tiles]
    assert len(grouped) >= kernels.count("route")  # the others are floats
    few = [launch.kernel for launch in planned(experts, config).launches(4)]
    assert few.count("sort_experts") == few.count("matmul") == 0
    assert few.count("matvec_experts") == 3 * few.count("route")


def test_everything_that_a_launch_is_told_lies_in_a_block(image: im.Image) -> None:
    places = places_of(image, CONFIG)
    ends = {BLOCKS[name]: BLOCKS[name] + n for name, n in places.blocks.items()}
    ends[WEIGHTS] = WEIGHTS + max(n_bytes for _, n_bytes in image.allocations)
    for launch in planned(image, CONFIG).launches(64):
        addresses = [
            getattr(launch.parameters, name)
            for name, kind, *_ in launch.parameters._fields_
            if kind.__name__ == "c_ulong"
        ]
        assert addresses
        for address in filter(None, addresses):
            base = address >> 40 << 40
            assert base <= address < ends[base], (launch.kernel, hex(address))


def test_a_norm_takes_the_sum_before_it_and_the_quantization_after_it_along(
    image: im.Image,
) -> None:
    formats = [slot.act_format for slot in image.slots]
    groups = [group for s in image.sections for group in fused(s.ops, formats)]
    kinds = {tuple(op.kind for op in group) for group in groups}
    assert (im.OP_ADD, im.OP_RMS_NORM, im.OP_QUANTIZE) in kinds
    assert (im.OP_GLU, im.OP_QUANTIZE) in kinds
    assert (im.OP_ROPE, im.OP_ROPE) in kinds  # of queries and of keys
    # Nothing is lost, and nothing changes places.
    assert [op for group in groups for op in group] == [
        op for section in image.sections for op in section.ops
    ]


def test_ops_that_do_not_feed_each_other_stay_apart() -> None:
    add = im.ImageOp(im.OP_ADD, (0, 1), out=2)
    norm = im.ImageOp(im.OP_RMS_NORM, (3,), out=4, weight=0, heads=1)
    heads = im.ImageOp(im.OP_RMS_NORM, (2,), out=4, weight=0, heads=2)
    floats = im.ImageOp(im.OP_QUANTIZE, (4,), out=5)
    formats = [-1, -1, -1, -1, -1, 0]
    assert fused([add, norm], formats) == [[add], [norm]]  # the norm of something else
    assert fused([add, heads], formats) == [[add], [heads]]  # a norm per head
    assert fused([norm, floats], formats) == [[norm], [floats]]  # no such output of the kernel
    assert fused([norm, floats], [*formats[:5], 1]) == [[norm, floats]]
    turns = [
        im.ImageOp(im.OP_ROPE, (x,), out=y, rope=rope, dim=64)
        for x, y, rope in ((0, 1, 0), (2, 3, 0), (4, 5, 0), (0, 1, 0), (1, 2, 0), (3, 4, 1))
    ]  # one too many; what the one before made; another rope
    assert fused(turns, formats) == [turns[:2], turns[2:4], turns[4:5], turns[5:]]
    first, second = (im.ImageOp(im.OP_MATMUL, (5,), out=out, weight=0) for out in (6, 7))
    other = im.ImageOp(im.OP_MATMUL, (6,), out=8, weight=0)
    assert fused([first, second, other], formats) == [[first, second], [other]]


def test_products_of_the_same_columns_are_one_launch_where_their_types_agree(
    image: im.Image, tmp_path: Path
) -> None:
    """Queries, keys and values; gate and up. The other model's types go in turn."""
    spec = TinyLlama(n_layers=2, width=64, ffn=64, context=640, weights=(GgmlType.Q8_0,))
    alike = lower_image(prepare_file(write_llama(tmp_path / "t.gguf", spec)).bundle)
    for each, sizes in ((image, {1}), (alike, {1, 2, 3})):
        dense = sum(op.kind == im.OP_MATMUL for s in each.sections for op in s.ops)
        program = planned(each, CONFIG)
        found = [
            1 + sum(map(bool, launch.parameters.more_rows))
            for launch in program.launches(1)
            if isinstance(launch.parameters, ks.Matvec) and launch.kernel == "matvec"
        ]
        assert set(found) == sizes
        assert sum(found) == dense
        assert all(launch.kernel != "matvec" for launch in program.launches(17))


def test_a_refusal_names_everything_that_has_no_kernel(image: im.Image) -> None:
    """Layouts of the CPU, and an op that nobody knows: all in one message."""
    weights = [
        replace(w, layout=Layout.X8) if w.ggml_type == GgmlType.Q8_0 else w for w in image.weights
    ]
    unknown = im.ImageOp(9999, (0,), out=1)
    section = im.Section(im.SECTION_ROWS, im.SPACE_TOKENS, (unknown,))
    spoiled = replace(image, weights=weights, sections=[*image.sections, section])
    with pytest.raises(UnsupportedModel) as refusal:
        planned(spoiled, CONFIG)
    for what in ("weights of Q8_0 in layout 1", "op 9999"):
        assert str(refusal.value).count(what) == 1


# --- rope ---


def rope(**changes: Any) -> im.Rope:
    plain = im.Rope(
        rope_dim=8, style=0, factors=im.NONE, long_factors=im.NONE, truncate=1, base=10000.0,
        freq_scale=1.0, ext_factor=0.0, attn_factor=1.0, beta_fast=32.0, beta_slow=1.0,
        original_context=4096.0,
    )  # fmt: skip
    return replace(plain, **changes)


def test_plain_frequencies_are_powers_of_the_base_over_the_factors() -> None:
    found, magnitude = frequencies(rope(), [1.0, 2.0, 4.0, 8.0])
    assert found == pytest.approx([10000 ** (-i / 4) / 2**i for i in range(4)], rel=1e-15)
    assert magnitude == 1.0


def test_yarn_leaves_fast_pairs_and_scales_slow_ones() -> None:
    how = rope(rope_dim=64, ext_factor=1.0, freq_scale=0.25, attn_factor=2.0)
    found, magnitude = frequencies(how, None)
    plain, _ = frequencies(rope(rope_dim=64), None)
    assert found[0] == plain[0]
    assert found[-1] == plain[-1] * 0.25
    assert magnitude == 2.0 * (1.0 + 0.1 * math.log(4.0))


def test_long_factors_are_for_contexts_beyond_the_original() -> None:
    how = rope(factors=3, long_factors=4)
    assert [factors_of(how, n) for n in (4096, 4097)] == [3, 4]
    assert factors_of(rope(factors=3), 8192) == 3
