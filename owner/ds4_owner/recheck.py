"""Compares what an owner holds with its hashes, and model files with what the owner holds.

Owns two comparisons. `check_memory`: all bytes of an allocation or blob against the 128-bit hash
that was taken while they were loaded. `check_files`: the files are loaded once more, piece by piece
and into nothing - raw ranges copied, groups packed, artifacts built, blobs prepared - and every
piece is compared with the memory; so the files are proven to give exactly what is served, whatever
their times say. Not covered: padding, and metadata that nobody reads. Refuses nothing by itself:
what differs comes back as findings.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash

from ds4_common.allocation import Allocation, ArtifactKind, TensorPlace
from ds4_common.errors import Ds4Error, GgufError
from ds4_common.gguf import LogicalModel
from ds4_common.protocol import FileRecord, ModelRecord
from ds4_common.shard_stat import ShardStat
from ds4_owner.artifacts import build_artifact
from ds4_owner.fill import Piece, pieces_of_group, pieces_of_range, produce
from ds4_owner.loader_plan import pack_rows, prepare_for_device
from ds4_owner.reader import ModelReader, Scratch

CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 4096

ReadMemory = Callable[[int, memoryview], None]  # fills a view with the bytes from an offset on
Advance = Callable[[int], None]  # bytes read since the last call; may sleep
Subject = Literal["allocation", "blob", "file"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it was loaded: allocation by id, blob by name, or file by path."""

    subject: Subject
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A shard on disk. `state` "touched": only its times changed. `now`: as it was compared."""

    model: str
    path: str
    state: Literal["unchanged", "touched", "changed", "missing"]
    changes: str
    now: FileRecord | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What the owner of the memory says about it, and how each piece is read."""

    allocations: Mapping[int, tuple[Allocation, str, ReadMemory]]  # (record, hash128, memory)
    blobs: Mapping[str, tuple[int, str, ReadMemory]]  # (n_bytes, hash128, memory)
    places: Sequence[TensorPlace]
    on_device: bool = False

    def without(self, names: set[str]) -> Held:
        """Only the allocations that are not named: what is damaged says nothing about files."""
        kept = {i: entry for i, entry in self.allocations.items() if str(i) not in names}
        blobs = {name: entry for name, entry in self.blobs.items() if name not in names}
        return Held(kept, blobs, self.places, self.on_device)


def check_memory(held: Held, advance: Advance) -> Iterator[Finding]:
    """Hashes everything; yields what does not have its hash."""
    for a, digest, read in held.allocations.values():
        if (got := hash_memory(read, a.n_bytes, advance)) != digest:
            yield Finding("allocation", str(a.id), f"{describe(a)}: {_hashes(got, digest)}")
    for name, (n_bytes, digest, read) in held.blobs.items():
        if (got := hash_memory(read, n_bytes, advance)) != digest:
            yield Finding("blob", name, _hashes(got, digest))


def _hashes(got: str, expected: str) -> str:
    return f"memory has hash {got}, expected {expected} as loaded"


def hash_memory(read: ReadMemory, n_bytes: int, advance: Advance) -> str:
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(n_bytes, CHUNK_BYTES)))
    for offset in range(0, n_bytes, CHUNK_BYTES):
        view = buffer[: min(CHUNK_BYTES, n_bytes - offset)]
        read(offset, view)
        state.update(view)
        advance(view.nbytes)
    return state.hexdigest()


