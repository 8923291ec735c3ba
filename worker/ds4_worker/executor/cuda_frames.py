"""What one step sends to a device and brings back: a frame.

Owns: pinned memory of its own and the event behind the step, so that the host can write the next
step's input, or read the last one's draws, while another step runs. Knows the form of the input
(`cuda_places.StepInput`), launches nothing. The one who sends a frame off leaves it alone until its
event is done.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from ds4_common.cuda.memory import PinnedBuffer
from ds4_common.cuda.stream import Event
from ds4_worker.executor.api import PENDING, ExecutorConfig, Sampled, Sampling, Slice
from ds4_worker.executor.cpu import (
    DRAW_RECORD,
    SAMPLED_RECORD,
    SAMPLING_BYTES,
    pack_sampling,
    read_sampled,
)
from ds4_worker.executor.cuda_places import BIASES_BYTES, Places
from ds4_worker.executor.step_rewinds import Noted

_LIVE = struct.Struct("<2i")
_ADDRESS = struct.Struct("<Q")  # of biases: how an ADJUST_RECORD begins


class Frame:
    """`wanted` and `on_device` are of the step that was packed last: how each token is drawn (None
    in the middle of a prompt), and whether the device does it."""

    def __init__(self, places: Places, config: ExecutorConfig, step_address: int) -> None:
        """`step_address`: where the input comes to lie on the device."""
        self._step, self._step_address = places.step, step_address
        with ExitStack() as undo:
            self._input = PinnedBuffer(places.step.n_bytes, "step input")
            undo.callback(self._input.close)
            self._input.view[:] = bytes(places.step.n_bytes)
            self._words = self._input.view.cast("i")
            undo.callback(self._words.release)  # before the buffer's own view
            self._table = PinnedBuffer(places.blocks["table"], "page table")
            undo.callback(self._table.close)
            self._entries = self._table.view.cast("i")
            undo.callback(self._entries.release)
            self._sampled = PinnedBuffer(SAMPLED_RECORD.size * config.batch_outputs, "draws")
            undo.callback(self._sampled.close)
            self.done = Event()
            undo.callback(self.done.close)
            self._held = undo.pop_all()
        self.input_address, self.sampled_address = self._input.address, self._sampled.address
        self.wanted: list[Sampling | None] = []
        self.on_device = True

    @property
    def asked(self) -> list[Sampling]:
        return [how for how in self.wanted if how is not None]

    def pack(
        self,
        slices: Sequence[Slice],
        rows: Sequence[int],
        drawn: Mapping[int, int],
        noted: Sequence[Noted],
    ) -> int:
        """Writes the input of a step; how many tokens it has. `drawn`: where the token of each bank
        lies that may be pending. `noted`: what becomes of running state, of each slice."""
        step, words = self._step, self._words
        tokens, positions, banks = step.tokens // 4, step.positions // 4, step.banks // 4
        sources, count = step.sources // 4, 0
        for piece in slices:
            for position, token in enumerate(piece.tokens, start=piece.start):
                words[tokens + count] = token
                words[positions + count] = position
                words[banks + count] = piece.bank
                words[sources + count] = drawn[piece.bank] if token == PENDING else -1
                count += 1
        for shift, offset in step.shifted.items():
            for number in range(count):
                words[offset // 4 + number] = words[positions + number] + shift
        for piece, (again, keeps) in zip(slices, noted, strict=False):
            words[step.again // 4 + piece.bank] = again
            words[step.keeps // 4 + piece.bank] = keeps
        for number, row in enumerate(rows):
            words[step.rows // 4 + number] = row
        _LIVE.pack_into(self._input.view, step.live_tokens, count, len(rows))
        if self.on_device:
            for number, how in enumerate(self.asked):
                self._pack_draw(number, how)
        return count

    def _pack_draw(self, number: int, how: Sampling) -> None:
        """A record, whose biases come along."""
        record = self._step.samplings + number * SAMPLING_BYTES
        pack_sampling(self._input.view, record, how)
        if how.adjust is None or not how.adjust.n_biases:
            return
        biases, n_bytes = self._step.biases + number * BIASES_BYTES, 8 * how.adjust.n_biases
        ctypes.memmove(self._input.address + biases, how.adjust.biases, n_bytes)
        device_address = self._step_address + biases
        _ADDRESS.pack_into(self._input.view, record + DRAW_RECORD.size, device_address)

    def stage_table(self, table: memoryview[int], first: int, end: int) -> int:
        """Takes entries [first, end) of the page table as they are now; the address of the
        first."""
        self._entries[first:end] = table[first:end]
        return self._table.address + 4 * first

    def drawn(self) -> list[Sampled]:
        """What the device drew, once the event is done."""
        return [
            read_sampled(self._sampled.view, number * SAMPLED_RECORD.size, how)
            for number, how in enumerate(self.asked)
        ]

    def close(self) -> None:
        self._held.close()
