"""Counters of the engine, written by its thread and read by `/metrics`.

Plain numbers: a reader may see a step half counted, which metrics tolerate. Labels and formats are
the reader's business, so the engine needs no metrics library.
"""

from __future__ import annotations

from bisect import bisect_left

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RATE_SECONDS = 4
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)


class Histogram:
    """Counts of observations in seconds; `counts[i]` is of those at most `bounds[i]`."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


class RecentRate:
    """Events per second over the last whole seconds, whoever asks and however often."""

    __slots__ = ("_counts", "_seconds", "_started")

    def __init__(self, window_seconds: int = RATE_SECONDS) -> None:
        self._counts = [0] * (window_seconds + 1)  # one slot per second, the current one among them
        self._seconds = [-1] * (window_seconds + 1)  # the second that each slot counts
        self._started: int | None = None

    def add(self, count: int, now_ns: int) -> None:
        second = now_ns // 1_000_000_000
        if self._started is None:
            self._started = second
        slot = second % len(self._counts)
        if self._seconds[slot] != second:
            self._seconds[slot], self._counts[slot] = second, 0
        self._counts[slot] += count

    def per_second(self, now_ns: int) -> float:
        """0 before the first whole second has passed."""
        second = now_ns // 1_000_000_000
        window = len(self._counts) - 1
        if self._started is None or second <= self._started:
            return 0.0
        first = max(second - window, self._started)
        pairs = zip(self._seconds, self._counts, strict=True)
        return sum(count for at, count in pairs if first <= at < second) / (second - first)


class EngineStats:
    """What the engine did since it started, and what it holds now."""

    def __init__(self) -> None:
        self.submitted = 0
        self.rejected = 0  # sequences that could never run
        self.finished = {"stop": 0, "length": 0, "cancelled": 0, "failed": 0}
        self.steps = 0
        self.steps_ahead = 0  # of these, sent off before the results of the one before
        self.rows_discarded = 0  # computed in these for sequences that ended in the one before
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.prompt_rate = RecentRate()
        self.generated_rate = RecentRate()
        self.running = 0
        self.waiting = 0
        self.banks = 0
        self.pages = 0
        self.pages_used = 0  # held by sequences
        self.pages_cached = 0  # held by nobody, kept for prompts that begin alike
        self.pages_evicted = 0
        self.kv_dtype = ""
        self.kv_bytes = 0  # of all pages
        self.kv_bytes_used = 0  # of those that sequences hold
        self.prefix_hits = 0  # sequences that reused at least one position
        self.prefix_misses = 0
        self.prompt_tokens_reused = 0  # not counted in prompt_tokens
        self.draft_tokens_offered = 0  # guesses of next tokens, computed along with the steps
        self.draft_tokens_accepted = 0  # of these, that came true
        # Steps that decode sequences with and without a grammar together.
        self.mixed_grammar_decode_steps = 0
        # Most steps in flight at once with a sequence that has a grammar: 1 since the first one.
        self.constrained_max_inflight = 0
        self.queue_seconds = Histogram(TTFT_BUCKETS)
        self.first_token_seconds = Histogram(TTFT_BUCKETS)
        self.between_tokens_seconds = Histogram(STEP_BUCKETS)
