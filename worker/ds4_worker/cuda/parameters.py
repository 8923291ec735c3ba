"""The one parameter of each kernel, as ctypes.

Owns: the fields of the structs in the kernel files, in their order; the head of each kernel file
says what they mean. A test compares sizes with the compiled kernels.
"""

from __future__ import annotations

import ctypes

_U64, _U32, _I32, _I64 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32, ctypes.c_int64
MORE_MATRICES = 2  # of one matvec, beside the first
_F32, _F64 = ctypes.c_float, ctypes.c_double


class Rowwise(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("x", "b", "y", "live", "scales", "bias")),
        *((name, _U32) for name in ("x_stride", "b_stride", "y_stride")),
        *((name, _I32) for name in ("rows", "width", "heads", "dim", "first", "part", "mode")),
        *((name, _F32) for name in ("value", "limit", "alpha")),
        ("reserved", _I32),
    )


class Quantize(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("x", "up", "y", "act", "live")),
        *((name, _U32) for name in ("x_stride", "up_stride", "y_stride", "act_stride")),
        *((name, _I32) for name in ("rows", "width", "columns", "format", "mode")),
        *((name, _F32) for name in ("limit", "alpha")),
        ("reserved", _I32),
    )


class RmsNorm(ctypes.Structure):
    _fields_ = (
        *((n, _U64) for n in ("x", "add", "sum", "weight", "y", "act32", "act256", "live")),
        *((f"{name}_stride", _U32) for name in ("x", "add", "sum", "y", "act32", "act256")),
        *((name, _I32) for name in ("rows", "heads", "width")),
        ("eps", _F32),
    )


class RopeAngles(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("frequency", "positions", "cosine", "sine", "live")),
        ("magnitude", _F64),
        *((name, _I32) for name in ("tokens", "half", "shift", "reserved")),
    )


class Rope(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("x", "y", "cosine", "sine", "live")),
        *((name, _U32) for name in ("x_stride", "y_stride")),
        *(
            (name, _I32)
            for name in (
                "tokens",
                "heads",
                "dim",
                "first",
                "half",
                "style",
                "inverse",
                "more_heads",
            )
        ),
        *((name, _U64) for name in ("more_x", "more_y")),
        *((name, _U32) for name in ("more_x_stride", "more_y_stride")),
    )


class Embed(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("table", "tokens", "y", "live")),
        ("table_rows", _I64),
        ("y_stride", _U32),
        *((name, _I32) for name in ("rows", "cols")),
        ("factor", _F32),
    )


class Matvec(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("weight", "acts", "y", "bias", "routes", "live")),
        *((name, _U32) for name in ("act_stride", "y_stride", "route_stride")),
        *(
            (name, _I32)
            for name in (
                "rows",
                "cols",
                "columns",
                "experts",
                "used",
                "act_columns",
                "warp_rows",
                "stages",
                "reserved",
            )
        ),
        *((f"more_{name}", _U64 * MORE_MATRICES) for name in ("weight", "y", "bias")),
        ("more_y_stride", _U32 * MORE_MATRICES),
        ("more_rows", _I32 * MORE_MATRICES),
    )


class Matmul(ctypes.Structure):
    """`product.columns` counts tokens. Of experts: `tiles` has room for most_expert_tiles(...)."""

    _fields_ = (("product", Matvec), *((name, _U64) for name in ("sorted", "tiles", "n_tiles")))


class Route(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("logits", "bias", "routes", "live", "tokens", "table")),
        *((name, _U32) for name in ("logits_stride", "routes_stride")),
        *((name, _I32) for name in ("rows", "experts", "used", "score", "groups")),
        *((name, _I32) for name in ("groups_used", "group_top", "normalize")),
        ("scale", _F32),
        ("reserved", _I32),
    )


class SortExperts(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("routes", "live", "columns", "tiles", "n_tiles")),
        ("routes_stride", _U32),
        *((name, _I32) for name in ("tokens", "used", "experts", "tile_columns", "reserved")),
    )


