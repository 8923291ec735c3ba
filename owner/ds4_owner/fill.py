"""Fills allocations: read, pack, write and hash, overlapped over a few threads.

Owns the cutting of allocations into pieces, the threads, and the order of the hash: pieces are
read, packed and written in any order, but hashed in theirs, so the 128-bit hash is that of the
finished bytes whatever the number of threads. Refuses to go on after the first error of any thread.

A piece is about one MiB: it stays in a core's cache from the read to the hash. Threads hold the GIL
only between system calls and native calls.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from ds4_common.allocation import Allocation, Layout, TensorPlace
from ds4_common.errors import LoaderError
from ds4_common.gguf.model import LogicalModel
from ds4_common.identity import RangeHasher
from ds4_owner.backends import HUGE_PAGE_BYTES, Fill, memory_error
from ds4_owner.plan import GAP_BYTES
from ds4_owner.reader import ModelReader, Scratch
from ds4_owner.turns import Turns

PIECE_BYTES = 1 << 20
DIRECT_THREADS = 4  # O_DIRECT waits for the disk: more requests in flight than cores
MADV_POPULATE_WRITE = 23  # linux/mman.h; not in the mmap module of CPython 3.11


# (layout, ggml type, raw rows, where the same rows go packed, rows, weights per row)
PackRows = Callable[[Layout, int, memoryview, memoryview, int, int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """`n_bytes` at `offset` of a piece, made from `source_bytes` logical bytes of the model."""

    offset: int
    n_bytes: int
    source: int
    source_bytes: int
    rows: int = 0  # above 0: rows of `cols` weights of `ggml_type`, to be laid out in `layout`
    cols: int = 0
    ggml_type: int = 0
    layout: Layout = Layout.RAW


@dataclass(frozen=True, slots=True)
class Piece:
    """`n_bytes` at `offset` of an allocation. What no part covers is zero (padding)."""

    allocation: int
    model: str
    offset: int
    n_bytes: int
    parts: tuple[Part, ...]

    @property
    def source(self) -> tuple[int, int]:
        """The logical [offset, end) that one read must fetch."""
        return (
            min(part.source for part in self.parts),
            max(part.source + part.source_bytes for part in self.parts),
        )


@dataclass(frozen=True, slots=True)
class Target:
    """Where an allocation's bytes go: a writable descriptor of `alloc_bytes`."""

    fd: int
    alloc_bytes: int

    @property
    def huge(self) -> bool:
        """Large enough for huge pages, where the backend has them."""
        return self.alloc_bytes >= HUGE_PAGE_BYTES


