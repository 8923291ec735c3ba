"""Artifacts have the published bytes, however they are built."""

from __future__ import annotations

import ctypes
import itertools
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.allocation import Artifact, ArtifactKind
from ds4_common.errors import GgufError
from ds4_common.gguf import GgmlType, LogicalModel, block_bytes, block_weights
from ds4_common.quants import aligned
from ds4_owner.artifacts import (
    MLA_SHAPES,
    ArtifactOptions,
    Shape,
    artifact_bytes,
    build_artifact,
    eligible_artifacts,
    repack,
    repack_hash_line,
)
from helpers import artifact_inverse as inverse
from helpers.tiny_gguf import random_blocks, write_tensors

Bytes = npt.NDArray[np.uint8]
K = ArtifactKind
Q8, Q2K, XXS, XS = GgmlType.Q8_0, GgmlType.Q2_K, GgmlType.IQ2_XXS, GgmlType.IQ2_XS
GATE, DOWN = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_down_exps.weight"


def build(artifact: Artifact, raw: Bytes, threads: int = 1, chunk_bytes: int = 1 << 20) -> Bytes:
    """The artifact of raw bytes that lie at logical offset 1000, built over old garbage."""
    source = bytes(1000) + raw.tobytes()
    size = artifact_bytes(artifact.kind, artifact.in_dim, artifact.out_dim, artifact.groups)
    destination = bytearray(b"\xa5" * size)

    def read(offset: int, view: memoryview) -> None:
        view[:] = source[offset : offset + view.nbytes]

    build_artifact(
        artifact, 1000, read, memoryview(destination), threads=threads, chunk_bytes=chunk_bytes
    )
    return np.frombuffer(bytes(destination), np.uint8)


# --- bytes ---

CUTS = st.tuples(st.integers(1, 5), st.integers(1, 20_000))  # threads, chunk_bytes
Cut = tuple[int, int]


def random_raw(ggml_type: GgmlType, n_blocks: int, seed: int) -> Bytes:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n_blocks, block_bytes(ggml_type)), dtype=np.uint8)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(XXS, K.IQ2_XXS_ALIGNED), (XS, K.IQ2_XS_ALIGNED), (Q8, K.Q8_0_ALIGNED)]),
    st.integers(1, 2), st.integers(1, 7), st.integers(1, 3), st.integers(0, 99), CUTS,
)  # fmt: skip
def test_planes_are_inverted_by_numpy(
    source: tuple[GgmlType, ArtifactKind], k: int, m: int, experts: int, seed: int,
    cut: Cut,
) -> None:  # fmt: skip
    ggml_type, kind = source
    experts = 1 if ggml_type is Q8 else experts
    n_blocks = 1024 * k * m * experts // block_weights(ggml_type)
    raw = random_raw(ggml_type, n_blocks, seed)
    data = build(Artifact(kind, 1024 * k, m, experts, "t"), raw, *cut)
    unpack = {
        XXS: aligned.unpack_iq2_xxs, XS: aligned.unpack_iq2_xs, Q8: inverse.unpack_q8_0,
    }[ggml_type]  # fmt: skip
    assert np.array_equal(unpack(data, n_blocks), raw)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99), CUTS
)  # fmt: skip
def test_q2_k_pairs_are_inverted_by_numpy(
    k: int, half_m: int, experts: int, seed: int, cut: Cut
) -> None:
    artifact = Artifact(K.Q2_K_ALIGNED, 256 * k, 2 * half_m, experts, "t")
    raw = random_raw(Q2K, k * 2 * half_m * experts, seed)
    data = build(artifact, raw, *cut)
    assert np.array_equal(aligned.unpack_q2_k(data, 256 * k, 2 * half_m, experts), raw)


