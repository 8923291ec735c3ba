"""One load: fills the owner's memory from the planned models.

Owns the order of a load - raw ranges and groups, artifacts, fingerprints, blobs - and the checks
between: the files are those that were planned, and the reserve of memory is still there. Device
memory is filled by `device_loader`, which inherits the rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from ds4_common import tensor_directory
from ds4_common.allocation import Allocation, ArtifactKind
from ds4_common.errors import BudgetError, IdentityError
from ds4_common.identity import FINGERPRINT_ALGORITHM, RangeHasher, ShardStat, fingerprint
from ds4_owner import blobs, budget, job
from ds4_owner.build_artifacts import ArtifactBuilder
from ds4_owner.channel import Channel
from ds4_owner.config import OwnerConfig
from ds4_owner.fill import Filler, Piece, Target, pieces_of_group, pieces_of_range
from ds4_owner.loader_plan import Models, pack_rows
from ds4_owner.plan import LoadPlan
from ds4_owner.progress import gib
from ds4_owner.reader import ModelReader


class Loader:
    """One load: fills the owner's memory from the planned models."""

    def __init__(
        self,
        channel: Channel,
        config: OwnerConfig,
        models: Models,
        load_plan: LoadPlan,
        prepared: blobs.Prepared | None,
        order: job.Load,
        fds: Sequence[int],
    ) -> None:
        self.channel = channel
        self.config = config
        self.models = models
        self.plan = load_plan
        self.prepared = prepared
        self.order = order
        self.blob_fds = dict(zip(job.BLOB_NAMES, fds[len(load_plan.allocations) :], strict=True))
        self.targets = self.take_targets(fds)
        self.done_bytes = 0

    def take_targets(self, fds: Sequence[int]) -> dict[int, Target]:
        held = fds[: len(self.plan.allocations)]
        return {
            a.id: Target(fd, a.alloc_bytes)
            for a, fd in zip(self.plan.allocations, held, strict=True)
        }

    def release(self) -> None:
        """Gives up every way to write, before the owner hands the memory out."""

    def run(self, files: ExitStack) -> None:
        start = time.monotonic()
        self.check_unchanged()
        readers = {}
        for name, model in self.models.items():
            readers[name] = ModelReader(model, direct_io=self.config.direct_io)
            files.callback(readers[name].close)
        self.fill(readers)
        self.build_artifacts(readers)
        self.check_unchanged()
        seconds = time.monotonic() - start
        fingerprints = self.fingerprints()
        self.write_blobs(fingerprints)
        self.check_unchanged()
        self.release()
        self.channel.send(job.Done(seconds))
        for name, model in self.models.items():
            readers[name].drop(0, model.n_bytes)

    def fill(self, readers: dict[str, ModelReader]) -> None:
        """Raw ranges and CPU groups."""
        filler = Filler(
            (
                piece
                for a in self.plan.allocations
                if a.artifact is None or a.artifact.kind is ArtifactKind.CPU_GROUP
                for piece in self._pieces(a)
            ),
            readers, self.targets, pack_rows,
            fill=self.order.fill, threads=self.config.repack_threads,
            chunk_bytes=self.config.copy_chunk_bytes,
            before_chunk=self.check_memory, advance=self.advance,
        )  # fmt: skip
        for allocation, digest in filler.run().items():
            self.channel.send(job.Hashed(allocation, digest))

    def _pieces(self, allocation: Allocation) -> Iterator[Piece]:
        if allocation.artifact is None:
            return pieces_of_range(allocation)
        model = self.models[allocation.model]
        return pieces_of_group(allocation, self.plan.members(allocation.id), model)

    def build_artifacts(self, readers: dict[str, ModelReader]) -> None:
        """Kinds 1 to 8, in the order of their ids; one log line per kind."""
        wanted = [
            a
            for a in self.plan.allocations
            if a.artifact is not None and a.artifact.kind is not ArtifactKind.CPU_GROUP
        ]
        if not wanted:
            return
        builder = ArtifactBuilder(
            readers["base"], self.config, self.order.fill, self.check_memory, self.channel.log
        )
        for allocation in wanted:
            digest = builder.build(allocation, self.targets[allocation.id])
            self.channel.send(job.Hashed(allocation.id, digest))
            self.advance(allocation.n_bytes)
        builder.finish()

    def advance(self, n_bytes: int) -> None:
        self.done_bytes += n_bytes
        total = self.plan.n_bytes
        self.channel.progress("loading", self.done_bytes, total, force=self.done_bytes == total)

    def check_memory(self, n_bytes: int) -> None:
        """Before `n_bytes` more are allocated: is the reserve still there? BudgetError."""
        if not self.order.reserve_bytes or self.order.fill == "map":
            return
        memory = budget.read_memory(tmpfs=self.order.tmpfs)
        if memory.budget < n_bytes + self.order.reserve_bytes:
            raise BudgetError(
                f"memory ran out while loading, at {gib(self.done_bytes)} of"
                f" {gib(self.plan.n_bytes)}: the next {gib(n_bytes)} and the reserve of"
                f" {gib(self.order.reserve_bytes)} exceed the {gib(memory.budget)} left;"
                " stop other processes or lower --reserve-gb"
            )

    def check_unchanged(self) -> None:
        """Raises IdentityError when a file is not the one that was planned, naming the change."""
        for model in self.models.values():
            for shard in model.shards:
                try:
                    changes = shard.stat.changes(ShardStat.capture(shard.path))
                except OSError as error:
                    changes = error.strerror or str(error)
                if changes:
                    raise IdentityError(
                        f"{shard.path} changed between plan and load: {changes};"
                        " start again when it is complete"
                    )

    def fingerprints(self) -> dict[str, str]:
        values = {}
        for name, model in self.models.items():
            values[name] = fingerprint(model)
            self.channel.log(f"content fingerprint {name} {FINGERPRINT_ALGORITHM} {values[name]}")
            self.channel.send(job.Fingerprint(name, values[name]))
        return values

    def write_blobs(self, fingerprints: dict[str, str]) -> None:
        """The tensor directory of all models; contract, image, tokenizer and frontend of the base
        model, where a recipe knows it."""
        self.write_blob(tensor_directory.BLOB_NAME, tensor_directory.encode(self.plan.places))
        if self.prepared is not None:
            for blob, data in self.prepared.blobs(fingerprints["base"]).items():
                self.write_blob(blob, data)

    def write_blob(self, name: str, data: bytes) -> None:
        write_all(self.blob_fds[name], data)
        hasher = RangeHasher()
        hasher.update(data)
        self.channel.send(job.Blob(name, len(data), hasher.hexdigest()))


def write_all(fd: int, data: bytes) -> None:
    view, done = memoryview(data), 0
    while done < len(data):
        done += os.pwrite(fd, view[done:], done)
