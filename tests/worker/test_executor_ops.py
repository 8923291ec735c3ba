"""What llama does not use: windows, sinks and caps over long contexts, experts of every layout.

Against the reference executor, and bit for bit over instruction sets, threads, chunks and layouts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.lower import lower_cpu
from ds4_common.contract.validate import validate
from ds4_common.errors import ContractError, ExecutorFailure
from ds4_common.gguf import GgmlType
from ds4_worker.executor.api import KV_DTYPES, ExecutorConfig, Sampling, Slice
from ds4_worker.executor.cpu import CpuExecutor
from ds4_worker.executor.reference import ReferenceExecutor
from golden import tiny
from golden.deepseek2.cases import CASES as LATENT
from golden.deepseek4.cases import CASES as COMPRESSED
from golden.gpt_oss.cases import CASES as BIASED
from golden.qwen2moe.cases import CASES as MOE
from helpers.executors import cpu_executor, logits, packed
from helpers.prepared import Prepared, prepare_file
from helpers.tiny_gguf import TinyLlama, write_llama

CONTEXT = 640  # more than two attention parts
BASE = ExecutorConfig(
    threads=2, banks=2, context_tokens=CONTEXT, batch_tokens=CONTEXT, batch_outputs=CONTEXT,
    kv_dtype="f32",
)  # fmt: skip
Rows = npt.NDArray[np.float32]


def ids(n: int, vocabulary: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocabulary, n)]


def by_cpu(prepared: Prepared, tokens: list[int], **changes: Any) -> Rows:
    executor = cpu_executor(prepared, replace(BASE, **changes))
    rows = logits(executor, tokens)
    executor.close()
    return rows


def by_reference(prepared: Prepared, tokens: list[int]) -> Rows:
    made = ReferenceExecutor(prepared.bundle, prepared.allocations, BASE)
    made.map_all_pages()
    return made.all_logits([Slice(0, 0, tokens)])


# --- attention ---


def attending(path: Path, window: int, soft_cap: float, sinks: bool) -> Prepared:
    """A tiny llama of float weights whose attention ops ask for more."""
    spec = TinyLlama(
        width=48, n_heads=6, n_kv_heads=2, head_dim=8, ffn=32, context=CONTEXT,
        weights=(GgmlType.F32,), embedding=GgmlType.F32, output=GgmlType.F32,
    )  # fmt: skip
    prepared = prepare_file(write_llama(path, spec))
    buffers = prepared.bundle.execution.buffers
    norm = next(b for b in buffers if b.name == "output_norm.weight")
    sink = pb.Buffer()
    sink.CopyFrom(norm)
    sink.name, sink.shape[:], sink.bytes = "sinks", [6], 24
    buffers.append(sink)
    for op in prepared.bundle.execution.programs[0].ops.ops:
        if op.kernel == "attend_paged":
            op.attr.update({"window": window, "soft_cap": soft_cap})
            getattr(op, "in")[6] = "sinks" if sinks else ""
    return prepared


@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks"),
    [(1, 0, False), (63, 0, True), (100, 2.0, False), (300, 0, True), (64, 3.0, True)],
)
def test_attention_over_a_window_is_what_the_reference_computes(
    tmp_path: Path, window: int, soft_cap: float, sinks: bool
) -> None:
    prepared, tokens = attending(tmp_path / "m", window, soft_cap, sinks), ids(CONTEXT, 320)
    rows = by_cpu(prepared, tokens)
    np.testing.assert_allclose(rows, by_reference(prepared, tokens), rtol=0, atol=3e-4)


def test_a_window_changes_what_is_seen_and_only_that(tmp_path: Path) -> None:
    tokens = ids(300, 320)
    whole = by_cpu(attending(tmp_path / "a", 0, 0, False), tokens)
    slid = by_cpu(attending(tmp_path / "b", 100, 0, False), tokens)
    assert (slid[:100] == whole[:100]).all()
    assert (slid[150:] != whole[150:]).any(1).all()


@pytest.mark.parametrize("window", [70, 300])
def test_attention_over_a_window_is_deterministic(tmp_path: Path, window: int) -> None:
    prepared = attending(tmp_path / "m", window, 2.5, True)
    tokens = ids(CONTEXT, 320)
    expected = by_cpu(prepared, tokens, kv_dtype="f16")
    scalar = by_cpu(prepared, tokens, kv_dtype="f16", isa="scalar", threads=1)
    assert (scalar == expected).all()
    executor = cpu_executor(prepared, replace(BASE, kv_dtype="f16", threads=3))
    edges = [0, 1, 64, 65, 130, 411, 600, *range(601, CONTEXT + 1)]  # then token by token, in parts
    for start, end in itertools.pairwise(edges):
        rows = executor.logits([Slice(1, start, tokens[start:end])])[0]
        assert (np.array(rows, np.float32) == expected[start:end]).all()
    executor.close()


def latent(path: Path, window: int) -> Prepared:
    """A tiny llama of float weights and 30 heads that all look at one vector, its key and value."""
    spec = TinyLlama(
        width=48, n_heads=30, n_kv_heads=1, head_dim=32, ffn=32, context=CONTEXT, n_layers=1,
        weights=(GgmlType.F32,), embedding=GgmlType.F32, output=GgmlType.F32,
    )  # fmt: skip
    prepared = prepare_file(write_llama(path, spec))
    bundle = prepared.bundle
    for op in bundle.execution.programs[0].ops.ops:
        inputs = getattr(op, "in")
        if op.kernel == "kv_store":
            op.kernel = "latent_store"
            del inputs[1], op.out[1], op.attr["kv_heads"], op.attr["value_dim"]
        elif op.kernel == "attend_paged":
            op.kernel = "attend_latent"
            del inputs[2], op.attr["kv_heads"]
            op.attr["window"] = window
    del bundle.execution.buffers[
        next(i for i, b in enumerate(bundle.execution.buffers) if b.name == "cache.0.v")
    ]
    bundle.serving.model.cache.histories[0].planes.remove("cache.0.v")
    bundle.serving.model.cache.histories[0].kind = pb.PAGED_LATENT
    return prepared


@pytest.mark.parametrize("window", [0, 100])
def test_attention_over_latents_is_what_the_reference_computes(tmp_path: Path, window: int) -> None:
    prepared, tokens = latent(tmp_path / "m", window), ids(CONTEXT, 320)
    rows = by_cpu(prepared, tokens)
    np.testing.assert_allclose(rows, by_reference(prepared, tokens), rtol=0, atol=3e-4)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention_over_latents_is_deterministic_in_every_type(
    tmp_path: Path, kv_dtype: str
) -> None:
    prepared, tokens = latent(tmp_path / "m", 0), ids(CONTEXT, 320)
    expected = by_cpu(prepared, tokens, kv_dtype=kv_dtype)
    scalar = by_cpu(prepared, tokens[:300], kv_dtype=kv_dtype, isa="scalar", threads=1)
    assert (scalar == expected[:300]).all()
    executor = cpu_executor(prepared, replace(BASE, kv_dtype=kv_dtype, threads=3))
    for start, end in itertools.pairwise([0, 1, 64, 65, 130, 411, 630, *range(631, CONTEXT + 1)]):
        rows = executor.logits([Slice(1, start, tokens[start:end])])[0]
        assert (np.array(rows, np.float32) == expected[start:end]).all()
    executor.close()


@pytest.mark.parametrize(
    ("kernel", "change", "message"),
    [
        ("attend_latent", {"value_dim": 33}, "attribute value_dim: got 33.0, expected an integer"),
        ("attend_latent", {"dim": 16, "value_dim": 16}, r"plane: got 'cache.0.k'"),
        ("latent_store", {"dim": 31}, "x: got"),
    ],
)
def test_latents_that_do_not_fit_are_refused(
    tmp_path: Path, kernel: str, change: dict[str, float], message: str
) -> None:
    bundle = latent(tmp_path / "m", 0).bundle
    op = next(o for o in bundle.execution.programs[0].ops.ops if o.kernel == kernel)
    op.attr.update(change)
    with pytest.raises(ContractError, match=message):
        validate(bundle)


def test_a_latent_is_stored_once(tmp_path: Path) -> None:
    executor = cpu_executor(latent(tmp_path / "m", 0), replace(BASE, kv_dtype="f16"))
    assert executor.page_bytes == 2 * 32 * executor.page_tokens
    executor.close()


# --- experts ---

QUANTS = (
    GgmlType.Q4_K, GgmlType.Q6_K, GgmlType.Q8_0, GgmlType.IQ2_XXS, GgmlType.Q2_K, GgmlType.Q4_1,
    GgmlType.F16, GgmlType.Q5_K, GgmlType.MXFP4,
)  # fmt: skip
_WIDER = {16: 256, 24: 256, 32: 256, 40: 512}


def widened(case: tiny.Case) -> tiny.Case:
    """The case with widths that K and IQ types can have; five experts, two of them used."""
    shapes = {
        name: tuple(5 if n == 6 else _WIDER.get(n, n) for n in shape)
        for name, shape in case.shapes.items()
    }
    sizes = {
        "embedding_length": 256, "expert_feed_forward_length": 256, "feed_forward_length": 512,
        "expert_shared_feed_forward_length": 512, "expert_count": 5, "expert_used_count": 2,
        "attention.key_length": 64, "attention.value_length": 64,
    }  # fmt: skip
    shapes = {
        name: (128, *shape[1:]) if ("attn_k." in name or "attn_v." in name) else shape
        for name, shape in shapes.items()
    }
    return dataclasses.replace(
        case, shapes=shapes, metadata=dict(case.metadata) | sizes, context=CONTEXT
    )


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    path = tmp_path_factory.mktemp("moe") / "moe.gguf"
    return prepare_file(tiny.write_gguf(widened(MOE[0]), path, QUANTS))


def test_quantized_experts_stay_near_the_reference(moe: Prepared) -> None:
    types = {b.ggml_type for b in moe.bundle.execution.buffers if len(b.shape) == 3}
    assert len(types) >= 5
    tokens = ids(100, tiny.VOCABULARY)
    exact = by_reference(moe, tokens)
    # 8-bit activations flip a close choice of experts now and then, which moves a whole row.
    error = np.median(np.abs(by_cpu(moe, tokens) - exact), 1)
    assert float(np.median(error)) < 0.03 * float(np.std(exact))


def test_experts_are_deterministic(moe: Prepared) -> None:
    tokens = ids(200, tiny.VOCABULARY)  # some 80 columns of an expert: several tiles
    expected = by_cpu(moe, tokens)
    for changes in ({"threads": 1}, {"threads": 7}, {"isa": "scalar", "threads": 2}):
        assert (by_cpu(moe, tokens, **changes) == expected).all()
    assert (by_cpu(packed(moe), tokens) == expected).all()
    executor = cpu_executor(moe, BASE)
    for start, end in itertools.pairwise([0, 1, 2, 40, 150, *range(151, 160), 200]):
        other = Slice(0, 0, ids(start % 37 + 1, tiny.VOCABULARY, start))
        rows = executor.logits([Slice(1, start, tokens[start:end])])[0]
        executor.step([other])
        assert (np.array(rows, np.float32) == expected[start:end]).all()
    executor.close()


def test_packed_experts_are_there_to_test(moe: Prepared) -> None:
    layouts = {b.layout for b in packed(moe).bundle.execution.buffers if len(b.shape) == 3}
    assert layouts == {0, 1}


def test_a_step_with_experts_takes_no_memory(moe: Prepared) -> None:
    executor = cpu_executor(moe, BASE)
    before = executor.native_allocations()
    executor.step([Slice(0, 0, ids(300, tiny.VOCABULARY), Sampling(temperature=0))])
    assert executor.native_allocations() == before
    executor.close()


def test_weights_that_are_no_numbers_end_in_an_error_not_a_token(tmp_path: Path) -> None:
    prepared = prepare_file(tiny.write_gguf(MOE[0], tmp_path / "m.gguf"))
    norm = next(b for b in prepared.bundle.execution.buffers if b.name == "blk.0.ffn_norm.weight")
    data = bytearray(prepared.allocations[0])
    data[norm.offset : norm.offset + 4] = np.float32(np.nan).tobytes()
    broken = Prepared(prepared.bundle, prepared.frontend, {0: memoryview(data)})
    executor = cpu_executor(broken, replace(BASE, context_tokens=64))
    (drawn,) = executor.step([Slice(0, 0, [1, 2], Sampling())])
    executor.close()
    assert drawn is not None
    assert drawn.error == "the model's logits are not finite"


def test_matrices_per_head_take_many_tokens(tmp_path: Path) -> None:
    """More tokens than a tile holds, through the absorbed form of latent attention."""
    case = dataclasses.replace(next(c for c in LATENT if c.name == "sigmoid_yarn"), context=CONTEXT)
    prepared = prepare_file(tiny.write_gguf(case, tmp_path / "m.gguf"))
    tokens = ids(150, tiny.VOCABULARY)
    rows = by_cpu(prepared, tokens)
    exact = by_reference(prepared, tokens)
    near = np.abs(rows - exact).max(1) < 1e-3
    assert near.mean() > 0.95, "a close choice of experts may fall otherwise"
    assert (by_cpu(prepared, tokens, isa="scalar", threads=5) == rows).all()


# --- images that are not what lowering writes ---


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Prepared, bytes]]:
    """Images with every kind of op: latent attention, sinks, groups, biases, gated rows, streams,
    compressed rows."""
    folder, made = tmp_path_factory.mktemp("images"), []
    for number, case in enumerate((*LATENT[1:8:3], BIASED[1], MOE[0], *COMPRESSED)):
        prepared = prepare_file(tiny.write_gguf(case, folder / f"{number}.gguf"))
        made.append((prepared, lower_cpu(prepared.bundle)))
    return made


INTERESTING = st.sampled_from(
    [0, 1, 2, 7, 8, 64, 127, 128, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFC0, 0x7F800000]
)


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_a_mutated_image_is_refused_or_runs(
    images: list[tuple[Prepared, bytes]], data: st.DataObject
) -> None:
    prepared, original = data.draw(st.sampled_from(images))
    image = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        word = data.draw(st.integers(6, len(image) // 4 - 1))  # behind the ABI number
        old = struct.unpack_from("<I", image, 4 * word)[0]
        new = data.draw(INTERESTING | st.integers(0, 512) | st.just(old + 1) | st.just(old ^ 1))
        struct.pack_into("<I", image, 4 * word, new & 0xFFFFFFFF)
    config = replace(BASE, context_tokens=64, batch_tokens=64, batch_outputs=2)
    with contextlib.suppress(ExecutorFailure):
        executor = CpuExecutor(bytes(image), prepared.allocations, config)
        try:
            executor.map_own_pages()
            executor.step([Slice(0, 0, list(range(40)), Sampling(temperature=0))])
            executor.step([Slice(0, 40, [5], Sampling(seed=1))])
            executor.step([Slice(0, 40, [6, 7], Sampling(seed=1))])
        finally:
            executor.close()
