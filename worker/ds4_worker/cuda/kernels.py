"""What kernels there are and how each is launched: pure data, for the executor and the tests.

Owns: per kernel its name, file, its one parameter (parameters.py), its grid, block and shared
memory as functions of the parameter's fields, and the ops of the registry that it computes; and
which compilation units exist. The head of each kernel file says what the fields mean. Addresses
are device addresses, 0 where a field is optional and absent; strides are in bytes. `live` is the
address of an int32: rows in use in this step (0: all).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ds4_common.quants import QuantType
from ds4_worker.cuda.attention import (
    ATTEND_ROWS,
    ROW_PART,
    attend_fold_launch,
    attend_part_bytes,
    attend_parts_launch,
    attend_rows_fold_launch,
    attend_rows_launch,
    attend_rows_parts_launch,
    attend_shared_bytes,
    attend_tile,
    attend_whole_launch,
    part_tokens,
)
from ds4_worker.cuda.limits import Launch, ceil_div, folded
from ds4_worker.cuda.matvec import (
    ARTIFACT_LAYOUTS,
    FLOAT_TYPES,
    VALUE_HEADS,
    matvec_experts_launch,
    matvec_launch,
    matvec_shared_bytes,
)
from ds4_worker.cuda.parameters import (
    MORE_MATRICES,
    Attend,
    AttendRows,
    Compress,
    Count,
    Embed,
    Index,
    KvStore,
    Matmul,
    Matvec,
    Plane,
    Quantize,
    RmsNorm,
    Rope,
    RopeAngles,
    Route,
    Rowwise,
    Sample,
    SortExperts,
    StoreRows,
    Streams,
)

__all__ = [
    "ARTIFACT_LAYOUTS",
    "ATTEND_ROWS",
    "CACHE_KERNELS",
    "FLOAT_TYPES",
    "KERNELS",
    "KV_TYPES",
    "MANY_KERNELS",
    "MATMUL_TILE",
    "MORE_MATRICES",
    "ROW_PART",
    "UNITS",
    "VALUE_HEADS",
    "WEIGHT_KERNELS",
    "Attend",
    "AttendRows",
    "Compress",
    "Count",
    "Embed",
    "Index",
    "Kernel",
    "KvStore",
    "Launch",
    "Matmul",
    "Matvec",
    "Plane",
    "Quantize",
    "RmsNorm",
    "Rope",
    "RopeAngles",
    "Route",
    "Rowwise",
    "Sample",
    "SortExperts",
    "StoreRows",
    "Streams",
    "Unit",
    "attend_part_bytes",
    "attend_shared_bytes",
    "attend_tile",
    "embed_launch",
    "matmul_experts_launch",
    "matmul_launch",
    "matvec_experts_launch",
    "matvec_launch",
    "matvec_shared_bytes",
    "most_expert_tiles",
    "part_tokens",
    "weight_unit",
]

KV_TYPES = ("f16", "f32", "bf16", "q8_0")  # by number: native/kv.h


class Unit(msgspec.Struct, frozen=True):
    """A kernel file with what it is compiled for: a ggml type and a layout, the type of the KV
    cache, or neither."""

    file: str
    ggml_type: int = -1
    layout: int = 0
    kv_type: int = -1

    @property
    def label(self) -> str:
        if self.kv_type >= 0:
            return f"{self.file} ({KV_TYPES[self.kv_type]})"
        if self.ggml_type < 0:
            return self.file
        layout = f", layout {self.layout}" if self.layout else ""
        return f"{self.file} ({QuantType(self.ggml_type).name}{layout})"

    def options(self) -> tuple[str, ...]:
        if self.kv_type >= 0:
            return (f"-DDS4_KV={self.kv_type}",)
        if self.ggml_type < 0:
            return ()
        return (f"-DDS4_TYPE={self.ggml_type}", f"-DDS4_LAYOUT={self.layout}")


class Kernel(NamedTuple):
    """`launch` maps filled-in parameters to the launch; `ops` are names of contract/ops.py."""

    name: str
    file: str
    parameters: type[ctypes.Structure]
    launch: Callable[[Any], Launch]
    ops: tuple[str, ...] = ()


# ---- launches ----------------------------------------------------------------------------------


def _rowwise(p: Rowwise) -> Launch:
    return Launch((min(ceil_div(p.width, 256), 64), p.rows, 1), (256, 1, 1))


def _quantize(p: Quantize) -> Launch:
    size = 256 if p.format == 2 else 32
    return Launch((ceil_div(ceil_div(p.width, size) * p.columns, 8), p.rows, 1), (256, 1, 1))


def _rms_norm(p: RmsNorm) -> Launch:
    return Launch((p.heads, p.rows, 1), (256, 1, 1), 4 * p.width)


def _rope_angles(p: RopeAngles) -> Launch:
    return Launch((ceil_div(p.half, 64), p.tokens, 1), (64, 1, 1))


def _rope(p: Rope) -> Launch:
    return Launch((p.heads + p.more_heads, p.tokens, 1), (64, 1, 1))


def embed_launch(p: Embed) -> Launch:
    return Launch((ceil_div(p.cols, 4096), p.rows, 1), (128, 1, 1))


MATMUL_TILE = 64  # columns of a block of matmul, and rows where blocks are quantized


def most_expert_tiles(tokens: int, used: int, experts: int) -> int:
    """Each expert's last tile may be short."""
    columns = tokens * used
    return min(columns, columns // MATMUL_TILE + experts)


def _matmul_blocks(p: Matmul, ggml_type: int) -> tuple[int, int]:
    """(blocks in x, threads of a block)."""
    floats = ggml_type in FLOAT_TYPES
    return ceil_div(p.product.rows, 32 if floats else MATMUL_TILE), 256 if floats else 128


def matmul_launch(p: Matmul, ggml_type: int) -> Launch:
    blocks, threads = _matmul_blocks(p, ggml_type)
    return Launch((blocks, ceil_div(p.product.columns, MATMUL_TILE), 1), (threads, 1, 1))


def matmul_experts_launch(p: Matmul, ggml_type: int) -> Launch:
    blocks, threads = _matmul_blocks(p, ggml_type)
    most = most_expert_tiles(p.product.columns, p.product.used, p.product.experts)
    return Launch((blocks, *folded(most)), (threads, 1, 1))


def _route(p: Route) -> Launch:
    return Launch((p.rows, 1, 1), (32, 1, 1), 8 * (p.experts + p.groups) + 4 * p.used)


def _hyper_weights(p: Streams) -> Launch:
    return Launch((p.rows, 1, 1), (32, 1, 1))


def _streams(p: Streams) -> Launch:
    return Launch((min(ceil_div(p.width, 256), 64), p.rows, 1), (256, 1, 1))


def _hadamard(p: Streams) -> Launch:
    return Launch((p.heads, p.rows, 1), (128, 1, 1), 4 * p.dim)


def _round_floats(p: Streams) -> Launch:
    return Launch((p.heads, p.rows, 1), (128, 1, 1))


def _compress(p: Compress) -> Launch:
    return Launch((ceil_div(p.state.dim, 128), p.tokens, 1), (128, 1, 1))


def _store_rows(p: StoreRows) -> Launch:
    return Launch((p.tokens, 1, 1), (128, 1, 1))


def _index_scores(p: Index) -> Launch:
    shared = 4 * p.plane.dim * ceil_div(p.heads, 8) * 8
    return Launch((ceil_div(p.most_rows, 128), p.tokens, 1), (128, 1, 1), shared)


def _index_pick(p: Index) -> Launch:
    return Launch((p.tokens, 1, 1), (256, 1, 1))


def _sample(p: Sample) -> Launch:
    return Launch((p.rows, 1, 1), (512, 1, 1))


def _count(p: Count) -> Launch:
    return Launch((p.rows, 1, 1), (512, 1, 1))


def _sort_experts(p: SortExperts) -> Launch:
    return Launch((1, 1, 1), (256, 1, 1), 4 * (p.experts + 1))


def _kv_store(p: KvStore) -> Launch:
    return Launch((p.cache.kv_heads, p.tokens, 1), (128, 1, 1))


# ---- tables ------------------------------------------------------------------------------------

_ROWS = ("attend_rows",)

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("add", "rowwise.cu", Rowwise, _rowwise, ("add",)),
        Kernel("scale", "rowwise.cu", Rowwise, _rowwise),
        Kernel("glu", "rowwise.cu", Rowwise, _rowwise, ("glu",)),
        Kernel("soft_cap", "rowwise.cu", Rowwise, _rowwise, ("soft_cap",)),
        Kernel("gate_row", "rowwise.cu", Rowwise, _rowwise, ("gate_row",)),
        Kernel("scale_parts", "rowwise.cu", Rowwise, _rowwise, ("scale_parts",)),
        Kernel("slice_heads", "rowwise.cu", Rowwise, _rowwise, ("slice_heads",)),
        Kernel("join_heads", "rowwise.cu", Rowwise, _rowwise, ("join_heads",)),
        Kernel("combine", "rowwise.cu", Rowwise, _rowwise, ("combine_experts",)),
        Kernel("gather_rows", "rowwise.cu", Rowwise, _rowwise, ("gather_rows",)),
        Kernel("pending_tokens", "rowwise.cu", Rowwise, _rowwise),
        Kernel("quantize", "quantize.cu", Quantize, _quantize),
        Kernel("glu_quantize", "quantize.cu", Quantize, _quantize, ("glu",)),
        Kernel("rms_norm", "rms_norm.cu", RmsNorm, _rms_norm, ("rms_norm", "add")),
        Kernel("route", "route.cu", Route, _route, ("route_experts",)),
        Kernel("sort_experts", "route.cu", SortExperts, _sort_experts, ("matmul_experts",)),
        Kernel("hyper_weights", "streams.cu", Streams, _hyper_weights, ("hyper_weights",)),
        Kernel("hyper_read", "streams.cu", Streams, _streams, ("hyper_read",)),
        Kernel("hyper_write", "streams.cu", Streams, _streams, ("hyper_write",)),
        Kernel("hadamard", "streams.cu", Streams, _hadamard, ("hadamard",)),
        Kernel("round_floats", "streams.cu", Streams, _round_floats, ("round_floats",)),
        Kernel("compress", "compress.cu", Compress, _compress, ("compress",)),
        Kernel("store_rows", "compress.cu", StoreRows, _store_rows, ("store_rows",)),
        Kernel("index_scores", "index_rows.cu", Index, _index_scores, ("index_rows",)),
        Kernel("index_pick", "index_rows.cu", Index, _index_pick, ("index_rows",)),
        Kernel("attend_rows", "attend_rows.cu", AttendRows, attend_rows_launch, _ROWS),
        Kernel("attend_rows_parts", "attend_rows.cu", AttendRows, attend_rows_parts_launch, _ROWS),
        Kernel("attend_rows_fold", "attend_rows.cu", AttendRows, attend_rows_fold_launch, _ROWS),
        Kernel("sample", "sample.cu", Sample, _sample),
        Kernel("count_tokens", "counts.cu", Count, _count),
        Kernel("rope_angles", "rope.cu", RopeAngles, _rope_angles),
        Kernel("rope", "rope.cu", Rope, _rope, ("rope",)),
    )
}