def pieces_of_range(allocation: Allocation, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cuts a raw range into pieces."""
    for offset in range(0, allocation.n_bytes, piece_bytes):
        n_bytes = min(piece_bytes, allocation.n_bytes - offset)
        part = Part(0, n_bytes, allocation.source_offset + offset, n_bytes)
        yield Piece(allocation.id, allocation.model, offset, n_bytes, (part,))


def pieces_of_group(
    allocation: Allocation,
    members: Sequence[TensorPlace],
    model: LogicalModel,
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[Piece]:
    """Cuts a CPU group into pieces: large tensors by rows, small ones together.

    Tensors share a piece only when one read fetches them without much between them."""
    start, parts = 0, list[Part]()
    for part in _parts_of_group(members, model, piece_bytes):
        last = parts[-1] if parts else None
        if last is not None and (
            part.offset + part.n_bytes - start > piece_bytes
            or not 0 <= part.source - last.source - last.source_bytes <= GAP_BYTES
        ):
            yield _piece(allocation, start, parts, part.offset)
            start, parts = part.offset, []
        parts.append(part)
    yield _piece(allocation, start, parts, allocation.n_bytes)


def _piece(allocation: Allocation, start: int, parts: list[Part], end: int) -> Piece:
    relative = tuple(replace(part, offset=part.offset - start) for part in parts)
    return Piece(allocation.id, allocation.model, start, end - start, relative)


def _parts_of_group(
    members: Sequence[TensorPlace], model: LogicalModel, piece_bytes: int
) -> Iterator[Part]:
    """The parts of all tensors, with offsets in the group."""
    for place in members:
        tensor = model.tensor(place.name)
        if tensor is None:
            raise LoaderError(f"tensor {place.name} of the plan is not in {model.path}")
        if place.layout is Layout.RAW:
            yield from _raw_parts(place, tensor.offset, piece_bytes)
            continue
        rows, cols = math.prod(place.dims[1:]), place.dims[0]
        row_bytes, packed_bytes = tensor.n_bytes // rows, place.n_bytes // rows
        step = max(8, piece_bytes // row_bytes // 8 * 8)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            yield Part(
                place.offset + first * packed_bytes, count * packed_bytes,
                tensor.offset + first * row_bytes, count * row_bytes,
                count, cols, place.ggml_type, place.layout,
            )  # fmt: skip


def _raw_parts(place: TensorPlace, source: int, piece_bytes: int) -> Iterator[Part]:
    for offset in range(0, place.n_bytes, piece_bytes):
        n_bytes = min(piece_bytes, place.n_bytes - offset)
        yield Part(place.offset + offset, n_bytes, source + offset, n_bytes)


def produce(
    piece: Piece,
    reader: ModelReader,
    pack: PackRows,
    scratch: Scratch,
    source: Scratch,
    target: Scratch,
) -> memoryview:
    """The finished bytes of a piece, in `source` or `target`: reads its source in one go and lays
    its parts out."""
    first, end = piece.source
    raw = source.view(end - first)
    reader.read_into(first, raw, scratch)
    if len(piece.parts) == 1 and not piece.parts[0].rows:
        return raw
    out, done = target.view(piece.n_bytes), 0
    for part in piece.parts:
        out[done : part.offset] = bytes(part.offset - done)
        done = part.offset + part.n_bytes
        bytes_in = raw[part.source - first : part.source - first + part.source_bytes]
        if part.rows:
            laid_out = out[part.offset : done]
            pack(part.layout, part.ggml_type, bytes_in, laid_out, part.rows, part.cols)
        else:
            out[part.offset : done] = bytes_in
    out[done:] = bytes(piece.n_bytes - done)
    return out


class Filler:
    """Fills allocations from pieces. Use once: `run`, then `hashes`."""

    def __init__(
        self,
        pieces: Iterator[Piece],
        readers: Mapping[str, ModelReader],
        targets: Mapping[int, Target],
        pack: PackRows,
        *,
        fill: Fill,
        threads: int,
        chunk_bytes: int,
        before_chunk: Callable[[int], None],
        advance: Callable[[int], None],
    ) -> None:
        """`before_chunk(bytes)` is called before that many more bytes are written - of one large
        allocation or of many small ones - by one thread at a time, and may raise;
        `advance(bytes)` after each piece, likewise."""
        self._pieces = pieces
        self._readers = readers
        self._writers = {
            allocation: _writer(target, fill) for allocation, target in targets.items()
        }
        self._targets = targets
        self._pack = pack
        self._fill = fill
        self._chunk_bytes = chunk_bytes
        self._before_chunk = before_chunk
        self._advance = advance
        direct = any(reader.direct for reader in readers.values())
        self.threads = max(threads, DIRECT_THREADS) if direct else threads
        self._lock = threading.Lock()
        self._turns = Turns()
        self._taken = 0
        self._undropped = 0  # bytes read since the page cache was last relieved of them
        self._prepared: dict[int, int] = {}  # allocation -> bytes that may be written
        self._unprepared = sum(target.alloc_bytes for target in targets.values())
        self._granted = 0  # bytes that the last memory check covered and nobody has used yet
        self._hashers: defaultdict[int, RangeHasher] = defaultdict(RangeHasher)

    def run(self) -> dict[int, str]:
        """Writes every piece; returns the 128-bit hash of each allocation by id."""
        with ThreadPoolExecutor(self.threads, "fill") as pool:
            workers = [pool.submit(self._work) for _ in range(self.threads)]
        for writer in self._writers.values():
            writer.close()
        failed = [error for worker in workers if (error := worker.exception()) is not None]
        if failed:
            raise failed[0]
        return {allocation: h.hexdigest() for allocation, h in self._hashers.items()}

    def _work(self) -> None:
        scratch, source, target = Scratch(), Scratch(), Scratch()
        try:
            while (taken := self._take()) is not None:
                number, piece = taken
                reader = self._readers[piece.model]
                view = produce(piece, reader, self._pack, scratch, source, target)
                self._writers[piece.allocation].write(piece.offset, view)
                self._hash_in_turn(number, piece, view)
        except BaseException:
            self._turns.fail()  # the others must not wait for a turn that never comes
            raise

    def _take(self) -> tuple[int, Piece] | None:
        with self._lock:
            if self._turns.failed:
                return None
            piece = next(self._pieces, None)
            if piece is None:
                return None
            self._prepare(piece)
            number = self._taken
            self._taken += 1
            return number, piece

    def _prepare(self, piece: Piece) -> None:
        """Checks memory, and reserves it where the backend wants that, one chunk ahead."""
        target = self._targets[piece.allocation]
        ready = self._prepared.get(piece.allocation, 0)
        while ready < piece.offset + piece.n_bytes:
            n_bytes = min(self._chunk_bytes, target.alloc_bytes - ready)
            if self._granted < n_bytes:
                # A check reads /proc and the cgroups: half a millisecond, too much per norm.
                more = min(self._chunk_bytes, self._unprepared) - self._granted
                self._before_chunk(more)
                self._granted += more
            self._granted -= n_bytes
            self._unprepared -= n_bytes
            reserve(target, ready, n_bytes, self._fill)
            ready += n_bytes
        self._prepared[piece.allocation] = ready

    def _hash_in_turn(self, number: int, piece: Piece, view: memoryview) -> None:
        with self._turns.turn(number) as ours:
            if not ours:
                return
            self._hashers[piece.allocation].update(view)
            self._undropped += piece.n_bytes
            if self._undropped >= self._chunk_bytes:
                self._undropped = 0
                self._readers[piece.model].drop(0, piece.source[1])
            self._advance(piece.n_bytes)


def reserve(target: Target, offset: int, n_bytes: int, fill: Fill) -> None:
    """Makes sure the memory is there before it is written, where writing alone would not do.

    Raises BackendError when it is not."""
    try:
        _reserve(target, offset, n_bytes, fill)
    except OSError as error:
        raise memory_error(f"reserving {n_bytes} bytes of shared memory", error) from error


def _reserve(target: Target, offset: int, n_bytes: int, fill: Fill) -> None:
    if fill == "fallocate":
        os.posix_fallocate(target.fd, offset, n_bytes)
    elif fill == "advise" and target.huge:
        # A write() never gets huge pages under `shmem_enabled=advise`; a fault in an advised
        # mapping does. The pages stay with the memfd when the mapping goes.
        with mmap.mmap(
            target.fd, n_bytes, mmap.MAP_SHARED, mmap.PROT_WRITE, offset=offset
        ) as window:
            window.madvise(mmap.MADV_HUGEPAGE)
            _populate(window)


def _populate(window: mmap.mmap) -> None:
    """Faults every huge page in. Linux before 5.14 has no call for it: one store per page does."""
    try:
        window.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        for offset in range(0, len(window), HUGE_PAGE_BYTES):
            window[offset] = 0


class _Writer(Protocol):
    def write(self, offset: int, view: memoryview) -> None: ...
    def close(self) -> None: ...


class _PwriteWriter:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, offset: int, view: memoryview) -> None:
        done = 0
        try:
            while done < view.nbytes:
                done += os.pwrite(self._fd, view[done:], offset + done)
        except OSError as error:
            raise memory_error(f"writing {view.nbytes} bytes of shared memory", error) from error

    def close(self) -> None:
        pass


class _MapWriter:
    """Stores through a mapping, for hugetlbfs, which has no write()."""

    def __init__(self, target: Target) -> None:
        self._map = mmap.mmap(target.fd, target.alloc_bytes, mmap.MAP_SHARED)

    def write(self, offset: int, view: memoryview) -> None:
        self._map[offset : offset + view.nbytes] = view

    def close(self) -> None:
        self._map.close()


def _writer(target: Target, fill: Fill) -> _Writer:
    return _MapWriter(target) if fill == "map" and target.huge else _PwriteWriter(target.fd)
