"""ctypes prototypes of native/matmul.h.

Owns: the mapping of that header to ctypes and the names of ggml types the kernels know. Refuses
nothing by itself: the functions of `ds4_common.quants` check sizes before they call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from enum import IntEnum

from ds4_common.errors import UsageError
from ds4_common.native import lib


class QuantType(IntEnum):
    """The ggml types that have kernels, by their number in a GGUF file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


class Isa(IntEnum):
    SCALAR = 0
    AVX2 = 1
    NEON = 2
    AVXVNNI = 3
    AVX512 = 4
    AMX = 5
    I8MM = 6


class Weight(ctypes.Structure):
    """struct ds4_weight."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_uint32),
        ("layout", ctypes.c_uint32),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("all", ctypes.c_int64),
    )


# (w, row0, row1, acts, act_stride, n, y, ldy)
MatmulFn = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(Weight),
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
)

_INT, _U32, _I64, _PTR = ctypes.c_int, ctypes.c_uint32, ctypes.c_int64, ctypes.c_void_p
_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ds4_isa_best": (_INT, ()),
    "ds4_isa_runs": (_INT, (_INT,)),
    "ds4_matmul_kernel": (_PTR, (_U32, _U32, _INT)),
    "ds4_act_format": (_INT, (_U32,)),
    "ds4_act_bytes": (ctypes.c_size_t, (_INT, _I64)),
    "ds4_act_quantize": (None, (_INT, _PTR, _I64, _PTR, _INT)),
    "ds4_row_granule": (_I64, (_U32, _U32)),
    "ds4_dequant_row": (_INT, (ctypes.POINTER(Weight), _I64, _PTR)),
    "ds4_layout_bytes": (_I64, (_U32, _U32, _I64, _I64)),
    "ds4_block_bytes": (_I64, (_U32,)),
    "ds4_block_weights": (_I64, (_U32,)),
    "ds4_pack_possible": (_INT, (_U32, _I64, _I64)),
    "ds4_pack_rows": (_INT, (_U32, _PTR, _PTR, _I64, _I64, _I64)),
    "ds4_planes_pack": (_INT, (_U32, _PTR, _PTR, _I64, _I64)),
    "ds4_planes_unpack": (_INT, (_U32, _PTR, _PTR, _I64, _I64)),
    "ds4_unpack_rows": (_INT, (_U32, _PTR, _PTR, _I64, _I64, _I64)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The native library with the prototypes of matmul.h declared."""
    handle = lib.load()
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
    return handle


def best_isa() -> Isa:
    """What the kernels of this CPU run with. Raises UsageError for an unknown DS4_ISA."""
    best = library().ds4_isa_best()
    if best < 0:
        known = ", ".join(isa.name.lower() for isa in Isa)
        raise UsageError(f"DS4_ISA: got {os.environ.get('DS4_ISA')!r}, expected one of {known}")
    return Isa(best)
