"""Whether a step can be run: the rules of native/exec_step.c, for executors that run elsewhere.

Owns: the table of pages, what each page holds, and the refusal (`StepRefused`) of a step before any
of it is written. A decode step costs a few operations per slice, however long the sequences are:
the whole pages before a slice are looked at once, and again only after a change that could concern
them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from ds4_common.errors import StepRefused
from ds4_worker.executor.api import PENDING, Slice
from ds4_worker.executor.step_rewinds import Noted, Rewinds


class StepLimits(msgspec.Struct, frozen=True):
    banks: int
    histories: tuple[tuple[int, int], ...]  # window (0: all positions) and pages of each
    pages_per_bank: int
    page_tokens: int
    context_tokens: int
    batch_tokens: int
    batch_outputs: int
    vocabulary: int  # of tokens that can be put in
    forward_only: bool = False  # what runs along in a page is that of its last token
    rewinds: bool = False  # then of a bank's last slice all the same (step_rewinds.py)


class StepChecks:
    """`table` is [histories][banks][pages_per_bank], -1 where unmapped; its memory is the
    caller's."""

    def __init__(self, limits: StepLimits, table: memoryview[int]) -> None:
        self._limits = limits
        for entry in range(len(table)):
            table[entry] = -1
        size = limits.banks * limits.pages_per_bank
        self._histories = [
            _History(limits, window, pages, table[number * size : (number + 1) * size])
            for number, (window, pages) in enumerate(limits.histories)
        ]
        self._changed = (0, len(table))
        self._rewinds: Rewinds | None = None
        if limits.rewinds:
            pages = self._histories[0].page_at
            self._rewinds = Rewinds(limits.banks, limits.page_tokens, pages)

    def set_page(self, bank: int, index: int, page: int, history: int = 0) -> None:
        limits = self._limits
        if not (0 <= bank < limits.banks and 0 <= index < limits.pages_per_bank):
            raise StepRefused(
                f"page table: got bank {bank}, index {index}; expected below "
                f"{limits.banks} and {limits.pages_per_bank}"
            )
        self._history(history).set_page(bank, index, page)
        entry = (history * limits.banks + bank) * limits.pages_per_bank + index
        first, end = self._changed
        self._changed = (min(first, entry), max(end, entry + 1)) if end else (entry, entry + 1)

    def take_changed(self) -> tuple[int, int]:
        """The entries [first, end) that hold all changes since the last call."""
        changed, self._changed = self._changed, (0, 0)
        return changed

    def copy_page(self, source: int, target: int, tokens: int, history: int = 0) -> None:
        """Checks a copy and books it."""
        self._history(history).copy_page(source, target, tokens)
        if self._rewinds is not None and not history:
            self._rewinds.forget(target)

    def check(self, slices: Sequence[Slice], pending: Mapping[int, int] | None = None) -> int:
        """Raises StepRefused; returns the output rows that the slices ask for. `pending`: banks
        whose next token lies on the device, and its position."""
        limits = self._limits
        if not 0 < len(slices) <= limits.banks:
            raise StepRefused(f"step: got {len(slices)} slices, expected 1 to {limits.banks}")
        banks: set[int] = set()
        tokens = rows = 0
        for number, piece in enumerate(slices):
            self._check_slice(number, piece, banks, pending or {})
            tokens += len(piece.tokens)
            rows += len(piece.checks) + 1 if piece.sample is not None else 0
        if tokens > limits.batch_tokens:
            raise StepRefused(f"step: got {tokens} tokens, expected {limits.batch_tokens} at most")
        if rows > limits.batch_outputs:
            raise StepRefused(f"step: got {rows} outputs, expected {limits.batch_outputs} at most")
        # The state of a page is in the history that keeps all.
        keeper, *windows = self._histories
        keeper.check(slices, self._run_ahead(slices) if limits.forward_only else set())
        for history in windows:
            history.check(slices, set())
        return rows

    def _run_ahead(self, slices: Sequence[Slice]) -> set[int]:
        """Banks whose slice cannot begin before the last token that their pages hold."""
        rewinds = self._rewinds
        return {s.bank for s in slices if rewinds is None or not rewinds.possible(s)}

    def book(self, slices: Sequence[Slice]) -> list[Noted]:
        """After `check`: the pages hold what the step writes. Where running state is kept, what is
        to be done with it for each slice."""
        noted = self._rewinds.note(slices) if self._rewinds is not None else []
        for history in self._histories:
            history.book(slices)
        return noted

    def _history(self, number: int) -> _History:
        if not 0 <= number < len(self._histories):
            raise StepRefused(f"history: got {number}, expected below {len(self._histories)}")
        return self._histories[number]

    def _check_slice(
        self, number: int, piece: Slice, banks: set[int], pending: Mapping[int, int]
    ) -> None:
        limits, count = self._limits, len(piece.tokens)
        where = f"slice {number} (bank {piece.bank})"
        if not 0 <= piece.bank < limits.banks:
            raise StepRefused(f"{where}: expected a bank below {limits.banks}")
        if piece.bank in banks:
            raise StepRefused(f"{where}: the bank has a slice in this step already")
        banks.add(piece.bank)
        if piece.start < 0 or count < 1 or piece.start + count > limits.context_tokens:
            raise StepRefused(
                f"{where}: got {count} tokens at position {piece.start}, expected 1 or more within"
                f" the context of {limits.context_tokens}"
            )
        if piece.checks and (piece.sample is None or len(piece.checks) >= count):
            raise StepRefused(f"{where}: got {len(piece.checks)} checks of {count} tokens")
        if count == 1 and piece.tokens[0] == PENDING:
            if pending.get(piece.bank) != piece.start:
                raise StepRefused(
                    f"{where}: a pending token at position {piece.start}, expected one that the"
                    " step before drew on the device for this bank and position"
                )
            return
        for token in piece.tokens:
            if not 0 <= token < limits.vocabulary:
                raise StepRefused(
                    f"{where}: token: got {token}, expected below {limits.vocabulary}"
                )


