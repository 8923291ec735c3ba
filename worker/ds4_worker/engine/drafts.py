"""Drafts for the sequences of a step: found in each one's own tokens, judged, given out.

Owns: the history of every sequence that decodes, what became of earlier drafts, and how many to
offer. A draft that is not offered is compared with what is drawn all the same, so acceptance is
known without paying for it. Whether a draft may be used, `Draws` and the scheduler decide.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ds4_worker.engine.api import Generation, Speculate
from ds4_worker.engine.history import History
from ds4_worker.engine.speculation import Acceptance, StepCosts, allocate

_LEAD = 16  # tokens of the prompt's end before a prediction, for it to be found there
_LEAST_SURVIVAL = 0.1  # a draft that comes true less often is worth no row of any step
_AUTO_DRAFTS = 15  # at most; where a row costs a tenth of a step, more would hardly ever pay


class Drafter:
    """What is drafted for one sequence."""

    __slots__ = ("_acceptance", "_history", "_matched", "_most", "draft")

    def __init__(
        self,
        prompt: Sequence[int],
        room: int,
        most: int,
        acceptance: Acceptance,
        prediction: Sequence[int] = (),
    ) -> None:
        """`room`: most tokens that will follow the prompt. A `prediction` is entered before it, as
        if it had followed the prompt once."""
        before = (*prompt[-_LEAD:], *prediction) if prediction else ()
        self._history = History(len(before) + len(prompt) + room, most)
        self._history.propose(before, 0)
        self._history.propose(prompt, 0)
        self._acceptance = Acceptance(acceptance, memory=32, weight=4.0)
        self._most = most
        self._matched = 0
        self.draft: list[int] = []

    def follow(self, new: Sequence[int]) -> None:
        """Takes the tokens drawn since the last time, and drafts what may come next."""
        for place, (guess, token) in enumerate(zip(self.draft, new, strict=False)):
            self._acceptance.add(self._matched + place, guess == token)
            if guess != token:
                break
        self.draft, self._matched = self._history.propose(new, self._most)

    def confidences(self, count: int, least: float = 0.0) -> array[float]:
        """Of the first `count` tokens of the draft, as far as they survive as often as `least`."""
        return self._acceptance.confidences(self._matched, count, least)


class Drafts:
    """Decides for all sequences of a step."""

    def __init__(self, speculate: Speculate, most_rows: int) -> None:
        self.on = speculate != "off"
        self._costs = StepCosts(most_rows) if speculate == "auto" else None
        self._most = speculate if isinstance(speculate, int) else _AUTO_DRAFTS
        self._acceptance = Acceptance(None, memory=512, weight=16.0)

    @property
    def timing(self) -> bool:
        """Whether steps have to be timed."""
        return self._costs is not None

    def drafter(self, generation: Generation) -> Drafter:
        return Drafter(
            generation.prompt,
            generation.max_tokens,
            self._most,
            self._acceptance,
            generation.prediction,
        )

    def share(self, lanes: Sequence[tuple[Drafter, int]], packed: int) -> list[int]:
        """Drafts to offer for each lane: (its drafter, how many of its draft may be used), so that
        the step has at most `packed` rows."""
        costs = self._costs
        least = 0.0 if costs is None else _LEAST_SURVIVAL
        confidences = [drafter.confidences(possible, least) for drafter, possible in lanes]
        ceilings = [len(found) + 1 for found in confidences]
        if sum(ceilings) == len(lanes):
            return [0] * len(lanes)
        if costs is not None:
            packed = costs.best(confidences, ceilings, packed)
            if packed == len(lanes):
                costs.declined()
        return [rows - 1 for rows in allocate(confidences, ceilings, packed)]

    def timed(self, lanes: int, rows: int, seconds: float) -> None:
        """A step that decoded `lanes` sequences in `rows` rows, and nothing else, took so long."""
        if self._costs is not None:
            self._costs.add(rows, seconds, plain=rows == lanes)
