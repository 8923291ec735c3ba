"""Plans what an owner allocates: raw ranges, artifacts and CPU groups, and where each tensor lies.

Pure: tensor directories and settings in, records out; no file is read and nothing is allocated.
Owns the range rule of the published server (whole tensors, gaps up to 64 KiB uploaded, `span_bytes`
as the limit a range grows to), the order of allocation ids, and the packing of CPU groups.
Refuses: artifacts of tensors that do not exist.

A CPU group is one large allocation of many tensors in the layouts the CPU kernels read, so a CPU
worker maps a few groups and nothing else. Its packed tensors leave the raw ranges; tensors below
`SMALL_TENSOR_BYTES` are in both, because a group must be complete and the published ranges too.
Experts that a file keeps one by one (`series.py`) follow each other in one group, in any layout.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ds4_common.allocation import Allocation, Artifact, ArtifactKind, Layout, TensorPlace
from ds4_common.errors import GgufError
from ds4_owner.series import all_series, series_of

GAP_BYTES = 65_536
SMALL_TENSOR_BYTES = 65_536
GROUP_ALIGNMENT = 64

# Where the artifacts of each kind stand in the order of allocation ids (published build order).
ARTIFACT_ORDER = (
    ArtifactKind.Q2_K_ALIGNED,
    ArtifactKind.IQ2_XXS_ALIGNED,
    ArtifactKind.IQ2_XS_ALIGNED,
    ArtifactKind.Q8_0_ALIGNED,
    ArtifactKind.MLA_KV_B,
    ArtifactKind.ROW_GROUP_NORMS,
    ArtifactKind.Q8_F16,
    ArtifactKind.Q8_F32,
)
REPLACES_RAW = {
    ArtifactKind.Q2_K_ALIGNED: Layout.Q2_K_ALIGNED,
    ArtifactKind.IQ2_XXS_ALIGNED: Layout.IQ2_XXS_ALIGNED,
    ArtifactKind.IQ2_XS_ALIGNED: Layout.IQ2_XS_ALIGNED,
}


class Tensor(Protocol):
    """A tensor of a logical model; `offset` counts from the start of the logical model."""

    @property
    def name(self) -> str: ...
    @property
    def ggml_type(self) -> int: ...
    @property
    def dims(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """One model as the planner sees it: its id, logical size and tensors (any order)."""

    model: str
    n_bytes: int
    tensors: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class PlannedArtifact:
    """An artifact to build from the base tensor `artifact.name`; `n_bytes` long."""

    artifact: Artifact
    n_bytes: int


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What the plan depends on beside the models."""

    span_bytes: int
    granularity: int  # of allocations that fill at least one granule
    page_bytes: int = mmap.PAGESIZE  # of smaller ones: a norm must not cost a huge page
    artifacts: tuple[PlannedArtifact, ...] = ()
    packed: bool = False  # build CPU groups of the base model
    cpu_layout: Callable[[int, tuple[int, ...]], Layout] = field(default=lambda _t, _d: Layout.RAW)
    packed_bytes: Callable[[int, tuple[int, ...]], int] = field(default=lambda _t, _d: 0)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Allocations with contiguous ids, and one place per tensor: the one a CPU program reads."""

    allocations: tuple[Allocation, ...]
    places: tuple[TensorPlace, ...]

    @property
    def alloc_bytes(self) -> int:
        return sum(a.alloc_bytes for a in self.allocations)

    @property
    def n_bytes(self) -> int:
        return sum(a.n_bytes for a in self.allocations)

    def raw_ranges(self, model: str) -> tuple[Allocation, ...]:
        return tuple(a for a in self.allocations if a.model == model and a.artifact is None)

    def members(self, allocation: int) -> tuple[TensorPlace, ...]:
        """The tensors of one allocation in offset order."""
        return tuple(
            sorted((p for p in self.places if p.allocation == allocation), key=lambda p: p.offset)
        )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def range_spans(spans: Iterable[tuple[int, int]], span_bytes: int) -> list[tuple[int, int]]:
    """Groups (offset, end) spans into ranges by the published rule; offsets in logical bytes.

    A range absorbs the next span while that starts at most 64 KiB behind its end and the grown
    range stays within `span_bytes`. A span is never cut: a larger one is a range of its own.
    """
    ranges: list[tuple[int, int]] = []
    for offset, end in sorted(span for span in spans if span[1] > span[0]):
        if ranges:
            first, last = ranges[-1]
            if offset <= last + GAP_BYTES and end - first <= span_bytes:
                ranges[-1] = (first, max(last, end))
                continue
        ranges.append((offset, end))
    return ranges


def plan(models: Sequence[ModelTensors], settings: PlanSettings) -> LoadPlan:
    """Plans all models; the first must be `base` when artifacts or CPU groups are asked for.

    Raises GgufError when an artifact names a tensor the base model lacks, or one whose name the
    manifest, which has no escaping, could not hold.
    """
    builder = _Builder(settings)
    base = next((m for m in models if m.model == "base"), None)
    packed = _grouped_tensors(base, settings) if base is not None else {}
    replaced = {
        planned.artifact.name: REPLACES_RAW[planned.artifact.kind]
        for planned in settings.artifacts
        if planned.artifact.kind in REPLACES_RAW
    }
    for model in models:
        excluded = replaced.keys() | packed.keys() if model.model == "base" else set()
        builder.add_raw(model, excluded)
    if base is not None:
        for planned in sorted(
            settings.artifacts, key=lambda p: ARTIFACT_ORDER.index(p.artifact.kind)
        ):
            builder.add_artifact(base, planned)
        if packed:
            builder.add_groups(base, packed, replaced.keys())
    return builder.finish()


def _grouped_tensors(base: ModelTensors, settings: PlanSettings) -> dict[str, tuple[Layout, int]]:
    """Name -> layout and size of the base tensors that go into CPU groups instead of raw ranges:
    those with a packed layout, and experts one by one."""
    if not settings.packed:
        return {}
    replaced = {p.artifact.name for p in settings.artifacts if p.artifact.kind in REPLACES_RAW}
    grouped: dict[str, tuple[Layout, int]] = {}
    for t in base.tensors:
        if not t.n_bytes or t.name in replaced:
            continue
        layout = Layout.RAW
        if len(t.dims) in (2, 3):
            layout = settings.cpu_layout(t.ggml_type, t.dims)
        if layout is not Layout.RAW:
            grouped[t.name] = (layout, settings.packed_bytes(t.ggml_type, t.dims))
        elif series_of(t.name) is not None:
            grouped[t.name] = (Layout.RAW, t.n_bytes)
    return grouped


def _group_order(base: ModelTensors) -> list[list[Tensor]]:
    """What a group must hold together: single tensors by offset, experts of a series by number,
    where the first of them lies."""
    by_name = {t.name: t for t in base.tensors}
    series = {
        by_name[names[0]].name: [by_name[name] for name in names]
        for names in all_series(by_name).values()
    }
    return [
        series.get(t.name, [t])
        for t in sorted(base.tensors, key=lambda t: t.offset)
        if t.name in series or series_of(t.name) is None
    ]


class _Builder:
    """Collects allocations and places; ids are list positions."""

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.allocations: list[Allocation] = []
        self.places: dict[tuple[str, str], TensorPlace] = {}

    def add_raw(self, model: ModelTensors, excluded: Iterable[str]) -> None:
        skip = set(excluded)
        kept = [t for t in model.tensors if t.name not in skip]
        ranges = range_spans(((t.offset, t.offset + t.n_bytes) for t in kept),
                             self.settings.span_bytes)  # fmt: skip
        first = len(self.allocations)
        for offset, end in ranges:
            self._allocate(model, offset, end - offset, end - offset, None)
        index = 0
        for tensor in sorted(kept, key=lambda t: t.offset):
            if not tensor.n_bytes:
                continue
            while tensor.offset >= ranges[index][1]:
                index += 1
            self._place(model.model, tensor, Layout.RAW, first + index,
                        tensor.offset - ranges[index][0], tensor.n_bytes)  # fmt: skip

    def add_artifact(self, base: ModelTensors, planned: PlannedArtifact) -> None:
        artifact = planned.artifact
        tensor = next((t for t in base.tensors if t.name == artifact.name), None)
        if tensor is None:
            raise GgufError(base.model, 0, f"artifact source tensor {artifact.name}",
                            "no such tensor", "a tensor of the base model")  # fmt: skip
        if not artifact.name.isprintable() or " " in artifact.name:
            expected = "a name without spaces, for the manifest"
            raise GgufError(
                base.model, tensor.offset, "artifact source", repr(artifact.name), expected
            )  # fmt: skip
        made = self._allocate(base, tensor.offset, tensor.n_bytes, planned.n_bytes, artifact)
        if artifact.kind in REPLACES_RAW:
            self._place("base", tensor, REPLACES_RAW[artifact.kind], made, 0, planned.n_bytes)

    def add_groups(
        self,
        base: ModelTensors,
        grouped: dict[str, tuple[Layout, int]],
        replaced: Iterable[str],
    ) -> None:
        skip = set(replaced)
        group: list[tuple[Tensor, Layout, int, int]] = []  # tensor, layout, offset, n_bytes
        end = 0
        for together in _group_order(base):
            chosen: list[tuple[Tensor, Layout, int]] = []
            for tensor in together:
                if tensor.name in grouped:
                    chosen.append((tensor, *grouped[tensor.name]))
                elif 0 < tensor.n_bytes < SMALL_TENSOR_BYTES and tensor.name not in skip:
                    chosen.append((tensor, Layout.RAW, tensor.n_bytes))
            if not chosen:
                continue
            offset = round_up(end, GROUP_ALIGNMENT)
            if group and offset + sum(n for _, _, n in chosen) > self.settings.span_bytes:
                self._close_group(base, group)
                group, offset = [], 0
            for tensor, layout, n_bytes in chosen:
                group.append((tensor, layout, offset, n_bytes))
                end = offset = offset + n_bytes
        self._close_group(base, group)

    def _close_group(
        self, base: ModelTensors, group: list[tuple[Tensor, Layout, int, int]]
    ) -> None:
        number = sum(
            a.artifact is not None and a.artifact.kind is ArtifactKind.CPU_GROUP
            for a in self.allocations
        )
        artifact = Artifact(ArtifactKind.CPU_GROUP, 0, 0, len(group), f"cpu-group-{number}")
        source = min(t.offset for t, _, _, _ in group)
        source_end = max(t.offset + t.n_bytes for t, _, _, _ in group)
        n_bytes = group[-1][2] + group[-1][3]
        made = self._allocate(base, source, source_end - source, n_bytes, artifact)
        for tensor, layout, offset, tensor_bytes in group:
            self._place("base", tensor, layout, made, offset, tensor_bytes)

    def _allocate(
        self, model: ModelTensors, source: int, source_bytes: int, n_bytes: int,
        artifact: Artifact | None,
    ) -> int:  # fmt: skip
        made = len(self.allocations)
        whole = n_bytes >= self.settings.granularity
        granule = self.settings.granularity if whole else self.settings.page_bytes
        alloc_bytes = round_up(n_bytes, granule)
        self.allocations.append(
            Allocation(made, model.model, model.n_bytes, source, source_bytes, n_bytes,
                       alloc_bytes, artifact)
        )  # fmt: skip
        return made

    def _place(
        self, model: str, tensor: Tensor, layout: Layout, allocation: int, offset: int, n_bytes: int
    ) -> None:
        self.places[model, tensor.name] = TensorPlace(
            model, tensor.name, tensor.ggml_type, tensor.dims, layout, allocation, offset, n_bytes
        )

    def finish(self) -> LoadPlan:
        return LoadPlan(tuple(self.allocations), tuple(self.places.values()))
