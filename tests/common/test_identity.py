"""Fingerprint vectors, the state of files, and the streaming hash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.gguf import LogicalModel
from ds4_common.identity import RangeHasher, ShardStat, fingerprint, fnv1a64
from helpers.split import split_gguf
from helpers.tiny_gguf import write_llama

MIB = 1 << 20


class Blob:
    """Bytes that read like a model."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data

    @property
    def n_bytes(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + buffer.nbytes]


def paged() -> bytearray:
    """24 MiB with byte = (offset >> 12) & 255."""
    return bytearray(b"".join(bytes([page & 255]) * 4096 for page in range(24 * MIB >> 12)))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "47fe0d7eaf8e51e3"),
        (b"abc", "8df02f9b612b3e60"),
        (bytes(9 * MIB), "f5708d6dfd8ed1d3"),
        (paged(), "9eba0906c41bcb00"),
    ],
    ids=["empty", "abc", "9 MiB of zeros", "24 MiB of pages"],
)
def test_fingerprint_vectors(data: bytes, expected: str) -> None:
    assert fingerprint(Blob(data)) == expected


def test_fingerprint_samples_pages_and_nothing_between() -> None:
    data = paged()
    data[17 * MIB] ^= 1
    assert fingerprint(Blob(data)) == "9eba0906c41bcb00"
    data[17 * MIB] ^= 1
    data[16 * MIB + 5] ^= 1
    assert fingerprint(Blob(data)) == "106a4f33dfb8f24b"


def test_fingerprint_up_to_8_mib_covers_every_byte() -> None:
    data = bytearray(8 * MIB)
    plain = fingerprint(Blob(data))
    for at in (0, 4 * MIB - 1, 4 * MIB, 8 * MIB - 1):
        data[at] = 1
        assert fingerprint(Blob(data)) != plain
        data[at] = 0


def test_fingerprint_of_a_split_model_is_that_of_its_logical_bytes(tmp_path: Path) -> None:
    paths = split_gguf(write_llama(tmp_path / "m.gguf"), tmp_path / "s", 3)
    with LogicalModel.open(paths[0]) as model:
        data = bytearray(model.n_bytes)
        model.read_into(0, data)
        assert fingerprint(model) == fingerprint(Blob(data))


def reference_fnv1a64(data: bytes) -> int:
    state = 14695981039346656037
    for byte in data:
        state = (state ^ byte) * 1099511628211 % (1 << 64)
    return state


@settings(deadline=None)
@given(st.binary(), st.binary())
def test_fnv1a64_is_the_standard_one_and_can_be_continued(left: bytes, right: bytes) -> None:
    expected = reference_fnv1a64(left + right)
    assert fnv1a64(left + right) == expected
    assert fnv1a64(bytearray(right), fnv1a64(memoryview(bytearray(left)))) == expected


def test_range_hasher_is_xxh3_128_however_it_is_fed() -> None:
    data = os.urandom(10_000)
    hasher = RangeHasher()
    for at in range(0, len(data), 777):
        hasher.update(memoryview(data)[at : at + 777])
    assert hasher.hexdigest() == xxhash.xxh3_128_hexdigest(data)


def test_unchanged_file_has_no_changes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    with path.open("rb") as file:
        assert ShardStat.capture(path).changes(ShardStat.capture(file.fileno())) == ""


def test_changes_name_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    before = ShardStat.capture(path)
    os.utime(path, ns=(1, 1))
    assert "modification time (ns)" in before.changes(ShardStat.capture(path))
    path.write_bytes(b"xy")
    assert "size in bytes 1 -> 2" in before.changes(ShardStat.capture(path))
    (tmp_path / "g").write_bytes(b"x")
    (tmp_path / "g").replace(path)
    assert f"inode {before.inode} -> " in before.changes(ShardStat.capture(path))
