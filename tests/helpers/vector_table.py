"""The executor's vector operations through ctypes: the table of native/op_vector.h."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from ds4_common.native import lib

_P, _I64, _INT, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class Table(ctypes.Structure):
    """native/op_vector.h ds4_vector."""

    _fields_ = (
        ("sum_squares", ctypes.CFUNCTYPE(_F, _P, _I64)),
        ("scale_by", ctypes.CFUNCTYPE(None, _P, _P, _P, _F, _I64)),
        ("add", ctypes.CFUNCTYPE(None, _P, _P, _P, _I64)),
        ("silu_mul", ctypes.CFUNCTYPE(None, _P, _P, _P, _I64)),
        ("gated_mul", ctypes.CFUNCTYPE(None, _P, _P, _P, _INT, _F, _F, _I64)),
        ("soft_cap", ctypes.CFUNCTYPE(None, _P, _P, _F, _I64)),
        ("add_scaled", ctypes.CFUNCTYPE(None, _P, _P, _F, _I64)),
        ("max_finite", ctypes.CFUNCTYPE(_F, _P, _I64, _P)),
        ("exp_scaled", ctypes.CFUNCTYPE(None, _P, _P, _F, _F, _I64)),
        ("running_softmax", ctypes.CFUNCTYPE(None, _P, _P, _P, _P, _P, _P, _I64)),
        ("softmax", ctypes.CFUNCTYPE(_F, _P, _F, _I64)),
        ("max", ctypes.CFUNCTYPE(_F, _P, _I64)),
        ("join", ctypes.CFUNCTYPE(None, _P, _P, _F, _F, _I64)),
    )


def table(isa: int) -> Table:
    function = lib.load().ds4_vector_table
    function.restype = ctypes.POINTER(Table)
    found: Table = function(isa).contents
    return found


def exp(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The CPU's own, as the scalar table has it."""
    out = np.ascontiguousarray(x, np.float32).copy()
    table(0).exp_scaled(out.ctypes.data, out.ctypes.data, 0.0, 1.0, out.size)
    return out
