"""Loads the native library once per process.

Owns: finding and opening `libds4.so`, nothing else. Each area declares the prototypes of its own
functions beside the Python code that calls them, so this file never grows with the ABI.
"""

from __future__ import annotations

import ctypes
import functools
import os

from ds4_common.errors import NativeLibraryError

_PATH = os.path.join(os.path.dirname(__file__), "libds4.so")


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the library handle; raises NativeLibraryError when it is missing or unloadable."""
    try:
        return ctypes.CDLL(_PATH)
    except OSError as error:
        raise NativeLibraryError(
            f"native library: cannot load {_PATH}: {error}; "
            "rebuild it with: python common/ds4_common/native/build.py"
        ) from error
