"""Device memory seen from the host: streams of bytes, single spans, samples.

Owns two pinned buffers and the copies into them, so that one is filled while the other is looked
at. For one thread at a time; the context must be current in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from ds4_common import samples
from ds4_common.closing import Closing
from ds4_common.cuda.memory import PinnedBuffer
from ds4_common.cuda.stream import Event, Stream

BUFFER_BYTES = 8 << 20
_SAMPLED_BYTES = samples.SAMPLES * samples.SAMPLE_BYTES


class _Half:
    """One of the two buffers."""

    def __init__(self, n_bytes: int, cleanup: ExitStack) -> None:
        self.buffer = cleanup.enter_context(PinnedBuffer(n_bytes, "read buffer"))
        self.stream = cleanup.enter_context(Stream())
        self.event = Event()
        cleanup.callback(self.event.close)

    def start(self, address: int, n_bytes: int, at: int = 0) -> None:
        self.stream.download(self.buffer.address + at, address, n_bytes)

    def view(self, n_bytes: int) -> memoryview:
        """What was copied, when it is there."""
        self.stream.record(self.event)
        self.event.synchronize()
        return self.buffer.view[:n_bytes]


class DeviceReader(Closing):
    """Copies to the host. `close` frees the buffers; no view that was given is valid then."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._bytes = max(buffer_bytes, _SAMPLED_BYTES)
        with ExitStack() as undo:
            self._halves = [_Half(self._bytes, undo) for _ in range(2)]
            self._cleanup = undo.pop_all()

    def close(self) -> None:
        self._cleanup.close()

    def stream(self, address: int, n_bytes: int) -> Iterator[memoryview]:
        """All bytes in order, in pieces that are valid until the next one is asked for."""
        spans = [
            (offset, min(self._bytes, n_bytes - offset))
            for offset in range(0, n_bytes, self._bytes)
        ]
        for index, (offset, size) in enumerate(spans):
            if not index:
                self._halves[0].start(address + offset, size)
            if index + 1 < len(spans):
                after, more = spans[index + 1]
                self._halves[(index + 1) % 2].start(address + after, more)
            yield self._halves[index % 2].view(size)

    def read_into(self, address: int, view: memoryview) -> None:
        done = 0
        for part in self.stream(address, view.nbytes):
            view[done : done + part.nbytes] = part
            done += part.nbytes

    def samples(self, ranges: Sequence[tuple[int, int]]) -> list[str]:
        """The sample hash (`ds4_common.samples`) of each (address, bytes)."""
        found: list[str] = []
        together = self._bytes // _SAMPLED_BYTES
        half = self._halves[0]
        for first in range(0, len(ranges), together):
            places: list[list[tuple[int, int]]] = []
            at = 0
            for address, n_bytes in ranges[first : first + together]:
                places.append([])
                for offset, size in samples.spans(n_bytes):
                    if size:
                        half.start(address + offset, size, at)
                    places[-1].append((at, size))
                    at += size
            view = half.view(at)
            found += [samples.digest([view[p : p + n] for p, n in spans]) for spans in places]
        return found
