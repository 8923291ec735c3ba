"""The kernels of the KV cache through ctypes: the table of native/kv.h."""

from __future__ import annotations

import ctypes

from ds4_common.native import lib

_P, _I64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class KvTable(ctypes.Structure):
    """native/kv.h ds4_kv."""

    _fields_ = (
        ("type", _INT),
        ("encode", ctypes.CFUNCTYPE(None, _P, _I64, _P, _P)),
        ("score", ctypes.CFUNCTYPE(None, _P, _INT, _I64, _P, _P, _I64, _I64, _P, _I64)),
        (
            "score_along",
            ctypes.CFUNCTYPE(None, _P, _INT, _I64, _P, _P, _I64, _I64, _I64, _P, _I64),
        ),
        (
            "accumulate",
            ctypes.CFUNCTYPE(None, _P, _I64, _INT, _I64, _I64, _P, _P, _I64, _I64, _I64, _P),
        ),
    )


def kv_table(kind: int) -> KvTable:
    function = lib.load().ds4_kv_table
    function.restype = ctypes.POINTER(KvTable)
    found: KvTable = function(kind, 0).contents
    return found
