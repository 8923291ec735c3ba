"""Which drafts are worth their rows: acceptance as it was, step times as they were, and the choice.

Owns: the arithmetic of speculation, without sequences or executors. Whatever is chosen changes how
fast tokens come and never which: the choice may rest on measured times.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

from ds4_worker.engine.history import MOST_MATCH

# Lengths of the match behind a draft at which the next band begins, and how often a draft of each
# band is right before anything is known. The first band begins at the least match there is.
_BOUNDS = (3, 4, 6, 10, 18, 34)
_PRIOR = (0.2, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92)
_BAND = tuple(sum(length >= bound for bound in _BOUNDS) for length in range(2 * MOST_MATCH))

_LEAST_GAIN = 1.02  # below it the estimates decide, not the drafts


class Acceptance:
    """How often drafts came true, by the length of the match behind them. What is older counts
    less. `prior`: what to believe while little is known."""

    __slots__ = ("_hits", "_memory", "_prior", "_seen", "_weight")

    def __init__(self, prior: Acceptance | None, memory: int, weight: float) -> None:
        self._prior = prior
        self._memory = memory
        self._weight = weight  # of the prior, in observations
        self._seen = [0] * len(_PRIOR)
        self._hits = [0] * len(_PRIOR)

    def add(self, matched: int, hit: bool) -> None:
        """A draft after `matched` tokens that had occurred before."""
        band = _BAND[min(matched, len(_BAND) - 1)]
        self._seen[band] += 1
        self._hits[band] += hit
        if self._seen[band] >= self._memory:
            self._seen[band] //= 2
            self._hits[band] //= 2
        if self._prior is not None:
            self._prior.add(matched, hit)

    def rate(self, band: int) -> float:
        prior = _PRIOR[band] if self._prior is None else self._prior.rate(band)
        weight = self._weight
        return (self._hits[band] + weight * prior) / (self._seen[band] + weight)

    def confidences(self, matched: int, count: int, least: float = 0.0) -> array[float]:
        """Of each of `count` drafts, were those before it right; in single precision. Ends before
        the draft that survives less often than `least`."""
        known, rate, survival = -1, 0.0, 1.0
        found = array("f")
        for length in range(matched, matched + count):
            band = _BAND[min(length, len(_BAND) - 1)]
            if band != known:
                known, rate = band, self.rate(band)
            survival *= rate
            if survival < least:
                break
            found.append(rate)
        return found


def extensions(
    confidences: Sequence[Sequence[float]], ceilings: Sequence[int]
) -> Iterator[tuple[int, float]]:
    """The drafts of all lanes, the likeliest to be used first: (lane, survival). A lane of ceiling
    c takes c - 1. Equal ones: first the lane that has fewer, then the lower one. Survivals never
    rise, because a draft survives only with those before it."""
    heap: list[tuple[float, int, int]] = []

    def offer(survival: float, prefix: int, lane: int) -> None:
        if prefix < min(ceilings[lane] - 1, len(confidences[lane])):
            heapq.heappush(heap, (-survival * confidences[lane][prefix], prefix, lane))

    for lane in range(len(ceilings)):
        offer(1.0, 0, lane)
    while heap:
        negative, prefix, lane = heapq.heappop(heap)
        yield lane, -negative
        offer(-negative, prefix + 1, lane)


def allocate(
    confidences: Sequence[Sequence[float]], ceilings: Sequence[int], packed: int
) -> list[int]:
    """Rows of each lane: one, and the likeliest drafts of all lanes up to `packed` rows."""
    rows = [1] * len(ceilings)
    for lane, _ in extensions(confidences, ceilings):
        if sum(rows) >= packed:
            break
        rows[lane] += 1
    return rows


class StepCosts:
    """What a step of n rows takes, as a share of what it takes now with one: learned from steps
    that decode only. A line, bent where measurements bend it; the level moves with the context and
    with whatever else the machine does, so the shape is told apart from it."""

    PRIOR_SLOPE = 0.12  # of one row more, in steps of one row: reading weights is most of a step
    _DECLINED = 64  # steps whose drafts did not seem to pay: then some of what was learned
    _FORGET = 1 / 8  # is forgotten, for it may be outdated
    _STALE = 16  # steps with drafts, after which the level is not that of the last one without
    _PROBE = 128  # so many, and one is done without: else price and level could not be told apart

    def __init__(self, most_rows: int) -> None:
        self._level = 0.0  # seconds; 0: nothing measured
        self._slope = self.PRIOR_SLOPE
        self._bend = [1.0] * (most_rows + 1)
        self._declined = 0
        self._since_plain = 0

    def relative(self, rows: int) -> float:
        return (1.0 + self._slope * (rows - 1)) * self._bend[min(rows, len(self._bend) - 1)]

    def add(self, rows: int, seconds: float, *, plain: bool) -> None:
        """A step of `rows` took so long. `plain`: without any draft."""
        if not self._level:
            self._level = seconds / self.relative(rows)
            return
        ratio = min(max(seconds / (self._level * self.relative(rows)), 0.5), 2.0)
        if plain:
            self._level *= ratio ** (0.25 if self._since_plain < self._STALE else 0.6)
            self._since_plain = 0
            return
        self._since_plain += 1
        self._level *= ratio ** (0.02 if self._since_plain < self._STALE else 0.1)
        place = min(rows, len(self._bend) - 1)
        found = (ratio * self.relative(rows) / self._bend[place] - 1.0) / (rows - 1)
        self._slope += 0.1 * (min(max(found, 0.0), 2.0) - self._slope)
        self._bend[place] = min(max(self._bend[place] * ratio**0.15, 0.6), 1.7)

    def declined(self) -> None:
        """Drafts were there and did not seem to pay."""
        self._declined += 1
        if self._declined < self._DECLINED:
            return
        self._declined = 0
        self._slope += self._FORGET * (self.PRIOR_SLOPE - self._slope)
        for rows, bend in enumerate(self._bend):
            self._bend[rows] = bend + self._FORGET * (1.0 - bend)

    def best(
        self, confidences: Sequence[Sequence[float]], ceilings: Sequence[int], packed: int
    ) -> int:
        """Rows of the step, at most `packed`, at which most tokens per second are to be expected;
        as many as lanes where no draft pays."""
        lanes = rows = best = len(ceilings)
        if self._since_plain >= self._PROBE:
            return lanes
        tokens = float(lanes)
        most = tokens / self.relative(lanes) * _LEAST_GAIN
        for _, survival in extensions(confidences, ceilings):
            if rows >= packed:
                break
            rows += 1
            tokens += survival
            rate = tokens / self.relative(rows)
            if rate > most:
                best, most = rows, rate
        return best
