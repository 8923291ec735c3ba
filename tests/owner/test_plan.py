"""The planner: ranges, artifacts and CPU groups cover every tensor exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from mmap import PAGESIZE

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.allocation import Artifact, ArtifactKind, Layout
from ds4_common.errors import GgufError
from ds4_owner.plan import (
    GAP_BYTES,
    GROUP_ALIGNMENT,
    SMALL_TENSOR_BYTES,
    LoadPlan,
    ModelTensors,
    PlannedArtifact,
    PlanSettings,
    plan,
    range_spans,
)

MIB = 1 << 20
Q4_1, F32, IQ2_XXS = 3, 0, 16


@dataclass(frozen=True)
class FakeTensor:
    name: str
    ggml_type: int
    dims: tuple[int, ...]
    offset: int
    n_bytes: int


def layout_of(ggml_type: int, dims: tuple[int, ...]) -> Layout:
    return Layout.X8 if ggml_type == Q4_1 and dims[1] % 8 == 0 else Layout.RAW


@st.composite
def models(draw: st.DrawFn, name: str = "base") -> ModelTensors:
    """Disjoint tensors in file order with gaps around the limit, of packable and other types."""
    offset = draw(st.integers(0, 4096))
    tensors = []
    for index in range(draw(st.integers(0, 24))):
        offset += draw(st.sampled_from((0, 32, GAP_BYTES, GAP_BYTES + 1, 3 * MIB)))
        rows = draw(st.integers(1, 400))
        ggml_type, n_bytes, dims = draw(
            st.sampled_from(
                (
                    (Q4_1, rows * 8 * 20 * 4, (128, rows * 8)),
                    (F32, rows * 64, (rows * 16,)),
                    (F32, rows * 2048, (512, rows)),
                    (IQ2_XXS, rows * 66 * 4, (1024, rows, 1)),
                    (F32, 0, (0,)),
                )
            )
        )
        tensors.append(FakeTensor(f"t{index}", ggml_type, dims, offset, n_bytes))
        offset += n_bytes
    return ModelTensors(name, offset + draw(st.integers(0, 4096)), tensors)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[ModelTensors], PlanSettings, LoadPlan]:
    base = draw(models())
    artifacts = tuple(
        PlannedArtifact(
            Artifact(ArtifactKind.IQ2_XXS_ALIGNED, t.dims[0], t.dims[1], t.dims[2], t.name),
            t.n_bytes + 64,
        )
        for t in base.tensors
        if t.ggml_type == IQ2_XXS and draw(st.booleans())
    )
    settings = PlanSettings(
        span_bytes=draw(st.sampled_from((MIB, 4 * MIB, 64 * MIB))),
        granularity=draw(st.sampled_from((4096, 2 * MIB))),
        artifacts=artifacts,
        packed=draw(st.booleans()),
        cpu_layout=layout_of,
        packed_bytes=lambda _type, dims: dims[0] * dims[1] * 20 // 32,
    )
    together = [base, draw(models("drafter"))]
    return together, settings, plan(together, settings)


@given(plans())
def test_every_tensor_lies_wholly_inside_exactly_one_preferred_place(
    planned: tuple[list[ModelTensors], PlanSettings, LoadPlan],
) -> None:
    inputs, _, result = planned
    wanted = {(m.model, t.name) for m in inputs for t in m.tensors if t.n_bytes}
    assert {(p.model, p.name) for p in result.places} == wanted
    assert len(result.places) == len(wanted)
    for place in result.places:
        allocation = result.allocations[place.allocation]
        assert allocation.model == place.model
        assert 0 <= place.offset <= place.offset + place.n_bytes <= allocation.n_bytes


@given(plans())
def test_raw_ranges_are_disjoint_and_hold_every_tensor_that_was_not_moved(
    planned: tuple[list[ModelTensors], PlanSettings, LoadPlan],
) -> None:
    inputs, _, result = planned
    layouts = {(p.model, p.name): p.layout for p in result.places}
    for model in inputs:
        ranges = result.raw_ranges(model.model)
        ends = [(a.source_offset, a.source_offset + a.source_bytes) for a in ranges]
        assert ends == sorted(ends)
        assert all(first[1] <= second[0] for first, second in pairwise(ends))
        for tensor in model.tensors:
            inside = [a <= tensor.offset and tensor.offset + tensor.n_bytes <= b for a, b in ends]
            if tensor.n_bytes and layouts[model.model, tensor.name] is Layout.RAW:
                assert sum(inside) == 1


@given(plans())
def test_ids_are_contiguous_and_sizes_are_rounded_to_the_granularity(
    planned: tuple[list[ModelTensors], PlanSettings, LoadPlan],
) -> None:
    inputs, settings, result = planned
    logical = {m.model: m.n_bytes for m in inputs}
    for index, a in enumerate(result.allocations):
        assert a.id == index
        granule = settings.granularity if a.n_bytes >= settings.granularity else PAGESIZE
        assert 0 < a.n_bytes <= a.alloc_bytes < a.n_bytes + granule
        assert a.alloc_bytes % granule == 0
        assert a.model_bytes == logical[a.model]
        assert a.source_offset + a.source_bytes <= a.model_bytes
        assert a.artifact is not None or a.n_bytes == a.source_bytes


@given(plans())
def test_groups_hold_aligned_tensors_in_file_order_within_the_span(
    planned: tuple[list[ModelTensors], PlanSettings, LoadPlan],
) -> None:
    inputs, settings, result = planned
    offsets = {t.name: t.offset for t in inputs[0].tensors}
    for a in result.allocations:
        if a.artifact is None or a.artifact.kind is not ArtifactKind.CPU_GROUP:
            continue
        members = result.members(a.id)
        assert a.artifact.groups == len(members)
        assert a.n_bytes <= settings.span_bytes or len(members) == 1
        assert [offsets[m.name] for m in members] == sorted(offsets[m.name] for m in members)
        end = 0
        for member in members:
            assert member.offset % GROUP_ALIGNMENT == 0
            assert member.offset >= end
            assert member.layout is Layout.X8 or member.n_bytes < SMALL_TENSOR_BYTES
            end = member.offset + member.n_bytes


@given(st.lists(st.tuples(st.integers(0, 1 << 24), st.integers(1, 1 << 20)), max_size=40))
def test_ranges_follow_the_published_rule(raw: list[tuple[int, int]]) -> None:
    spans = sorted((offset, offset + n_bytes) for offset, n_bytes in raw)
    ranges = range_spans(spans, 4 * MIB)
    for (_, end), (start, stop) in pairwise(ranges):
        first_of_next = next(s for s in spans if s[0] == start)
        absorbed = start <= end + GAP_BYTES
        previous_start = next(a for a, b in ranges if b == end)
        assert not (absorbed and first_of_next[1] - previous_start <= 4 * MIB)
        assert stop >= first_of_next[1]
    for span in spans:
        assert any(a <= span[0] and span[1] <= b for a, b in ranges)


def test_a_gap_of_64_kib_is_uploaded_and_one_byte_more_is_not() -> None:
    assert range_spans([(0, 10), (10 + GAP_BYTES, GAP_BYTES + 20)], 64 * MIB) == [
        (0, GAP_BYTES + 20)
    ]
    assert len(range_spans([(0, 10), (11 + GAP_BYTES, GAP_BYTES + 20)], 64 * MIB)) == 2


def test_a_tensor_above_the_span_is_one_range_of_its_own() -> None:
    assert range_spans([(0, 8), (8, 9 * MIB), (9 * MIB, 9 * MIB + 4)], 4 * MIB) == [
        (0, 8),
        (8, 9 * MIB),
        (9 * MIB, 9 * MIB + 4),
    ]


def test_allocation_ids_follow_the_published_build_order() -> None:
    tensors = [
        FakeTensor(name, IQ2_XXS, (1024, 8, 1), index * 1000, 1000)
        for index, name in enumerate("abcdefgh")
    ]
    order = (8, 6, 3, 7, 1, 2, 5, 4)  # kinds, shuffled
    artifacts = tuple(
        PlannedArtifact(Artifact(ArtifactKind(kind), 1024, 8, 1, tensor.name), 640)
        for kind, tensor in zip(order, tensors, strict=True)
    )
    settings = PlanSettings(span_bytes=MIB, granularity=4096, artifacts=artifacts)
    models = [ModelTensors(name, 8000, tensors) for name in ("base", "mtp", "drafter")]
    result = plan(models, settings)
    names = [a.model if a.artifact is None else a.artifact.kind.value for a in result.allocations]
    assert names == ["base", "mtp", "drafter", 6, 4, 8, 5, 7, 1, 2, 3]


def test_an_artifact_of_a_missing_tensor_is_refused() -> None:
    artifact = PlannedArtifact(Artifact(ArtifactKind.Q8_F16, 32, 1, 0, "nope"), 64)
    settings = PlanSettings(span_bytes=MIB, granularity=4096, artifacts=(artifact,))
    with pytest.raises(GgufError, match="nope"):
        plan([ModelTensors("base", 10, [])], settings)


@pytest.mark.parametrize("name", ["a b.ffn_up_exps.weight", "a\nalloc 9 base 1 0 1 1"])
def test_an_artifact_whose_name_would_break_the_manifest_is_refused(name: str) -> None:
    tensor = FakeTensor(name, IQ2_XXS, (1024, 8, 1), 0, 1000)
    artifact = PlannedArtifact(Artifact(ArtifactKind.IQ2_XXS_ALIGNED, 1024, 8, 1, name), 640)
    settings = PlanSettings(span_bytes=MIB, granularity=4096, artifacts=(artifact,))
    with pytest.raises(GgufError, match="without spaces"):
        plan([ModelTensors("base", 1000, [tensor])], settings)
