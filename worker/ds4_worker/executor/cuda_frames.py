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
from typing import NamedTuple

from msgspec.structs import replace

from ds4_common.cuda.memory import PinnedBuffer
from ds4_common.cuda.stream import Event
from ds4_common.errors import StepRefused
from ds4_worker.executor.api import (
    MOST_BIASES,
    PENDING,
    ExecutorConfig,
    Sampled,
    Sampling,
    Slice,
)
from ds4_worker.executor.cuda_counts import Note, counts
from ds4_worker.executor.cuda_places import NOTE_BYTES, Places
from ds4_worker.executor.records import SAMPLED_RECORD, SAMPLING_BYTES, pack_sampling, read_sampled
from ds4_worker.executor.step_rewinds import Noted

_LIVE = struct.Struct("<2i")
_NOTE = struct.Struct("<8i")


class Draw(NamedTuple):
    """A token that a step draws; `drafts`: how many tokens up to its row are guesses."""

    bank: int
    drafts: int
    how: Sampling


def draws_of(slices: Sequence[Slice]) -> list[Draw]:
    """The draws of a step, in the order of its rows."""
    return [
        Draw(piece.bank, drafts, how)
        for piece in slices
        if piece.sample is not None
        for drafts, how in enumerate((*piece.checks, piece.sample))
    ]


class Drawn(NamedTuple):
    """What a step drew on the device: of each bank the number of its draw, and the position that
    the token takes."""

    numbers: dict[int, int]
    positions: dict[int, int]


NOTHING = Drawn({}, {})


def drawn_by(slices: Sequence[Slice]) -> Drawn:
    """By slices without drafts, whose draws count whatever they are."""
    drawn, count = Drawn({}, {}), 0
    for piece in slices:
        if piece.sample is not None:
            count += len(piece.checks) + 1
            if not piece.checks:
                drawn.numbers[piece.bank] = count - 1
                drawn.positions[piece.bank] = piece.start + len(piece.tokens)
    return drawn


def check_biases(draws: Sequence[Draw]) -> None:
    """Raises StepRefused for more than a step takes along."""
    for bank, _, how in draws:
        n_biases = 0 if how.adjust is None else how.adjust.n_biases
        if n_biases > MOST_BIASES:
            raise StepRefused(
                f"step: bank {bank}: got {n_biases} biases, expected at most {MOST_BIASES}"
            )


class Frame:
    """`draws` are those of the step that was packed last, `wanted` what its slices asked for: None
    in the middle of a prompt. `used`: bytes of the input that it needs."""

    def __init__(
        self, places: Places, config: ExecutorConfig, step_address: int, counts_address: int
    ) -> None:
        """Where the input comes to lie on the device, and where the counts of banks are."""
        self._step, self._step_address = places.step, step_address
        self._counts_address = counts_address
        self._counts_bytes = places.blocks["counts"] // config.banks
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
        self.draws: Sequence[Draw] = ()
        self.used = 0

    def pack(
        self,
        slices: Sequence[Slice],
        rows: Sequence[int],
        draws: Sequence[Draw],
        drawn: Mapping[int, int],
        noted: Sequence[Noted],
        notes: Sequence[Note],
    ) -> int:
        """Writes the input of a step; how many tokens it has. `drawn`: where the token of each bank
        lies that may be pending. `noted`: what becomes of running state, of each slice; `notes`:
        what becomes of counts."""
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
        self.pack_notes(notes)
        self.draws = draws
        for number, draw in enumerate(draws):
            how = draw.how
            if how.mask or how.adjust is not None:
                how = self._with_lists(draw)
            pack_sampling(self._input.view, step.samplings + number * SAMPLING_BYTES, how)
        return count

    def pack_notes(self, notes: Sequence[Note]) -> None:
        """Begins the lists."""
        step, self.used = self._step, self._step.lists
        self._words[step.live_notes // 4] = len(notes)
        for number, note in enumerate(notes):
            seen = self._take(note.seen, 8 * note.n_seen)
            drawn = (ctypes.c_int32 * len(note.drawn))(*note.drawn)
            _NOTE.pack_into(
                self._input.view, step.notes + number * NOTE_BYTES, note.bank, note.clear, seen,
                note.n_seen, self._take(ctypes.addressof(drawn), 4 * len(note.drawn)),
                len(note.drawn), note.pending, 0,
            )  # fmt: skip

    def _take(self, address: int, n_bytes: int) -> int:
        """Takes a list along; where in the input it is."""
        at = self.used
        ctypes.memmove(self._input.address + at, address, n_bytes)
        self.used += -(-n_bytes // 8) * 8
        return at

    def _with_lists(self, draw: Draw) -> Sampling:
        """A draw as the device's sampler reads it: lists lie there, and what was seen is in counts
        (cuda/sample.cu)."""
        how, change, mask = draw.how, draw.how.adjust, 0
        if how.mask:
            mask = self._step_address + self._take(how.mask, self._step.mask_bytes)
        if change is not None:
            biases, seen, drafts = 0, 0, 0
            if change.n_biases:
                biases = self._step_address + self._take(change.biases, 8 * change.n_biases)
            if counts(change):
                seen, drafts = self._counts_address + draw.bank * self._counts_bytes, draw.drafts
            change = replace(change, biases=biases, seen=seen, n_seen=drafts)
        return replace(how, mask=mask, adjust=change)

    def stage_table(self, table: memoryview[int], first: int, end: int) -> int:
        """Takes entries [first, end) of the page table as they are now; the address of the
        first."""
        self._entries[first:end] = table[first:end]
        return self._table.address + 4 * first

    def drawn(self) -> list[Sampled]:
        """What the device drew, once the event is done."""
        return [
            read_sampled(self._sampled.view, number * SAMPLED_RECORD.size, draw.how)
            for number, draw in enumerate(self.draws)
        ]

    def close(self) -> None:
        self._held.close()
