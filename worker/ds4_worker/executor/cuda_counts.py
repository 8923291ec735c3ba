"""Which tokens a device has counted as seen, bank by bank, for the penalties of draws.

Owns: the book of what lies in the counts of each bank (cuda/counts.cu), and so what is new for a
step. Pure: whoever packs the step sends it. A bank that goes on with the list it had gets what was
drawn since; every other one is told all that its sequence has seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ds4_worker.executor.api import MOST_DRAFTS, PENDING, Adjustments, Slice

MOST_DRAWN = MOST_DRAFTS + 1  # tokens since the last step; more are told all over again
SEEN_ROOM = 8192  # records that a step takes along; what has more goes ahead in parts


class Note(msgspec.Struct):
    """What is to be counted for a bank before a step draws."""

    bank: int
    clear: bool = False  # forget what there is
    seen: int = 0  # address of records (int32 id, int32 occurrences)
    n_seen: int = 0
    drawn: Sequence[int] = ()
    pending: int = -1  # the token in this place of the step, too


def counts(change: Adjustments | None) -> bool:
    """Whether a draw looks at the tokens seen so far."""
    return change is not None and (change.drawn is not None or change.n_seen > 0)


class Book:
    def __init__(self, banks: int) -> None:
        self._lists: list[Sequence[int] | None] = [None] * banks
        self._counted = [0] * banks  # tokens of the list

    def note(self, slices: Sequence[Slice]) -> list[Note]:
        """A step with these slices runs next. Of drafts nothing is counted: they may be wrong."""
        notes, place = [], 0
        for piece in slices:
            if piece.sample is not None:
                change = (*piece.checks, piece.sample)[0].adjust
                if change is not None and counts(change):
                    pending = place if piece.tokens[0] == PENDING else -1
                    notes.append(self._note(piece.bank, change, pending))
            place += len(piece.tokens)
        return notes

    def _note(self, bank: int, change: Adjustments, pending: int) -> Note:
        held, before = self._lists[bank], self._counted[bank]
        drawn = change.drawn
        after = 0 if drawn is None else len(drawn)
        self._lists[bank], self._counted[bank] = drawn, after + (pending >= 0)
        if drawn is not None and drawn is held and 0 <= after - before <= MOST_DRAWN:
            return Note(bank, drawn=drawn[before:], pending=pending)
        return Note(bank, True, change.seen, change.n_seen, (), pending)


def parts_ahead(notes: Sequence[Note]) -> Iterator[Note]:
    """What a step has no room for: the tokens seen in a long prompt, once. Each part is counted
    before the next is asked for; the notes keep the rest."""
    room = SEEN_ROOM
    for note in notes:
        if note.n_seen <= room:
            room -= note.n_seen
            continue
        while note.n_seen:
            count = min(note.n_seen, SEEN_ROOM)
            yield Note(note.bank, note.clear, note.seen, count)
            note.clear, note.seen, note.n_seen = False, note.seen + 8 * count, note.n_seen - count
