"""Builds derived artifacts straight into their allocations and says how it went.

Owns the mapping of one allocation at a time, its hash, and the log lines per kind. The bytes come
from `artifacts.build_artifact` and do not depend on the number of threads.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

from ds4_common.allocation import Allocation, ArtifactKind
from ds4_common.identity import RangeHasher
from ds4_owner.artifacts import build_artifact, repack_hash_line
from ds4_owner.backends import Fill
from ds4_owner.config import OwnerConfig
from ds4_owner.fill import Target, reserve
from ds4_owner.progress import gib
from ds4_owner.reader import ModelReader, Scratch

# What the published log lines call each kind.
NAMES = {
    ArtifactKind.Q2_K_ALIGNED: "q2k",
    ArtifactKind.IQ2_XXS_ALIGNED: "iq2_xxs",
    ArtifactKind.IQ2_XS_ALIGNED: "iq2_xs",
    ArtifactKind.Q8_0_ALIGNED: "q8_0",
    ArtifactKind.MLA_KV_B: "mla kv_b",
    ArtifactKind.ROW_GROUP_NORMS: "row-group norms",
    ArtifactKind.Q8_F16: "q8_0 f16",
    ArtifactKind.Q8_F32: "q8_0 f32",
}


class ArtifactBuilder:
    """Builds artifacts of the base model one by one, in the order of their ids."""

    def __init__(
        self,
        reader: ModelReader,
        config: OwnerConfig,
        fill: Fill,
        check_memory: Callable[[int], None],
        log: Callable[[str], None],
    ) -> None:
        self._reader = reader
        self._config = config
        self._fill = fill
        self._check_memory = check_memory
        self._log = log
        self._scratch = threading.local()
        self._kind: ArtifactKind | None = None
        self._count = self._n_bytes = 0
        self._start = 0.0

    def build(self, allocation: Allocation, target: Target) -> str:
        """Fills one allocation; returns its 128-bit hash."""
        artifact = allocation.artifact
        assert artifact is not None
        if artifact.kind is not self._kind:
            self.finish()
            self._kind, self._start = artifact.kind, time.monotonic()
        self._check_memory(target.alloc_bytes)
        reserve(target, 0, target.alloc_bytes, self._fill)
        hasher = RangeHasher()
        with (
            mmap.mmap(target.fd, target.alloc_bytes, mmap.MAP_SHARED) as window,
            memoryview(window) as whole,
            whole[: allocation.n_bytes] as view,
        ):
            build_artifact(artifact, allocation.source_offset, self._read, view,
                           threads=self._config.repack_threads)  # fmt: skip
            hasher.update(view)
            if self._config.repack_hash:
                self._log(repack_hash_line(NAMES[artifact.kind], artifact, view))
        self._reader.drop(allocation.source_offset, allocation.source_bytes)
        self._count += 1
        self._n_bytes += allocation.n_bytes
        return hasher.hexdigest()

    def finish(self) -> None:
        """Logs the kind that was being built, if any."""
        if self._kind is not None:
            seconds = time.monotonic() - self._start
            self._log(
                f"{NAMES[self._kind]} aligned repack base: {self._count} tensors"
                f" {gib(self._n_bytes)} in {seconds:.2f} s threads={self._config.repack_threads}"
            )
        self._kind, self._count, self._n_bytes = None, 0, 0

    def _read(self, offset: int, view: memoryview) -> None:
        if not hasattr(self._scratch, "value"):
            self._scratch.value = Scratch()
        self._reader.read_into(offset, view, self._scratch.value)
