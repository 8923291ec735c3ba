"""Artifacts in parts: the same bytes as in one piece, wherever they are cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.allocation import Artifact, ArtifactKind
from ds4_common.gguf import GgmlType
from ds4_owner.artifact_parts import ArtifactParts
from ds4_owner.artifacts import SOURCE_TYPE, artifact_bytes, build_artifact
from helpers.tiny_gguf import random_tensor

K = ArtifactKind
# kind -> (in_dim, out_dim, groups as in the manifest, rows of the source)
SHAPES: dict[ArtifactKind, tuple[int, int, int, int]] = {
    K.ROW_GROUP_NORMS: (256, 9, 8, 9),
    K.Q8_F16: (64, 7, 0, 7),
    K.Q8_F32: (64, 7, 0, 7),
    K.IQ2_XXS_ALIGNED: (1024, 5, 3, 15),
    K.Q8_0_ALIGNED: (1024, 5, 1, 5),
    K.Q2_K_ALIGNED: (512, 6, 3, 18),
    K.MLA_KV_B: (512, 4096, 1, 4096),
    K.IQ2_XS_ALIGNED: (1024, 5, 3, 15),
}


def source(kind: ArtifactKind) -> tuple[Artifact, memoryview]:
    in_dim, out_dim, groups, rows = SHAPES[kind]
    rng = np.random.default_rng(int(kind))
    data = random_tensor([rows, in_dim], GgmlType(SOURCE_TYPE[kind]), rng)
    return Artifact(kind, in_dim, out_dim, groups, "t"), memoryview(data.tobytes())


SOURCES = {kind: source(kind) for kind in SHAPES}


def reader(data: memoryview, offset: int):  # type: ignore[no-untyped-def]
    def read(at: int, view: memoryview) -> None:
        view[:] = data[at - offset : at - offset + view.nbytes]

    return read


def whole(kind: ArtifactKind) -> bytes:
    artifact, data = SOURCES[kind]
    made = bytearray(artifact_bytes(kind, artifact.in_dim, artifact.out_dim, artifact.groups))
    build_artifact(artifact, 0, reader(data, 0), memoryview(made))
    return bytes(made)


@pytest.mark.parametrize("kind", SHAPES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_parts_of_any_size_make_the_artifact(kind: ArtifactKind, data: st.DataObject) -> None:
    artifact, raw = SOURCES[kind]
    offset = 4096
    parts = ArtifactParts(artifact, offset)
    made, scratch = bytearray(b"\xff" * parts.n_bytes), bytearray()
    first = 0
    while first < parts.units:
        count = data.draw(st.integers(1, parts.units - first))
        stage = bytearray(parts.part_bytes(count))
        for part, at in parts.build(first, count, memoryview(stage), scratch, reader(raw, offset)):
            made[at : at + part.n_bytes] = stage[part.offset : part.offset + part.n_bytes]
        first += count
    for at, n_bytes in parts.gaps():
        made[at : at + n_bytes] = bytes(n_bytes)
    assert made == whole(kind)


@pytest.mark.parametrize("kind", SHAPES)
def test_sections_and_gaps_cover_the_artifact_once(kind: ArtifactKind) -> None:
    parts = ArtifactParts(SOURCES[kind][0], 0)
    spans = sorted([(s.offset, s.offset + s.n_bytes) for s in parts.sections]
                   + [(at, at + n) for at, n in parts.gaps()])  # fmt: skip
    assert (spans[0][0], spans[-1][1]) == (0, parts.n_bytes)
    assert all(one[1] == other[0] for one, other in pairwise(spans))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("stage_bytes", [1, 4096, 65536, 1 << 24])
def test_what_fits_a_stage_fits_it_unless_one_unit_alone_does_not(
    kind: ArtifactKind, stage_bytes: int
) -> None:
    parts = ArtifactParts(SOURCES[kind][0], 0)
    count = parts.units_that_fit(stage_bytes)
    assert 1 <= count <= parts.units
    assert count == 1 or parts.part_bytes(count) <= stage_bytes