class Sample(ctypes.Structure):
    """`scratch` has 8 * vocabulary bytes per row."""

    _fields_ = (
        *((n, _U64) for n in ("logits", "samplings", "sampled", "tokens", "scratch", "live")),
        *((name, _U64) for name in ("inputs", "row_tokens")),
        ("logits_stride", _U32),
        *((name, _I32) for name in ("rows", "vocabulary", "reserved")),
    )


class Count(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("counts", "input", "notes", "tokens", "live")),
        *((name, _I32) for name in ("rows", "vocabulary")),
    )


class Cache(ctypes.Structure):
    """One layer's planes in all pages (kv.h)."""

    _fields_ = (
        *((name, _U64) for name in ("pages", "page_stride", "page_table")),
        *((name, _I32) for name in ("pages_per_bank", "page_tokens", "kv_heads")),
        *((name, _I32) for name in ("dim", "value_dim", "latent")),
    )


class KvStore(ctypes.Structure):
    _fields_ = (
        ("cache", Cache),
        *((name, _U64) for name in ("k", "v", "positions", "banks", "live")),
        *((name, _U32) for name in ("k_stride", "v_stride")),
        *((name, _I32) for name in ("tokens", "reserved")),
    )


class Attend(ctypes.Structure):
    _fields_ = (
        ("cache", Cache),
        *((n, _U64) for n in ("q", "y", "positions", "banks", "live", "sinks", "parts")),
        *((name, _U32) for name in ("q_stride", "y_stride")),
        *((name, _I32) for name in ("tokens", "heads", "tile_tokens", "tile_heads")),
        *((name, _I32) for name in ("part_tokens", "most_parts", "window")),
        *((name, _F32) for name in ("scale", "soft_cap")),
        ("reserved", _I32),
    )


class Streams(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("x", "w", "s", "y", "scale", "base", "live")),
        *((name, _U32) for name in ("x_stride", "w_stride", "s_stride", "y_stride")),
        *((name, _I32) for name in ("rows", "width", "streams", "iterations", "heads", "dim")),
        *((name, _I32) for name in ("format", "block", "dims")),
        ("eps", _F32),
    )


class Plane(ctypes.Structure):
    """One plane of rows or states in all pages (rows.h)."""

    _fields_ = (
        *((name, _U64) for name in ("pages", "page_stride", "page_table")),
        *((name, _I32) for name in ("pages_per_bank", "page_tokens", "dim", "ratio")),
    )


class Compress(ctypes.Structure):
    _fields_ = (
        ("state", Plane),
        *((n, _U64) for n in ("k", "gate", "bias", "y", "positions", "banks", "live")),
        *((n, _U64) for n in ("kept", "kept_stride", "again", "keeps")),
        *((name, _U32) for name in ("k_stride", "gate_stride", "y_stride")),
        *((name, _I32) for name in ("tokens", "copies", "window")),
    )


class StoreRows(ctypes.Structure):
    _fields_ = (
        ("plane", Plane),
        *((name, _U64) for name in ("x", "positions", "banks", "live")),
        ("x_stride", _U32),
        *((name, _I32) for name in ("tokens", "tiles", "reserved")),
    )


class Index(ctypes.Structure):
    """`scores` has most_rows floats per token."""

    _fields_ = (
        ("plane", Plane),
        *((n, _U64) for n in ("q", "w", "positions", "banks", "live", "scores", "rows")),
        *((name, _U32) for name in ("q_stride", "w_stride", "rows_stride")),
        *((name, _I32) for name in ("tokens", "heads", "k", "most_rows")),
        ("scale", _F32),
    )


class AttendRows(ctypes.Structure):
    _fields_ = (
        ("recent", Plane),
        ("compressed", Plane),
        *((n, _U64) for n in ("q", "y", "positions", "banks", "live", "chosen", "sinks", "parts")),
        *((name, _U32) for name in ("q_stride", "y_stride", "chosen_stride")),
        *((name, _I32) for name in ("tokens", "heads", "window", "most_chosen", "most_parts")),
        ("scale", _F32),
        ("reserved", _I32),
    )
