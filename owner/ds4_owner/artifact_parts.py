"""Artifacts built in parts, some units of the source at a time: for memory filled by copies.

Host artifacts are built in place (artifacts.build_artifact). Device memory is filled through small
pinned stages, so here a few units become a small artifact of the same kind, whose sections are then
copied to where they belong. Owns the sections and their places; the byte moves are native/repack.c.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from ds4_common.allocation import Artifact, ArtifactKind
from ds4_common.errors import NativeLibraryError
from ds4_common.gguf import block_bytes, block_weights
from ds4_owner import artifacts
from ds4_owner.plan import REPLACES_RAW, round_up

_STEP_BYTES = artifacts.DEFAULT_CHUNK_BYTES  # source and result stay in the second-level cache
_SECTION_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes of one kind that follow each other in the order of the source."""

    offset: int
    n_bytes: int


class ArtifactParts:
    """One artifact. A unit is a row, a pair of rows or a head, as in native/repack.h."""

    def __init__(self, artifact: Artifact, source_offset: int) -> None:
        self.artifact = artifact
        self._source_offset = source_offset
        self._shape = artifacts.shape_of(artifact)
        self.units: int = self._shape.units
        source = artifacts.SOURCE_TYPE[artifact.kind]
        self._row_blocks = self._shape.in_dim // block_weights(source)
        self._unit_bytes = self._shape.unit_rows * self._row_blocks * block_bytes(source)
        self.sections = self._sections(self.units)
        self.n_bytes: int = self._shape.dst_bytes

    def source(self, first: int, count: int) -> tuple[int, int]:
        """(offset, bytes) of units in the logical model."""
        return self._source_offset + first * self._unit_bytes, count * self._unit_bytes

    def units_that_fit(self, stage_bytes: int) -> int:
        """How many become at most `stage_bytes`; at least one is needed, whatever its size."""
        per_unit = sum(section.n_bytes for section in self._sections(1))
        room = stage_bytes - _SECTION_ALIGNMENT * len(self.sections)
        return max(1, min(self.units, room // per_unit))

    def part_bytes(self, count: int) -> int:
        """What `count` units become in a stage."""
        last = self._sections(count)[-1]
        return self._whole(last.offset + last.n_bytes)

    def gaps(self) -> list[tuple[int, int]]:
        """(offset, bytes) of the padding behind sections, which must read as zero."""
        ends = [(s.offset + s.n_bytes, after.offset) for s, after in pairwise(self.sections)]
        ends.append((self.sections[-1].offset + self.sections[-1].n_bytes, self.n_bytes))
        return [(start, end - start) for start, end in ends if end > start]

    def build(
        self, first: int, count: int, stage: memoryview, scratch: bytearray,
        read: Callable[[int, memoryview], None],
    ) -> list[tuple[Section, int]]:  # fmt: skip
        """Turns units into their bytes at the start of `stage`. Returns, per section of the
        artifact, the part of the stage and where in the artifact it goes.

        `scratch` is grown to what a step of the source needs."""
        small = artifacts.Shape(
            self._shape.in_dim, self._shape.out_dim, self._shape.groups, count,
            self._shape.unit_rows, self.part_bytes(count),
        )  # fmt: skip
        base = ctypes.addressof(ctypes.c_char.from_buffer(stage))
        step = max(1, _STEP_BYTES // self._unit_bytes)
        if len(scratch) < min(step, count) * self._unit_bytes:
            scratch.extend(bytes(min(step, count) * self._unit_bytes - len(scratch)))
        for done in range(0, count, step):
            units = min(step, count - done)
            offset, n_bytes = self.source(first + done, units)
            with memoryview(scratch) as whole, whole[:n_bytes] as raw:
                read(offset, raw)
                address = ctypes.addressof(ctypes.c_char.from_buffer(scratch))
                if artifacts.repack()(self.artifact.kind, small, address, done, units, base):
                    raise NativeLibraryError(
                        f"repack of {self.artifact.name}: the native library refuses {count} units"
                        f" of kind {self.artifact.kind}; rebuild the library"
                    )
        parts = self._sections(count)
        before = self._sections(first) if first else [Section(0, 0)] * len(parts)
        return [
            (part, whole.offset + earlier.n_bytes)
            for part, whole, earlier in zip(parts, self.sections, before, strict=True)
        ]

    def _sections(self, units: int) -> list[Section]:
        found: list[Section] = []
        at = 0
        for n_bytes in self._section_bytes(units):
            found.append(Section(at, n_bytes))
            at = self._whole(at + n_bytes)
        return found

    def _section_bytes(self, units: int) -> tuple[int, ...]:
        kind, shape = self.artifact.kind, self._shape
        if kind is ArtifactKind.ROW_GROUP_NORMS:
            return (4 * units * shape.groups,)
        if kind in (ArtifactKind.Q8_F16, ArtifactKind.Q8_F32):
            return ((2 if kind is ArtifactKind.Q8_F16 else 4) * units * shape.in_dim,)
        if kind is ArtifactKind.MLA_KV_B:
            blocks = units * self._row_blocks * artifacts.MLA_VALUE_DIM
            return 2 * blocks, 32 * blocks
        return artifacts.sections(kind, units * shape.unit_rows * self._row_blocks)

    def _whole(self, n_bytes: int) -> int:
        """Rounded up where the kind pads its sections."""
        return round_up(n_bytes, _SECTION_ALIGNMENT) if self.artifact.kind in _PADDED else n_bytes


_PADDED = (*REPLACES_RAW, ArtifactKind.Q8_0_ALIGNED)
