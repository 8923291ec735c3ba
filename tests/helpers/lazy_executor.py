"""A fake executor that runs beside its caller, as late as it may: for tests of frames.

Everything it is told waits in a queue, in order; `collect` runs what is before the end of its step
and nothing more. So a result that is used too early, a page that is taken back too early or a token
that the host would have had to know shows every time. It refuses what an executor of frames
refuses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from msgspec.structs import replace

from ds4_worker.executor.api import PENDING, Sampled, Slice
from helpers.fake_executor import FakeExecutor

Results = list[Sampled | None]


class LazyExecutor(FakeExecutor):
    frames = 2

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._queue: deque[Callable[[], Results | None]] = deque()
        self._sent: deque[list[Slice]] = deque()  # steps under way
        self._draws: dict[int, int] = {}  # of the step sent last: bank to the drawn token's place
        self._drawn: dict[int, int] = {}  # of the step run last: bank to token
        self.most_under_way = 0

    def set_page(self, bank: int, index: int, page: int, history: int = 0) -> None:
        self._queue.append(lambda: super(LazyExecutor, self).set_page(bank, index, page, history))

    def copy_page(self, source: int, target: int, tokens: int, history: int = 0) -> None:
        call = super().copy_page
        self._queue.append(lambda: call(source, target, tokens, history))

    def submit(self, slices: Sequence[Slice]) -> None:
        assert len(self._sent) < self.frames
        sent = deepcopy(list(slices))
        for other in (*self._sent, sent) if self._sent else ():
            assert not any(piece.checks for piece in other)
        for piece in sent:
            change = None if piece.sample is None else (*piece.checks, piece.sample)[0].adjust
            if piece.sample is not None and change is not None and change.drawn is not None:
                # what was drawn by now, but for a token that is pending
                known = len(change.drawn) + (PENDING in piece.tokens)
                assert (*piece.checks, piece.sample)[0].index == known
            if PENDING in piece.tokens:
                assert list(piece.tokens) == [PENDING]
                assert self._draws[piece.bank] == piece.start
        self._draws = {
            piece.bank: piece.start + len(piece.tokens)
            for piece in sent
            if piece.sample is not None and not piece.checks
        }
        self._sent.append(sent)
        self.most_under_way = max(self.most_under_way, len(self._sent))
        self._queue.append(lambda: self._execute(sent))

    def _execute(self, slices: list[Slice]) -> Results:
        known = [
            replace(piece, tokens=[max(self._drawn[piece.bank], 0)])
            if PENDING in piece.tokens
            else piece
            for piece in slices
        ]
        results = super().step(known)
        self._drawn, place = {}, 0
        for piece in known:
            place += len(piece.checks) + 1
            last = results[place - 1]
            if last is not None:
                self._drawn[piece.bank] = last.token
        return results

    def collect(self) -> Results:
        assert self._sent, "nothing is under way"
        self._sent.popleft()
        while True:
            results = self._queue.popleft()()
            if results is not None:
                return results

    def step(self, slices: Sequence[Slice]) -> Results:
        assert not self._sent
        self.submit(slices)
        return self.collect()

    def score(self, piece: Slice, targets: Sequence[int], logprobs: int) -> list[Sampled]:
        assert not self._sent
        while self._queue:
            self._queue.popleft()()
        return super().score(piece, targets, logprobs)
