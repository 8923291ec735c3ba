"""What a loader child plans: allocations and artifacts, places of tensors, what workers get.

Owns the decisions that depend on the backend and on the family of a model. Pure but for the parsed
model: no tensor is read here. Runs in the child, with protobuf and the recipes.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence

from ds4_common import quants
from ds4_common.allocation import Allocation, ArtifactKind, Layout, TensorPlace
from ds4_common.errors import GgufError, LoaderError, TokenizerError, UnsupportedModel
from ds4_common.gguf import LogicalModel
from ds4_common.native.buffers import pinned
from ds4_common.quants.native import library
from ds4_owner import artifacts, blobs, job
from ds4_owner.config import HOST_BACKENDS, OwnerConfig
from ds4_owner.plan import (
    LoadPlan,
    ModelTensors,
    PlannedArtifact,
    PlanSettings,
    plan,
    range_spans,
)

Models = dict[str, LogicalModel]


def make_plan(config: OwnerConfig, models: Models, granularity: int) -> tuple[LoadPlan, list[str]]:
    """The plan, and what a person should know about it. GgufError when there is nothing to load."""
    notes: list[str] = []
    planned: list[PlannedArtifact] = []
    base = models.get("base")
    packed = base is not None and _packed(config, base, notes)
    if base is not None:
        options = artifacts.ArtifactOptions(
            repack_iq2=config.repack_iq2, repack_q2k=config.repack_q2k,
            repack_q8=config.repack_q8, output_certifier=config.derive_output_certifier,
            group_count=config.derive_group_count, q8_f16=config.derive_q8_f16,
            q8_f32=config.derive_q8_f32, budget_bytes=config.derive_budget_bytes,
        )  # fmt: skip
        eligible = artifacts.eligible_artifacts(base.tensors, options)
        planned = [
            PlannedArtifact(a.artifact, a.n_bytes)
            for a in eligible
            if not (packed and a.replaces) or _shared(config, a.tensor.ggml_type)
        ]
    on_device = config.backend not in HOST_BACKENDS
    settings = PlanSettings(
        span_bytes=config.span_bytes, granularity=granularity, artifacts=tuple(planned),
        page_bytes=granularity if on_device else mmap.PAGESIZE, packed=packed,
        cpu_layout=_cpu_layout, packed_bytes=_packed_bytes,
    )  # fmt: skip
    tensors = [ModelTensors(name, m.n_bytes, m.tensors) for name, m in models.items()]
    load_plan = plan(tensors, settings)
    if not load_plan.allocations:
        paths = ", ".join(m.path for m in models.values())
        raise GgufError(paths, 0, "tensor data", "none", "at least one tensor to serve")
    return load_plan, notes


def _shared(config: OwnerConfig, ggml_type: int) -> bool:
    """Whether experts lie in the published artifacts where other tensors go into CPU groups: when
    asked for, or when no layout is faster on this CPU."""
    return config.cpu_layout == "aligned" or quants.aligned_is_fastest(ggml_type)


def _packed(config: OwnerConfig, base: LogicalModel, notes: list[str]) -> bool:
    """Whether CPU groups are built: on host backends; `auto` only for models of a known family."""
    if config.backend not in HOST_BACKENDS or config.cpu_layout == "raw":
        return False
    if config.cpu_layout != "auto":
        return True
    from ds4_owner.recipes import recipe_for

    try:
        recipe_for(base.metadata.get_str("general.architecture"))
    except (UnsupportedModel, GgufError) as error:
        notes.append(f"cpu layout raw: {error}")
        return False
    return True


def _cpu_layout(ggml_type: int, dims: tuple[int, ...]) -> Layout:
    """Of a matrix, or of experts that follow each other as one tall matrix."""
    try:
        layout = quants.cpu_layout(ggml_type, math.prod(dims[1:]), dims[0])
        whole = layout is not Layout.X8 or dims[1] % quants.PACKED_ROWS == 0
        return layout if whole else Layout.RAW
    except UnsupportedModel:
        return Layout.RAW  # a type without CPU kernels is still served as it is


def pack_rows(
    layout: Layout, ggml_type: int, source: memoryview, target: memoryview, rows: int, cols: int
) -> None:
    """Packs whole rows. `quants.pack` without its checks, which cost more than small tensors do:
    these sizes come from the plan, and the native code refuses shapes it cannot pack."""
    with pinned(source) as raw, pinned(target, writable=True) as packed:
        if layout is Layout.IQ2_PLANES:
            refused = library().ds4_planes_pack(ggml_type, raw, packed, rows, cols)
        else:
            refused = library().ds4_pack_rows(ggml_type, raw, packed, 0, rows, cols)
    if refused:
        raise LoaderError(f"ggml type {ggml_type}, {rows} x {cols}: no layout {layout.name}")


def _packed_bytes(ggml_type: int, dims: tuple[int, ...]) -> int:
    layout = _cpu_layout(ggml_type, dims)
    return quants.layout_bytes(ggml_type, layout, math.prod(dims[1:]), dims[0])


def prepare_base(
    config: OwnerConfig, models: Models, load_plan: LoadPlan, notes: list[str]
) -> blobs.Prepared | None:
    """What workers need of the base model, before anything is read: metadata that nobody can serve
    is noted now. None then; clients of the ranges need none of it."""
    base = models.get("base")
    if base is None:
        return None
    name = config.served_id or blobs.served_id(base.path)
    try:
        if config.backend in HOST_BACKENDS:
            return blobs.prepare(base, load_plan.places, name)
        return prepare_for_device(base, load_plan.places, load_plan.allocations, name)
    except (UnsupportedModel, GgufError, TokenizerError) as error:
        notes.append(f"no contract, serving weights only: {error}")
        return None


def describe(models: Models, load_plan: LoadPlan, span_bytes: int) -> list[job.PlannedModel]:
    """What the owner logs and checks about each model. Ranges are those before exclusions."""
    described = []
    for name, model in models.items():
        ranges = range_spans(((t.offset, t.offset + t.n_bytes) for t in model.tensors), span_bytes)
        moved = sum(p.model == name and p.layout is not Layout.RAW for p in load_plan.places)
        files = tuple((os.path.abspath(s.path), s.stat) for s in model.shards)
        described.append(
            job.PlannedModel(name, model.n_bytes, files, sum(b - a for a, b in ranges),
                             len(ranges), moved)
        )  # fmt: skip
    return described


def scratch_bytes(config: OwnerConfig, load_plan: LoadPlan) -> int:
    """Upper bound of what loading holds beside the allocations: interpreter, buffers, blobs."""
    if config.backend == "vmm":
        from ds4_owner.device_loader import scratch_bytes as stages

        return (256 << 20) + stages(config.repack_threads)
    chunk = artifacts.DEFAULT_CHUNK_BYTES
    building = any(
        a.artifact and a.artifact.kind is not ArtifactKind.CPU_GROUP for a in load_plan.allocations
    )
    return (128 << 20) + config.repack_threads * (chunk if building else 4 << 20)


def prepare_for_device(
    base: LogicalModel, places: Sequence[TensorPlace], allocations: Sequence[Allocation], name: str
) -> blobs.Prepared:
    """For workers on the device: its image, and aligned Q8_0 where it was built. A recipe that
    cuts tensors into rows gets them raw. Raises as `blobs.prepare`."""
    aligned = {
        a.artifact.name: TensorPlace(
            p.model, p.name, p.ggml_type, p.dims, Layout.Q8_0_ALIGNED, a.id, 0, a.n_bytes
        )
        for a in allocations
        if a.artifact is not None and a.artifact.kind is ArtifactKind.Q8_0_ALIGNED
        for p in places
        if p.model == "base" and p.name == a.artifact.name
    }
    try:
        preferred = [aligned.get(p.name, p) if p.model == "base" else p for p in places]
        return blobs.prepare(base, preferred, name, on_device=True)
    except UnsupportedModel:
        return blobs.prepare(base, places, name, on_device=True)