def host_memory(fd: int) -> ReadMemory:
    """By reads, not by a mapping: that would cost page tables and a fault per page."""

    def read(offset: int, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            n = os.preadv(fd, [view[done:]], offset + done)
            if n == 0:
                raise Ds4Error(f"shared memory ends at byte {offset + done}")
            done += n

    return read


def describe(a: Allocation) -> str:
    if a.artifact is not None:
        return f"{a.model} {a.artifact.kind.name.lower()} {a.artifact.name}"
    return f"{a.model} raw range at {a.source_offset}"


# Files


def stat_files(model: ModelRecord) -> list[FileCheck]:
    """Every listed shard of a model against its state when it was loaded."""
    return [_stat_file(model.id, file) for file in model.files]


def _stat_file(model: str, file: FileRecord) -> FileCheck:
    then = ShardStat(file.device, file.inode, file.n_bytes, file.mtime_ns, file.ctime_ns)
    try:
        now = ShardStat.capture(file.path)
    except OSError as error:
        return FileCheck(model, file.path, "missing", error.strerror or str(error))
    record = FileRecord(file.path, now.dev, now.inode, now.n_bytes, now.mtime_ns, now.ctime_ns)
    changes = then.changes(now)
    if not changes:
        return FileCheck(model, file.path, "unchanged", "", record)
    same = (then.dev, then.inode, then.n_bytes) == (now.dev, now.inode, now.n_bytes)
    return FileCheck(model, file.path, "touched" if same else "changed", changes, record)


def check_files(
    record: ModelRecord, held: Held, advance: Advance, threads: int = 1
) -> list[Finding]:
    """Loads a model's files into nothing and compares. Stops at the first difference in a file's
    structure; otherwise names every allocation that the files would not give again."""
    first = record.files[0].path
    try:
        with LogicalModel.open(first) as model:
            if wrong := _structure(record, model, held):
                return [wrong]
            reader = ModelReader(model, direct_io=True)
            try:
                checker = _FileChecker(record.id, model, reader, held, advance, threads)
                return [*checker.allocations(), *checker.blobs(record)]
            finally:
                reader.close()
    except GgufError as error:
        return [Finding("file", error.path, str(error))]
    except Ds4Error as error:
        return [Finding("file", first, f"cannot be prepared any more: {error}")]


def _structure(record: ModelRecord, model: LogicalModel, held: Held) -> Finding | None:
    """Whether the files still hold the tensors that were loaded, of the same shapes."""
    if model.n_bytes != record.n_bytes:
        text = f"the model has {model.n_bytes} bytes, {record.n_bytes} were loaded"
        return Finding("file", model.path, text)
    for place in held.places:
        if place.model != record.id:
            continue
        tensor = model.tensor(place.name)
        if tensor is None:
            return Finding("file", model.path, f"tensor {place.name} is gone")
        got, expected = (int(tensor.ggml_type), tensor.dims), (place.ggml_type, place.dims)
        if got != expected:
            text = f"tensor {place.name} has type and shape {got}, {expected} was loaded"
            return Finding("file", model.shards[tensor.shard].path, text)
    return None


class _FileChecker:
    """The files of one model against memory."""

    def __init__(
        self, model_id: str, model: LogicalModel, reader: ModelReader, held: Held,
        advance: Advance, threads: int,
    ) -> None:  # fmt: skip
        self.id, self.model, self.reader = model_id, model, reader
        self.held, self.advance, self.threads = held, advance, threads
        self.scratch, self.source, self.target = Scratch(), Scratch(), Scratch()
        self.memory = memoryview(bytearray(4 * CHUNK_BYTES))

    def allocations(self) -> Iterator[Finding]:
        for a, _, read in self.held.allocations.values():
            if a.model != self.id:
                continue
            if a.artifact is None:
                finding = self._pieces(a, read, pieces_of_range(a, CHUNK_BYTES))
            elif a.artifact.kind is ArtifactKind.CPU_GROUP:
                finding = self._pieces(a, read, self._group(a))
            else:
                finding = self._artifact(a, read)
            if finding is not None:
                yield finding
            self.reader.drop(a.source_offset, a.source_bytes)

    def _group(self, a: Allocation) -> Iterable[Piece]:
        places = (p for p in self.held.places if p.allocation == a.id)
        members = sorted(places, key=lambda p: p.offset)
        return pieces_of_group(a, members, self.model, CHUNK_BYTES)

    def _pieces(self, a: Allocation, read: ReadMemory, pieces: Iterable[Piece]) -> Finding | None:
        for piece in pieces:
            made = produce(
                piece, self.reader, pack_rows, self.scratch, self.source, self.target
            )  # fmt: skip
            self.advance(piece.n_bytes)
            if self.memory.nbytes < piece.n_bytes:
                self.memory = memoryview(bytearray(piece.n_bytes))
            kept = self.memory[: piece.n_bytes]
            read(piece.offset, kept)
            if _same(made, kept):
                continue
            for part in piece.parts:
                span = slice(part.offset, part.offset + part.n_bytes)
                if not _same(made[span], kept[span]):
                    within = 0 if part.rows else _first_difference(made[span], kept[span])
                    return self._differs(a, part.source + within, exact=not part.rows)
        return None

    def _artifact(self, a: Allocation, read: ReadMemory) -> Finding | None:
        """Built whole: needs as much scratch as the artifact has."""
        assert a.artifact is not None
        with mmap.mmap(-1, a.n_bytes) as window, memoryview(window) as made:
            build_artifact(
                a.artifact, a.source_offset, self._read, made, threads=self.threads
            )  # fmt: skip
            self.advance(a.source_bytes)
            for offset in range(0, a.n_bytes, CHUNK_BYTES):
                n_bytes = min(CHUNK_BYTES, a.n_bytes - offset)
                kept = self.memory[:n_bytes]
                read(offset, kept)
                with made[offset : offset + n_bytes] as part:
                    same = _same(part, kept)
                if not same:
                    return self._differs(a, a.source_offset, exact=False)
        return None

    def _read(self, offset: int, view: memoryview) -> None:
        self.reader.read_into(offset, view, Scratch())

    def _differs(self, a: Allocation, offset: int, *, exact: bool) -> Finding:
        """Names the file, the place in it and the tensor there."""
        span = next(self.model.spans(offset, 1))
        tensor = next(
            (t.name for t in self.model.tensors if t.offset <= offset < t.offset + t.n_bytes), None
        )
        where = f"tensor {tensor}" if tensor else "between two tensors"
        at = f"at byte {span.file_offset}" if exact else f"from byte {span.file_offset} on"
        text = f"content differs from what was loaded {at}, {where} (allocation {a.id})"
        return Finding("file", span.shard.path, text)

    def blobs(self, record: ModelRecord) -> Iterator[Finding]:
        """What is made from the metadata: the served name is the only part that comes from a flag,
        so it is taken from the blob itself."""
        if self.id != "base" or "contract" not in self.held.blobs:
            return
        from ds4_common.contract import prepared_model_pb2 as pb
        from ds4_owner import blobs

        n_bytes, _, read = self.held.blobs["contract"]
        contract = bytearray(n_bytes)
        read(0, memoryview(contract))
        name = pb.Bundle.FromString(bytes(contract)).serving.served_id
        if self.held.on_device:
            allocations = [a for a, _, _ in self.held.allocations.values()]
            prepared = prepare_for_device(self.model, self.held.places, allocations, name)
        else:
            prepared = blobs.prepare(self.model, self.held.places, name)
        for name, data in prepared.blobs(record.fingerprint).items():
            if name in self.held.blobs and _digest(data) != self.held.blobs[name][1]:
                text = f"metadata gives another {name} blob than the one that is handed out"
                yield Finding("file", self.model.path, text)


def _digest(data: bytes | memoryview) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))


def _same(one: memoryview, other: memoryview) -> bool:
    return _digest(one) == _digest(other)


def _first_difference(one: memoryview, other: memoryview) -> int:
    """Offset of the first byte that differs; there is one."""
    for start in range(0, one.nbytes, _BLOCK_BYTES):
        a, b = bytes(one[start : start + _BLOCK_BYTES]), bytes(other[start : start + _BLOCK_BYTES])
        if a != b:
            return start + next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return 0