_ATTEND = ("attend_paged", "attend_latent")

# Of the units of the cache: a name means the kernel of the unit for the cache's type.
CACHE_KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("kv_store", "cache.cu", KvStore, _kv_store, ("kv_store", "latent_store")),
        Kernel("attend_whole", "cache.cu", Attend, attend_whole_launch, _ATTEND),
        Kernel("attend_parts", "cache.cu", Attend, attend_parts_launch, _ATTEND),
        Kernel("attend_fold", "cache.cu", Attend, attend_fold_launch, _ATTEND),
    )
}

# Of the units of weights: a name means the kernel of the unit for the weight's type and layout.
WEIGHT_KERNELS: dict[str, tuple[type[ctypes.Structure], tuple[str, ...]]] = {
    "embed": (Embed, ("embed",)),
    "matvec": (Matvec, ("matmul",)),
    "matvec_experts": (Matvec, ("matmul_experts", "matmul_heads")),
}
# Of the same units, but for value heads: many columns.
MANY_KERNELS: dict[str, tuple[type[ctypes.Structure], tuple[str, ...]]] = {
    "matmul": (Matmul, ("matmul", "matmul_experts")),
}


def weight_unit(ggml_type: int, layout: int = 0) -> Unit:
    """The unit with the kernels of a weight. KeyError for one that has none."""
    file = "floats.cu" if ggml_type in FLOAT_TYPES else "weights.cu"
    unit = Unit("value_heads.cu" if layout == VALUE_HEADS else file, ggml_type, layout)
    if unit not in UNITS:
        raise KeyError(f"no CUDA kernels for ggml type {ggml_type} in layout {layout}")
    return unit


UNITS: tuple[Unit, ...] = (
    *(Unit(file) for file in sorted({kernel.file for kernel in KERNELS.values()})),
    *(Unit("cache.cu", kv_type=number) for number in range(len(KV_TYPES))),
    *(Unit("floats.cu", kind) for kind in FLOAT_TYPES),
    *(Unit("weights.cu", kind) for kind in QuantType if kind not in FLOAT_TYPES),
    *(Unit("weights.cu", kind, layout) for layout, kind in ARTIFACT_LAYOUTS.items()),
    Unit("value_heads.cu", 8, VALUE_HEADS),
)
