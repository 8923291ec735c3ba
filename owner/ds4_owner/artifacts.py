"""Derived artifacts of the base model: which tensors get one, how large it is, and its bytes.

Owns: the published eligibility rules, the geometry of each kind and the driver of native/repack.c.
Refuses: a candidate whose block count disagrees with its dims (the whole start fails), a named
tensor that cannot be dequantized, more dequantized bytes than the budget. Layouts: docs/layouts.md.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from ds4_common.allocation import Artifact, ArtifactKind
from ds4_common.errors import BudgetError, GgufError, NativeLibraryError, UsageError
from ds4_common.gguf import GgmlType, block_bytes, block_weights
from ds4_common.identity import fnv1a64
from ds4_common.native import lib
from ds4_owner.plan import REPLACES_RAW, Tensor, round_up

MIN_Q8_BYTES = 2 << 20
MLA_VALUE_DIM = 128
DEFAULT_CHUNK_BYTES = 1 << 20  # source and result stay in the second-level cache

# (in_dim, out_dim) of a known kv_b tensor -> its heads.
MLA_SHAPES = {(512, 4096): 16, (512, 32768): 128, (1024, 20480): 64}
_GATE_UP = (".ffn_gate_exps.weight", ".ffn_up_exps.weight", ".mlp.experts.w13_weight")
_DOWN = ".ffn_down_exps.weight"
SOURCE_TYPE = {
    ArtifactKind.ROW_GROUP_NORMS: GgmlType.Q8_0,
    ArtifactKind.Q8_F16: GgmlType.Q8_0,
    ArtifactKind.Q8_F32: GgmlType.Q8_0,
    ArtifactKind.IQ2_XXS_ALIGNED: GgmlType.IQ2_XXS,
    ArtifactKind.Q8_0_ALIGNED: GgmlType.Q8_0,
    ArtifactKind.Q2_K_ALIGNED: GgmlType.Q2_K,
    ArtifactKind.MLA_KV_B: GgmlType.Q8_0,
    ArtifactKind.IQ2_XS_ALIGNED: GgmlType.IQ2_XS,
}


@dataclass(frozen=True, slots=True)
class ArtifactOptions:
    """What the flags ask for; defaults are the published ones."""

    repack_iq2: bool = True
    repack_q2k: bool = True
    repack_q8: bool = True
    output_certifier: bool = False
    group_count: int = 8
    q8_f16: tuple[str, ...] = ()
    q8_f32: tuple[str, ...] = ()
    budget_bytes: int = 4 << 30  # of kinds 1 to 3 together; 0 is unlimited


@dataclass(frozen=True, slots=True)
class ArtifactPlan:
    """One artifact to build. `replaces`: the raw tensor is left out of the raw ranges."""

    kind: ArtifactKind
    tensor: Tensor
    in_dim: int
    out_dim: int
    groups: int
    n_bytes: int
    replaces: bool

    @property
    def artifact(self) -> Artifact:
        """The record that goes into plan and manifest."""
        return Artifact(self.kind, self.in_dim, self.out_dim, self.groups, self.tensor.name)


# --- eligibility ---


def eligible_artifacts(tensors: Sequence[Tensor], options: ArtifactOptions) -> list[ArtifactPlan]:
    """Plans in the published build order: by kind, then in the order of `tensors`.

    Raises GgufError for a candidate of impossible size, UsageError for a named tensor that is not a
    2-D Q8_0 one, BudgetError when kinds 1 to 3 exceed their budget.
    """
    kinds: list[tuple[bool, ArtifactKind]] = [
        (options.repack_q2k, ArtifactKind.Q2_K_ALIGNED),
        (options.repack_iq2, ArtifactKind.IQ2_XXS_ALIGNED),
        (options.repack_iq2, ArtifactKind.IQ2_XS_ALIGNED),
        (options.repack_q8, ArtifactKind.Q8_0_ALIGNED),
        (options.repack_q8, ArtifactKind.MLA_KV_B),
    ]
    plans = [
        _plan(kind, tensor)
        for wanted, kind in kinds
        if wanted
        for tensor in tensors
        if tensor.ggml_type == SOURCE_TYPE[kind] and _ELIGIBLE[kind](tensor)
    ]
    derived = _dequantized(tensors, options)
    needed = sum(plan.n_bytes for plan in derived)
    if options.budget_bytes and needed > options.budget_bytes:
        raise BudgetError(
            f"derived artifacts of kinds 1-3: need {needed} bytes, budget {options.budget_bytes} "
            "bytes; raise --derive-budget-gb (0 = unlimited) or name fewer tensors"
        )
    return plans + derived


def _iq2_expert(tensor: Tensor) -> bool:
    return (
        len(tensor.dims) == 3
        and tensor.dims[0] % 1024 == 0
        and tensor.n_bytes % block_bytes(tensor.ggml_type) == 0
        and tensor.name.endswith(_GATE_UP)
    )


def _q2k_expert(tensor: Tensor) -> bool:
    return (
        len(tensor.dims) == 3
        and tensor.dims[0] % 256 == 0
        and tensor.dims[1] % 2 == 0
        and tensor.n_bytes % block_bytes(tensor.ggml_type) == 0
        and tensor.name.endswith(_DOWN)
    )


def _q8_dense(tensor: Tensor) -> bool:
    if len(tensor.dims) != 2 or "token_embd" in tensor.name:
        return False
    k, m = tensor.dims
    if (k, m) == (2560, 640) or (k == 128 and m >= 8192):
        return True
    divided = k % 128 == 0 and k <= 4096 and m % 128 == 0 and m >= 2048
    return (k % 1024 == 0 or divided) and tensor.n_bytes >= MIN_Q8_BYTES


def _mla_kv_b(tensor: Tensor) -> bool:
    return tensor.dims in MLA_SHAPES and tensor.name.endswith(".attn_kv_b.weight")


_ELIGIBLE: dict[ArtifactKind, Callable[[Tensor], bool]] = {
    ArtifactKind.IQ2_XXS_ALIGNED: _iq2_expert,
    ArtifactKind.IQ2_XS_ALIGNED: _iq2_expert,
    ArtifactKind.Q2_K_ALIGNED: _q2k_expert,
    ArtifactKind.Q8_0_ALIGNED: _q8_dense,
    ArtifactKind.MLA_KV_B: _mla_kv_b,
}


def _dequantized(tensors: Sequence[Tensor], options: ArtifactOptions) -> list[ArtifactPlan]:
    plans = []
    if options.output_certifier:
        source = _q8_matrix(tensors, "output.weight", "--derive-output-certifier")
        plans.append(_plan(ArtifactKind.ROW_GROUP_NORMS, source, options.group_count))
    for name in options.q8_f16:
        source = _q8_matrix(tensors, name, "--derive-q8-f16")
        plans.append(_plan(ArtifactKind.Q8_F16, source))
    for name in options.q8_f32:
        source = _q8_matrix(tensors, name, "--derive-q8-f32")
        plans.append(_plan(ArtifactKind.Q8_F32, source))
    return plans


def _q8_matrix(tensors: Sequence[Tensor], name: str, flag: str) -> Tensor:
    tensor = next((t for t in tensors if t.name == name), None)
    if tensor is None:
        raise UsageError(f"{flag}: the base model has no tensor {name}; see: ds4 inspect")
    if tensor.ggml_type != GgmlType.Q8_0 or len(tensor.dims) != 2:
        got = f"{len(tensor.dims)}-D {GgmlType(tensor.ggml_type).name}"
        raise UsageError(f"{flag}: tensor {name} is {got}, expected a 2-D Q8_0 tensor")
    return tensor


# --- geometry ---


class Shape(ctypes.Structure):
    """`ds4_repack_shape` of native/repack.h."""

    _fields_ = (
        ("in_dim", ctypes.c_int64),
        ("out_dim", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("units", ctypes.c_int64),
        ("unit_rows", ctypes.c_int64),
        ("dst_bytes", ctypes.c_int64),
    )


def artifact_bytes(kind: ArtifactKind, in_dim: int, out_dim: int, groups: int) -> int:
    """Size of the artifact; `groups` as in the manifest record."""
    weights = in_dim * out_dim * max(groups, 1)
    if kind is ArtifactKind.ROW_GROUP_NORMS:
        return 4 * out_dim * groups
    if kind is ArtifactKind.Q8_F16:
        return 2 * weights
    if kind is ArtifactKind.Q8_F32:
        return 4 * weights
    if kind is ArtifactKind.MLA_KV_B:
        return MLA_SHAPES[in_dim, out_dim] * (in_dim // 32) * MLA_VALUE_DIM * 34
    parts = sections(kind, weights // block_weights(SOURCE_TYPE[kind]))
    return sum(round_up(n, 64) for n in parts)


def sections(kind: ArtifactKind, n_blocks: int) -> tuple[int, ...]:
    """Bytes of the sections of an aligned kind; each begins at a multiple of 64."""
    if kind is ArtifactKind.Q2_K_ALIGNED:
        return 4 * n_blocks, 16 * n_blocks, 64 * n_blocks
    if kind is ArtifactKind.IQ2_XS_ALIGNED:
        return 2 * n_blocks, 8 * n_blocks, 64 * n_blocks
    return 2 * n_blocks, (32 if kind is ArtifactKind.Q8_0_ALIGNED else 64) * n_blocks


def _plan(kind: ArtifactKind, tensor: Tensor, groups: int | None = None) -> ArtifactPlan:
    in_dim, out_dim, *rest = tensor.dims
    if groups is None:
        groups = 0 if kind in (ArtifactKind.Q8_F16, ArtifactKind.Q8_F32) else (rest or [1])[0]
    weights, n_bytes = block_weights(tensor.ggml_type), block_bytes(tensor.ggml_type)
    expected = in_dim * out_dim * (rest or [1])[0] // weights
    if in_dim % weights or tensor.n_bytes != expected * n_bytes:
        raise GgufError(
            tensor.name,
            tensor.offset,
            f"artifact kind {kind.value}: blocks of the tensor",
            f"{tensor.n_bytes} bytes, {tensor.n_bytes / n_bytes:g} blocks",
            f"{expected} blocks, from dims {list(tensor.dims)}",
        )
    size = artifact_bytes(kind, in_dim, out_dim, groups)
    return ArtifactPlan(kind, tensor, in_dim, out_dim, groups, size, kind in REPLACES_RAW)


def shape_of(artifact: Artifact) -> Shape:
    kind, rows, unit_rows = artifact.kind, artifact.out_dim, 1
    if kind in REPLACES_RAW:
        rows *= artifact.groups
    if kind is ArtifactKind.Q2_K_ALIGNED:
        unit_rows = 2
    if kind is ArtifactKind.MLA_KV_B:
        unit_rows = rows // MLA_SHAPES[artifact.in_dim, artifact.out_dim]
    size = artifact_bytes(kind, artifact.in_dim, artifact.out_dim, artifact.groups)
    return Shape(
        artifact.in_dim, artifact.out_dim, artifact.groups, rows // unit_rows, unit_rows, size
    )


# --- building ---


@functools.cache
def repack() -> Callable[..., int]:
    function = lib.load().ds4_repack
    function.argtypes = [
        ctypes.c_int, ctypes.POINTER(Shape), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
        ctypes.c_void_p,
    ]  # fmt: skip
    function.restype = ctypes.c_int
    return function


def build_artifact(
    artifact: Artifact,
    source_offset: int,
    read: Callable[[int, memoryview], None],
    destination: memoryview,
    *,
    threads: int = 1,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> None:
    """Fills `destination` (writable, exactly the artifact's size) from the raw tensor.

    `read(offset, view)` fills a view with logical bytes of the model, from several threads at once;
    what it raises is raised here after the other threads have stopped. Each thread holds a scratch
    of about `chunk_bytes`, at least one unit (a row, a row pair, a head). The bytes do not depend
    on `threads` or `chunk_bytes`.
    """
    shape = shape_of(artifact)
    if destination.nbytes != shape.dst_bytes or destination.readonly:
        raise ValueError(f"{artifact.name}: destination must be {shape.dst_bytes} writable bytes")
    source_type = SOURCE_TYPE[artifact.kind]
    row_blocks = shape.in_dim // block_weights(source_type)
    unit_bytes = shape.unit_rows * row_blocks * block_bytes(source_type)
    step = max(1, chunk_bytes // unit_bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(destination))
    for start, end in _gaps(artifact):
        destination[start:end] = bytes(end - start)

    firsts = range(0, shape.units, step)
    threads = max(1, min(threads, len(firsts)))
    # Allocated here, not in the threads, so the order of allocations does not depend on timing.
    scratches: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(threads):
        scratches.put(bytearray(min(step, shape.units) * unit_bytes))

    def job(first: int) -> None:
        count = min(step, shape.units - first)
        scratch = scratches.get()
        try:
            read(source_offset + first * unit_bytes, memoryview(scratch)[: count * unit_bytes])
            address = ctypes.addressof(ctypes.c_char.from_buffer(scratch))
            if repack()(artifact.kind, shape, address, first, count, base):
                raise NativeLibraryError(
                    f"repack of {artifact.name}: the native library refuses kind {artifact.kind} "
                    f"of {shape.in_dim} x {shape.out_dim} x {shape.groups}; rebuild the library"
                )
        finally:
            scratches.put(scratch)

    if threads == 1:
        for first in firsts:
            job(first)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="repack") as pool:
        futures = [pool.submit(job, first) for first in firsts]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _gaps(artifact: Artifact) -> Iterator[tuple[int, int]]:
    """[start, end) of the padding between the sections, which must read as zero."""
    kind = artifact.kind
    if kind not in REPLACES_RAW and kind is not ArtifactKind.Q8_0_ALIGNED:
        return
    weights = artifact.in_dim * artifact.out_dim * artifact.groups
    at = 0
    for n_bytes in sections(kind, weights // block_weights(SOURCE_TYPE[kind])):
        yield at + n_bytes, at + round_up(n_bytes, 64)
        at += round_up(n_bytes, 64)


def repack_hash_line(what: str, artifact: Artifact, data: memoryview) -> str:
    """The line that `--repack-hash` prints; `data` is the finished artifact."""
    return f"repack-hash {what} {artifact.name} bytes={data.nbytes} fnv={fnv1a64(data):016x}"
