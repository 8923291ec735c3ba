"""What the owner hands out: allocations, and where each tensor lies in them.

Owns the two records that plan, loader, manifest, broker, recipes and lowering all speak. Pure data.
Terms as in CUDA's virtual memory management: an allocation is one shareable piece of memory with
one descriptor; `alloc_bytes` is `n_bytes` rounded up to the backend's granularity.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Layout(IntEnum):
    """Byte layout of a tensor in its allocation (docs/layouts.md). Values are wire format."""

    RAW = 0  # GGUF blocks as in the file
    X8 = 1  # eight rows interleaved, for the CPU kernels
    IQ2_XXS_ALIGNED = 4  # published artifact kinds keep their published numbers
    Q8_0_ALIGNED = 5
    Q2_K_ALIGNED = 6
    MLA_KV_B = 7
    IQ2_XS_ALIGNED = 8
    IQ2_PLANES = 9  # IQ2_XXS and IQ2_XS with indices, signs and scales apart, for the CPU kernels


class ArtifactKind(IntEnum):
    """The `kind` column of `derived-alloc` records: 1-8 as published, 64 and up are ours."""

    ROW_GROUP_NORMS = 1
    Q8_F16 = 2
    Q8_F32 = 3
    IQ2_XXS_ALIGNED = 4
    Q8_0_ALIGNED = 5
    Q2_K_ALIGNED = 6
    MLA_KV_B = 7
    IQ2_XS_ALIGNED = 8
    CPU_GROUP = 64  # many tensors in their CPU layouts; `groups` is the number of tensors


@dataclass(frozen=True, slots=True)
class Artifact:
    """The derived part of a `derived-alloc` record."""

    kind: ArtifactKind
    in_dim: int
    out_dim: int
    groups: int
    name: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """One shareable allocation. `source_*` is the span of the logical model it was made from."""

    id: int
    model: str  # "base", "mtp" or "drafter"
    model_bytes: int  # logical size of that model
    source_offset: int
    source_bytes: int
    n_bytes: int
    alloc_bytes: int
    artifact: Artifact | None = None  # None: raw range, n_bytes == source_bytes


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies. `dims` in GGUF order: dims[0] is contiguous, the input width."""

    model: str
    name: str
    ggml_type: int
    dims: tuple[int, ...]
    layout: Layout
    allocation: int
    offset: int
    n_bytes: int
