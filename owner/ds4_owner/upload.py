"""Fills device memory: read and repack into pinned stages, copy, hash - all at the same time.

Owns the stages (one per thread, each with a stream and an event), their reuse - a stage is written
again when its copy is done, not before - and the order of the hashes, which are taken from the
stages in the order of the bytes. Refuses to go on after the first error of any thread.

A stage is small: pinned memory comes out of the same pool as the weights on an integrated device,
and a copy of a few MiB already runs at the full rate.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from ds4_common.cuda.device import Context
from ds4_common.cuda.memory import PinnedBuffer
from ds4_common.cuda.stream import Event, Stream
from ds4_common.identity import RangeHasher
from ds4_common.samples import Sampler
from ds4_owner.artifact_parts import ArtifactParts
from ds4_owner.reader import ModelReader, Scratch
from ds4_owner.turns import Turns

STAGE_BYTES = 16 << 20
MIN_STAGES, MAX_STAGES = 2, 4


def stage_count(threads: int) -> int:
    return max(MIN_STAGES, min(MAX_STAGES, threads))


@dataclass(frozen=True, slots=True)
class Copy:
    """`n_bytes` at `stage` go to `offset` of the allocation, as the next ones of its `section`."""

    stage: int
    offset: int
    n_bytes: int
    section: int = 0


class Chunk(Protocol):
    """What one stage holds at a time."""

    @property
    def allocation(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    def produce(self, stage: memoryview, scratch: Scratches) -> Sequence[Copy]:
        """Writes the finished bytes into the stage. Called in any thread."""

    def forget(self) -> None:
        """Relieves the page cache of the source."""


class Scratches:
    """One thread's memory beside its stage."""

    def __init__(self) -> None:
        self.direct = Scratch()
        self.raw = bytearray()


@dataclass(frozen=True, slots=True)
class RawChunk:
    """Logical bytes as they are."""

    allocation: int
    reader: ModelReader
    source: int
    offset: int
    n_bytes: int

    def produce(self, stage: memoryview, scratch: Scratches) -> Sequence[Copy]:
        self.reader.read_into(self.source, stage[: self.n_bytes], scratch.direct)
        return (Copy(0, self.offset, self.n_bytes),)

    def forget(self) -> None:
        self.reader.drop(self.source, self.n_bytes)


@dataclass(frozen=True, slots=True)
class ArtifactChunk:
    """Units of an artifact."""

    allocation: int
    reader: ModelReader
    parts: ArtifactParts
    first: int
    count: int

    @property
    def n_bytes(self) -> int:
        return self.parts.part_bytes(self.count)

    def produce(self, stage: memoryview, scratch: Scratches) -> Sequence[Copy]:
        built = self.parts.build(
            self.first, self.count, stage, scratch.raw,
            lambda offset, view: self.reader.read_into(offset, view, scratch.direct),
        )  # fmt: skip
        return [
            Copy(part.offset, offset, part.n_bytes, section)
            for section, (part, offset) in enumerate(built)
        ]

    def forget(self) -> None:
        self.reader.drop(*self.parts.source(self.first, self.count))


class _Stage:
    def __init__(self, n_bytes: int, cleanup: ExitStack) -> None:
        self.buffer = cleanup.enter_context(PinnedBuffer(n_bytes, "upload stage"))
        self.stream = cleanup.enter_context(Stream())
        self.event = Event()
        cleanup.callback(self.event.close)

    def send(self, copies: Sequence[Copy], address: int) -> None:
        for copy in copies:
            stage = self.buffer.address + copy.stage
            self.stream.upload(address + copy.offset, stage, copy.n_bytes)
        self.stream.record(self.event)


class Upload:
    """Uploads chunks. Use once: `run`, then `hashes` and `samples`."""

    def __init__(
        self,
        context: Context,
        chunks: Iterator[Chunk],
        addresses: Mapping[int, int],
        samplers: Mapping[int, Sampler],
        *,
        threads: int,
        stage_bytes: int,
        chunk_bytes: int,
        before_chunk: Callable[[int], None],
        advance: Callable[[int], None],
    ) -> None:
        """`samplers`: of the allocations that come in one section. `before_chunk(0)` is called at
        the start and every `chunk_bytes`, by one thread at a time, and may raise; `advance(bytes)`
        after each chunk, likewise."""
        self._context = context
        self._chunks = chunks
        self._addresses = addresses
        self._samplers = samplers
        self._threads = stage_count(threads)
        self._stage_bytes = stage_bytes
        self._chunk_bytes = self._unchecked = chunk_bytes
        self._before_chunk = before_chunk
        self._advance = advance
        self._lock = threading.Lock()
        self._turns = Turns()
        self._taken = 0
        self.hashers: defaultdict[tuple[int, int], RangeHasher] = defaultdict(RangeHasher)

    def run(self) -> None:
        """Returns when every copy is done; raises the first error of any thread."""
        with ExitStack() as cleanup:
            stages = [_Stage(self._stage_bytes, cleanup) for _ in range(self._threads)]
            with ThreadPoolExecutor(self._threads, "upload") as pool:
                workers = [pool.submit(self._work, stage) for stage in stages]
            failed = [error for worker in workers if (error := worker.exception()) is not None]
            if failed:
                raise failed[0]

    def _work(self, stage: _Stage) -> None:
        try:
            self._context.enter()
            scratch = Scratches()
            while (taken := self._take()) is not None:
                number, chunk = taken
                stage.event.synchronize()  # the stage's last copy; at first, nothing
                copies = chunk.produce(stage.buffer.view, scratch)
                stage.send(copies, self._addresses[chunk.allocation])
                self._count(number, chunk, copies, stage.buffer.view)
            stage.stream.synchronize()
        except BaseException:
            self._turns.fail()  # the others must not wait for a turn that never comes
            raise

    def _take(self) -> tuple[int, Chunk] | None:
        with self._lock:
            if self._turns.failed:
                return None
            chunk = next(self._chunks, None)
            if chunk is None:
                return None
            if self._unchecked >= self._chunk_bytes:
                self._before_chunk(0)
                self._unchecked = 0
            self._unchecked += chunk.n_bytes
            number = self._taken
            self._taken += 1
            return number, chunk

    def _count(self, number: int, chunk: Chunk, copies: Sequence[Copy], stage: memoryview) -> None:
        """Hashes the stage while it is copied; both only read it."""
        with self._turns.turn(number) as ours:
            if not ours:
                return
            n_bytes = 0
            for copy in copies:
                view = stage[copy.stage : copy.stage + copy.n_bytes]
                self.hashers[chunk.allocation, copy.section].update(view)
                if (sampler := self._samplers.get(chunk.allocation)) is not None:
                    sampler.update(view)
                n_bytes += copy.n_bytes
            chunk.forget()
            self._advance(n_bytes)