def test_q2_k_words_lie_where_the_published_formula_puts_them() -> None:
    k, m, experts = 512, 4, 3
    raw = random_raw(Q2K, k // 256 * m * experts, 1)
    data = build(Artifact(K.Q2_K_ALIGNED, k, m, experts, "t"), raw)
    pairs = experts * m // 2 * (k // 256)
    words = data.view(np.uint32)
    dm2 = words[: 2 * pairs]
    sc4 = words[-(-8 * pairs // 64) * 16 :]
    qs2 = words[(-(-8 * pairs // 64) + -(-32 * pairs // 64)) * 16 :]
    for e in range(experts):
        for r in range(m):
            for b in range(k // 256):
                block = raw[(e * m + r) * (k // 256) + b].copy().view(np.uint32)
                p, parity = (e * (m // 2) + r // 2) * (k // 256) + b, r & 1
                assert dm2[2 * p + parity] == block[20]
                for w in range(4):
                    assert sc4[8 * p + 4 * (w // 2) + 2 * parity + (w & 1)] == block[w]
                for i in range(16):
                    assert qs2[32 * p + 2 * i + parity] == block[4 + i]


@pytest.mark.parametrize("shape", MLA_SHAPES, ids=str)
def test_mla_values_are_inverted_by_numpy_for_every_cut(shape: tuple[int, int]) -> None:
    (in_dim, out_dim), heads = shape, MLA_SHAPES[shape]
    raw = random_raw(Q8, in_dim // 32 * out_dim, 2)
    values = raw.reshape(heads, out_dim // heads, in_dim // 32, 34)[:, -128:]
    artifact = Artifact(K.MLA_KV_B, in_dim, out_dim, 1, "t")
    for threads, chunk_bytes in ((1, 1 << 30), (3, 1)):
        data = build(artifact, raw, threads, chunk_bytes)
        assert np.array_equal(inverse.unpack_mla_values(data, in_dim, heads), values)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99), CUTS)
def test_q8_is_dequantized_to_f16_and_f32_exactly(k: int, m: int, seed: int, cut: Cut) -> None:
    raw = random_raw(Q8, k * m, seed)
    raw[:, 1] &= 0xBF  # keeps the scales finite
    scale = raw[:, :2].copy().view(np.float16)
    codes = raw[:, 2:].view(np.int8)
    for kind, dtype in ((K.Q8_F16, np.float16), (K.Q8_F32, np.float32)):
        data = build(Artifact(kind, 32 * k, m, 0, "t"), raw, *cut)
        expected = scale.astype(np.float32) * codes.astype(np.float32)
        assert np.array_equal(data.view(dtype), expected.astype(dtype).ravel())


def test_every_half_scale_times_every_code_rounds_like_numpy() -> None:
    scales = np.arange(1 << 16, dtype=np.uint16)
    raw = np.zeros((len(scales), 34), np.uint8)
    raw[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    raw[:, 2:] = np.array([-128, -127, -3, -1, 0, 1, 2, 7, 85, 127], np.int8).view(np.uint8)[
        np.arange(32) % 10
    ]
    values = scales.view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = values[:, None] * raw[:, 2:].view(np.int8).astype(np.float32)
        halves = expected.astype(np.float16).ravel()
    f16 = build(Artifact(K.Q8_F16, 32, len(scales), 0, "t"), raw).view(np.float16)
    f32 = build(Artifact(K.Q8_F32, 32, len(scales), 0, "t"), raw).view(np.float32)
    assert np.array_equal(f16, halves, equal_nan=True)
    assert np.array_equal(f32, expected.ravel(), equal_nan=True)
    assert np.array_equal(np.signbit(f16[~np.isnan(f16)]), np.signbit(halves[~np.isnan(f16)]))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 16), st.integers(0, 99), CUTS)
def test_row_group_norms_are_l2_norms_of_column_groups(
    k: int, m: int, groups: int, seed: int, cut: Cut
) -> None:
    raw = random_blocks(Q8, k * m, np.random.default_rng(seed))
    data = build(Artifact(K.ROW_GROUP_NORMS, 32 * k, m, groups, "t"), raw, *cut)
    weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0).reshape(m, 32 * k)
    edges = [g * 32 * k // groups for g in range(groups + 1)]
    expected = np.stack(
        [
            np.linalg.norm(weights[:, a:b].astype(np.float64), axis=1)
            for a, b in itertools.pairwise(edges)
        ],
        axis=1,
    )
    np.testing.assert_allclose(data.view(np.float32).reshape(m, groups), expected, rtol=1e-6)


def test_scratch_is_bounded_by_threads_and_chunk_not_by_the_tensor() -> None:
    raw = random_raw(XXS, 4 * 4096, 3)
    artifact = Artifact(K.IQ2_XXS_ALIGNED, 1024, 4096, 1, "t")
    destination = memoryview(bytearray(artifact_bytes(artifact.kind, 1024, 4096, 1)))
    source = memoryview(raw.tobytes())

    def read(offset: int, view: memoryview) -> None:
        view[:] = source[offset : offset + view.nbytes]

    tracemalloc.start()
    build_artifact(artifact, 0, read, destination, threads=3, chunk_bytes=10_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < raw.nbytes / 2


@pytest.mark.parametrize("threads", [1, 3])
def test_failing_read_ends_the_build_with_its_own_error(threads: int) -> None:
    artifact = Artifact(K.IQ2_XXS_ALIGNED, 1024, 64, 1, "t")
    destination = memoryview(bytearray(artifact_bytes(artifact.kind, 1024, 64, 1)))

    def read(offset: int, view: memoryview) -> None:
        if offset > 2000:
            raise GgufError("f", offset, "read", "end of file", "more bytes")

    with pytest.raises(GgufError, match="end of file"):
        build_artifact(artifact, 0, read, destination, threads=threads, chunk_bytes=300)


@pytest.mark.parametrize("destination", [bytes(100), bytearray(100)], ids=["readonly", "size"])
def test_destination_that_does_not_fit_is_refused(destination: bytes | bytearray) -> None:
    artifact = Artifact(K.IQ2_XXS_ALIGNED, 1024, 64, 1, "t")
    with pytest.raises(ValueError, match="writable bytes"):
        build_artifact(artifact, 0, lambda _o, _v: None, memoryview(destination))


@pytest.mark.parametrize(
    "change",
    [
        {"in_dim": 100}, {"in_dim": 0}, {"units": 0}, {"unit_rows": 2}, {"dst_bytes": 1},
        {"units": 1 << 62}, {"first": -1}, {"first": 5}, {"count": 5}, {"kind": 0}, {"kind": 9},
    ],
    ids=str,
)  # fmt: skip
def test_nativerepack_refuses_what_does_not_fit_and_writes_nothing(
    change: dict[str, int],
) -> None:
    fields = {"in_dim": 256, "out_dim": 4, "groups": 1, "units": 4, "unit_rows": 1}
    call = {"kind": 4, "first": 0, "count": 4, "dst_bytes": 64 + 4 * 64} | fields
    shape = Shape(*((call | change)[f] for f in [*fields, "dst_bytes"]))
    kind, first, count = ((call | change)[f] for f in ("kind", "first", "count"))
    source, destination = ctypes.create_string_buffer(b"x" * 264), ctypes.create_string_buffer(320)
    assert repack()(kind, shape, source, first, count, destination) == -1
    assert destination.raw == bytes(320)


def test_artifact_of_a_file_is_the_same_from_every_way_of_building(tmp_path: Path) -> None:
    path = write_tensors(
        tmp_path / "moe.gguf",
        {
            GATE: ((1024, 16, 4), XXS),
            "blk.0.ffn_up_exps.weight": ((1024, 16, 4), XS),
            DOWN: ((512, 32, 4), Q2K),
            "blk.0.attn_kv_b.weight": ((512, 4096), Q8),
        },
    )
    lines = set()
    with LogicalModel.open(path) as model:
        plans = eligible_artifacts(model.tensors, ArtifactOptions())
        assert len(plans) == 5
        for threads, chunk_bytes in ((1, 1 << 30), (2, 5000), (4, 77_777)):
            for plan in plans:
                destination = memoryview(bytearray(plan.n_bytes))
                build_artifact(
                    plan.artifact, plan.tensor.offset, model.read_into, destination,
                    threads=threads, chunk_bytes=chunk_bytes,
                )  # fmt: skip
                lines.add(repack_hash_line(plan.kind.name, plan.artifact, destination))
    assert len(lines) == len(plans)
    for plan in plans:
        start = f"repack-hash {plan.kind.name} {plan.tensor.name} bytes={plan.n_bytes} fnv="
        assert sum(line.startswith(start) for line in lines) == 1
