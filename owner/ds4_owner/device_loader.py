"""Loading into device memory: what the loader child does instead of writing to host memory.

Owns the child's context, its writable mappings of the owner's allocations, and the proof that they
hold what was meant: raw ranges by samples that were taken on both sides of the copy, artifacts by
all their bytes, read back. Everything is unmapped before the child says that it is done, so nobody
can write when the first client maps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from ds4_common.allocation import Allocation, ArtifactKind
from ds4_common.cuda import memory as device_memory
from ds4_common.cuda.device import Context, probe
from ds4_common.cuda.reading import DeviceReader
from ds4_common.cuda.stream import Stream
from ds4_common.errors import BudgetError, LoaderError
from ds4_common.identity import RangeHasher, fnv1a64
from ds4_common.samples import Sampler
from ds4_owner import budget, job, upload
from ds4_owner.artifact_parts import ArtifactParts
from ds4_owner.blobs import Prepared
from ds4_owner.build_artifacts import NAMES
from ds4_owner.channel import Channel
from ds4_owner.config import OwnerConfig
from ds4_owner.fill import Target
from ds4_owner.loader_plan import Models
from ds4_owner.loading import Loader
from ds4_owner.plan import LoadPlan
from ds4_owner.progress import gib
from ds4_owner.reader import ModelReader
from ds4_owner.upload import (
    ArtifactChunk,
    Chunk,
    RawChunk,
    Upload,
    stage_count,
)


def scratch_bytes(threads: int) -> int:
    """Stages, their scratch and the read-back buffers."""
    return stage_count(threads) * (3 * upload.STAGE_BYTES + (4 << 20))


class Session:
    """The child's context on the device, and the owner's allocations mapped in it for writing."""

    def __init__(self, ordinal: int, uuid: str) -> None:
        """Raises CudaError."""
        self.device = probe(ordinal, uuid=uuid)
        self.context = Context(self.device)
        self.addresses: dict[int, int] = {}
        self._mapped = ExitStack()

    def measure(self) -> job.Measured:
        return job.Measured(*self.context.memory_info())

    def map(self, allocation: Allocation, fd: int) -> None:
        """Takes the descriptor."""
        label = f"{allocation.model}-{allocation.id}"
        try:
            memory = device_memory.Allocation.import_fd(fd, allocation.alloc_bytes, label)
        finally:
            os.close(fd)
        with memory:
            mapping = device_memory.Mapping(memory, self.device, writable=True)
        self._mapped.callback(mapping.close)
        self.addresses[allocation.id] = mapping.address

    def unmap(self) -> None:
        self.addresses = {}
        self._mapped.close()

    def close(self) -> None:
        self.unmap()
        self.context.close()


class DeviceLoader(Loader):
    """One load into the memory of a session."""

    def __init__(
        self, session: Session, channel: Channel, config: OwnerConfig, models: Models,
        load_plan: LoadPlan, prepared: Prepared | None, order: job.Load, fds: Sequence[int],
    ) -> None:  # fmt: skip
        self.session = session
        super().__init__(channel, config, models, load_plan, prepared, order, fds)

    def take_targets(self, fds: Sequence[int]) -> dict[int, Target]:
        return {}  # the session has them mapped

    def release(self) -> None:
        self.session.unmap()

    def fill(self, readers: dict[str, ModelReader]) -> None:
        """Uploads raw ranges and artifacts; says the hashes of the raw ranges."""
        parts = {
            a.id: ArtifactParts(a.artifact, a.source_offset)
            for a in self.plan.allocations
            if a.artifact is not None
        }
        samplers = {a.id: Sampler(a.n_bytes) for a in self.plan.allocations if a.id not in parts}
        start = time.monotonic()
        stage_bytes = max([upload.STAGE_BYTES, *(p.part_bytes(1) for p in parts.values())])
        self._clear_padding(parts)
        uploaded = Upload(
            self.session.context, self._chunks(readers, parts, stage_bytes),
            self.session.addresses, samplers,
            threads=self.config.repack_threads, stage_bytes=stage_bytes,
            chunk_bytes=self.config.copy_chunk_bytes,
            before_chunk=self.check_memory, advance=self.advance,
        )  # fmt: skip
        uploaded.run()
        self._check_samples(samplers)
        for allocation, sampler in samplers.items():
            digest = uploaded.hashers[allocation, 0].hexdigest()
            self.channel.send(job.Hashed(allocation, digest, sampler.hexdigest()))
        self._say_artifacts(parts, uploaded)
        self._log_kinds(parts, time.monotonic() - start)

    def build_artifacts(self, readers: dict[str, ModelReader]) -> None:
        """They came with the upload."""

    def check_memory(self, n_bytes: int) -> None:
        """The weights are allocated; is the reserve still there? BudgetError."""
        if not self.order.reserve_bytes or not self.session.device.integrated:
            return
        left = budget.available_memory()
        if left < n_bytes + self.order.reserve_bytes:
            raise BudgetError(
                f"memory ran out while loading, at {gib(self.done_bytes)} of"
                f" {gib(self.plan.n_bytes)}: the reserve of {gib(self.order.reserve_bytes)} exceeds"
                f" the {gib(left)} left; stop other processes or lower --reserve-gb"
            )

    def _chunks(
        self, readers: dict[str, ModelReader], parts: dict[int, ArtifactParts], stage_bytes: int
    ) -> Iterator[Chunk]:
        for a in self.plan.allocations:
            reader = readers[a.model]
            if a.artifact is None:
                for offset in range(0, a.n_bytes, stage_bytes):
                    n_bytes = min(stage_bytes, a.n_bytes - offset)
                    yield RawChunk(a.id, reader, a.source_offset + offset, offset, n_bytes)
                continue
            step = parts[a.id].units_that_fit(stage_bytes)
            for first in range(0, parts[a.id].units, step):
                count = min(step, parts[a.id].units - first)
                yield ArtifactChunk(a.id, reader, parts[a.id], first, count)

    def _clear_padding(self, parts: dict[int, ArtifactParts]) -> None:
        """What no copy reaches reads as zero, not as what the memory held before."""
        with Stream() as stream:
            for a in self.plan.allocations:
                gaps = [] if a.id not in parts else parts[a.id].gaps()
                for offset, n_bytes in [*gaps, (a.n_bytes, a.alloc_bytes - a.n_bytes)]:
                    if n_bytes:
                        stream.fill(self.session.addresses[a.id] + offset, 0, n_bytes)
            stream.synchronize()

    def _check_samples(self, samplers: dict[int, Sampler]) -> None:
        sizes = {a.id: a.n_bytes for a in self.plan.allocations}
        with DeviceReader() as reader:
            found = reader.samples([(self.session.addresses[i], sizes[i]) for i in samplers])
        for (allocation, sampler), sample in zip(samplers.items(), found, strict=True):
            if sample != sampler.hexdigest():
                raise _damaged(allocation)

    def _say_artifacts(self, parts: dict[int, ArtifactParts], uploaded: Upload) -> None:
        """Reads artifacts back: their bytes lie in another order than they came in, so only now
        can they be hashed from the first to the last - and each section must be what was sent."""
        with ThreadPoolExecutor(stage_count(self.config.repack_threads), "read back") as pool:
            futures = {i: pool.submit(self._read_back, i, p, uploaded) for i, p in parts.items()}
            for allocation, future in futures.items():
                digest, sample, fnv = future.result()
                self.channel.send(job.Hashed(allocation, digest, sample))
                artifact = parts[allocation].artifact
                if self.config.repack_hash:
                    self.channel.log(
                        f"repack-hash {NAMES[artifact.kind]} {artifact.name}"
                        f" bytes={parts[allocation].n_bytes} fnv={fnv:016x}"
                    )

    def _log_kinds(self, parts: dict[int, ArtifactParts], seconds: float) -> None:
        built: dict[ArtifactKind, list[int]] = {}
        for part in parts.values():
            built.setdefault(part.artifact.kind, []).append(part.n_bytes)
        for kind, sizes in built.items():
            self.channel.log(
                f"{NAMES[kind]} aligned repack base: {len(sizes)} tensors {gib(sum(sizes))}"
                f" in {seconds:.2f} s with all else"
                f" threads={stage_count(self.config.repack_threads)}"
            )

    def _read_back(
        self, allocation: int, parts: ArtifactParts, uploaded: Upload
    ) -> tuple[str, str, int]:
        self.session.context.enter()
        whole, sampler, fnv = RangeHasher(), Sampler(parts.n_bytes), fnv1a64(b"")
        sections = [RangeHasher() for _ in parts.sections]
        at = 0
        with DeviceReader() as reader:
            for view in reader.stream(self.session.addresses[allocation], parts.n_bytes):
                whole.update(view)
                sampler.update(view)
                if self.config.repack_hash:
                    fnv = fnv1a64(view, fnv)
                for section, hasher in zip(parts.sections, sections, strict=True):
                    first = max(at, section.offset)
                    last = min(at + view.nbytes, section.offset + section.n_bytes)
                    if first < last:
                        hasher.update(view[first - at : last - at])
                at += view.nbytes
        for number, hasher in enumerate(sections):
            if hasher.hexdigest() != uploaded.hashers[allocation, number].hexdigest():
                raise _damaged(allocation)
        return whole.hexdigest(), sampler.hexdigest(), fnv


def _damaged(allocation: int) -> LoaderError:
    return LoaderError(
        f"allocation {allocation}: the device does not hold the bytes that were uploaded to it;"
        " a fault of the device or its driver (see dmesg)"
    )
