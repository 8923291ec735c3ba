"""How much a body may hold.

Decoding a body is one call into C that keeps the interpreter lock: meanwhile no other client gets a
token, in whatever thread it runs. Its time is that of the objects it makes. Owns: the limit of
these, checked without the lock before anything is decoded.
"""

from __future__ import annotations

import ctypes
import functools

from ds4_common.errors import RequestError
from ds4_common.native import lib

MAX_WEIGHT = 2_000_000
_HEAVY = 8  # a list, an object or a name in one, against a number; measured, 5 to 15


@functools.cache
def _native() -> ctypes.CDLL:
    library = lib.load()
    library.ds4_json_weight.restype = ctypes.c_uint64
    library.ds4_json_weight.argtypes = [ctypes.c_char_p, *[ctypes.c_uint64] * 3]
    return library


def check_weight(data: bytes) -> None:
    """Raises RequestError for JSON that would be decoded into too many objects."""
    if _native().ds4_json_weight(data, len(data), _HEAVY, MAX_WEIGHT) > MAX_WEIGHT:
        raise RequestError(
            f"the body holds more than {MAX_WEIGHT} numbers, or {MAX_WEIGHT // _HEAVY} lists, "
            "objects and names; send fewer items",
            code="body_too_complex",
        )
