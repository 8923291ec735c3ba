"""The blob `tensors`: where every tensor of every served model lies, as JSON.

Owns: its form, `{"version": 1, "tensors": [TensorPlace, ...]}`. The loader writes it for every
model, also for one that no recipe knows; workers do not need it. Refuses unknown versions and
layouts, as ProtocolError.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ds4_common.allocation import TensorPlace
from ds4_common.errors import ProtocolError

BLOB_NAME = "tensors"
VERSION = 1


class _Directory(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    tensors: list[TensorPlace]


def encode(places: Sequence[TensorPlace]) -> bytes:
    """The blob, tensors in the order of their models and places in memory."""
    ordered = sorted(places, key=lambda p: (p.model, p.allocation, p.offset))
    return msgspec.json.encode(_Directory(VERSION, ordered))


def decode(data: bytes | memoryview) -> list[TensorPlace]:
    """Raises ProtocolError for anything that `encode` of this version does not write."""
    try:
        directory = msgspec.json.decode(data, type=_Directory)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"tensor directory of the owner is malformed: {error}") from error
    if directory.version != VERSION:
        raise ProtocolError(
            f"tensor directory has version {directory.version}, expected {VERSION}; "
            "install the owner's version of this package"
        )
    return directory.tensors