class _History:
    """The pages of one history: `table` is [banks][pages_per_bank]."""

    def __init__(self, limits: StepLimits, window: int, pages: int, table: memoryview[int]) -> None:
        self._limits, self._window, self._pages = limits, window, pages
        self._table = table
        self._fill = array("i", bytes(4 * pages))
        # Logical pages [since, whole) of each bank are known to be mapped and full.
        self._since = [0] * limits.banks
        self._whole = [0] * limits.banks

    def page_at(self, bank: int, position: int) -> int:
        """The physical page of a position, -1 where none is mapped."""
        limits = self._limits
        return self._table[bank * limits.pages_per_bank + position // limits.page_tokens]

    def set_page(self, bank: int, index: int, page: int) -> None:
        if not -1 <= page < self._pages:
            raise StepRefused(f"page table: got page {page}, expected -1 to {self._pages - 1}")
        self._table[bank * self._limits.pages_per_bank + index] = page
        self._whole[bank] = min(self._whole[bank], index)

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        pages = self._pages
        fits = 0 <= source < pages and 0 <= target < pages and source != target
        held = self._fill[source] if fits else 0
        if not 1 <= tokens <= held or (self._limits.forward_only and tokens < held):
            most = "exactly" if self._limits.forward_only else "no more than"
            raise StepRefused(
                f"copy of page {source} to {target}: expected two pages below {pages} and {most}"
                f" the tokens that the first holds, got {tokens}"
            )
        self._set_fill(target, tokens)

    def check(self, slices: Sequence[Slice], run_ahead: set[int]) -> None:
        """`run_ahead`: banks that read a page as its last token left it, or not at all."""
        written: set[int] = set()
        for piece in slices:
            self._check_written(piece, written)
        for piece in slices:
            self._check_read(piece, written, piece.bank in run_ahead)
        for piece in slices:
            self._since[piece.bank] = self._first(piece)
            self._whole[piece.bank] = piece.start // self._limits.page_tokens

    def book(self, slices: Sequence[Slice]) -> None:
        page_tokens = self._limits.page_tokens
        for piece in slices:
            end = piece.start + len(piece.tokens)
            first = piece.bank * self._limits.pages_per_bank
            for i in range(piece.start // page_tokens, (end - 1) // page_tokens + 1):
                self._set_fill(self._table[first + i], min(page_tokens, end - i * page_tokens))

    def _set_fill(self, page: int, tokens: int) -> None:
        if self._fill[page] == self._limits.page_tokens:  # somebody may count on it
            self._whole = [0] * self._limits.banks
        self._fill[page] = tokens

    def _unknown(self, piece: Slice) -> int:
        """The first page of a slice that has to be looked at, unless what was known changes."""
        first = self._first(piece)
        known = self._whole[piece.bank] if first >= self._since[piece.bank] else 0
        return max(first, min(known, piece.start // self._limits.page_tokens))

    def _first(self, piece: Slice) -> int:
        """The first page that a slice reads or writes."""
        before = piece.start + 1 - self._window
        return before // self._limits.page_tokens if self._window and before > 0 else 0

    def _check_written(self, piece: Slice, written: set[int]) -> None:
        """Every page up to the slice's end is mapped; none is written twice in a step."""
        limits, bank = self._limits, piece.bank
        whole = piece.start // limits.page_tokens
        last = (piece.start + len(piece.tokens) - 1) // limits.page_tokens
        for i in range(self._unknown(piece), last + 1):
            page = self._table[bank * limits.pages_per_bank + i]
            if page < 0:
                raise StepRefused(f"bank {bank}: logical page {i} is not mapped")
            if i < whole:
                continue
            if page in written:
                raise StepRefused(
                    f"bank {bank}: logical page {i}: physical page {page} is written twice in this"
                    " step"
                )
            written.add(page)

    def _check_read(self, piece: Slice, written: set[int], run_ahead: bool) -> None:
        """What the slice reads was written, and nobody else writes it now."""
        limits, bank = self._limits, piece.bank
        whole, rest = divmod(piece.start, limits.page_tokens)
        # A page that is not full yet is none of those known to be.
        unknown = self._unknown(piece)
        if any(self._fill[page] == limits.page_tokens for page in written):
            unknown = self._first(piece)
        for i in range(unknown, whole + (rest > 0)):
            page = self._table[bank * limits.pages_per_bank + i]
            needed = limits.page_tokens if i < whole else rest
            held = self._fill[page]
            if held < needed or (run_ahead and held > needed):
                raise StepRefused(
                    f"bank {bank} at position {piece.start}: logical page {i} (physical {page})"
                    f" holds {held} tokens, expected {needed}"
                )
            if i < whole and page in written:
                raise StepRefused(
                    f"bank {bank}: logical page {i}: physical page {page} is read and written in"
                    " this step"
                )
