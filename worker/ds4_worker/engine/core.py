"""One step after the other: scheduler and executor together, without threads.

Owns: the executor, the step that is under way, and the counters. The terminal programs drive it
directly; `thread.py` drives it for the server. An executor that runs beside its caller gets the
next step before the results of this one are waited for, wherever the scheduler can tell it without
them. Refuses results that do not answer the step (`ExecutorFailure`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ds4_worker.engine.api import (
    Detokenizer,
    Event,
    Failed,
    Finished,
    Generation,
    Output,
    Speculate,
    now_ns,
)
from ds4_worker.engine.ranges import Annotate, step_name
from ds4_worker.engine.scheduler import Limits, Scheduler
from ds4_worker.engine.sequence import Sequence
from ds4_worker.engine.stats import EngineStats
from ds4_worker.engine.step import Step, scored_targets
from ds4_worker.executor.api import Executor, FramedExecutor, Sampled


class EngineCore:
    """Runs generations on an executor; every call from one thread."""

    def __init__(
        self,
        executor: Executor,
        detokenizer: Callable[[], Detokenizer],
        *,
        prefill_chunk: int = 512,
        live_chunk: int = 128,
        reuse_prefixes: bool = True,
        speculate: Speculate = "off",
        annotate: Annotate | None = None,
        frames: int = 2,
    ) -> None:
        """`frames`: steps that may be under way at once, where the executor can."""
        config = executor.config
        self._executor = executor
        self._framed: FramedExecutor | None = None
        if isinstance(executor, FramedExecutor) and min(frames, executor.frames) > 1:
            self._framed = executor
        self._under_way: Step | None = None
        self.stats = self._fresh_stats()
        self._annotate = annotate  # None: nobody listens
        self._detokenizer = detokenizer
        self._queued: dict[Sequence, int] = {}  # until the first step
        self._arrived: dict[Sequence, int] = {}  # until the first token
        self._last_step_ns = 0
        self.scheduler = Scheduler(
            Limits(
                banks=config.banks,
                pages=executor.pages,
                page_tokens=executor.page_tokens,
                windows=executor.windows,
                prefill_chunk=min(prefill_chunk, config.batch_tokens),
                live_chunk=min(live_chunk, config.batch_tokens),
                batch_tokens=config.batch_tokens,
                batch_outputs=config.batch_outputs,
                reuse_prefixes=reuse_prefixes,
                rewinds=executor.rewinds,
                divisible=executor.divisible,
                speculate=speculate,
            )
        )

    def _fresh_stats(self) -> EngineStats:
        stats = EngineStats()
        executor = self._executor
        stats.banks, stats.pages = executor.config.banks, executor.pages
        stats.kv_dtype = executor.config.kv_dtype
        stats.kv_bytes = executor.pages * executor.page_bytes
        stats.kv_bytes += sum(window.pages * window.page_bytes for window in executor.windows)
        return stats

    def warm(self) -> None:
        """Runs one token through the model and forgets it: what it reads is mapped afterwards. Only
        before the first sequence. Raises ExecutorFailure."""
        self.submit(self.sequence(Generation(prompt=[0], max_tokens=1, temperature=0.0)))
        while self.step() is not None:
            pass
        self.scheduler.memory.cache.clear()
        self.stats = self._fresh_stats()

    def sequence(self, generation: Generation) -> Sequence:
        """A new sequence, not yet queued."""
        return Sequence(generation, self._detokenizer())

    def submit(self, sequence: Sequence) -> None:
        self.scheduler.submit(sequence)
        self.stats.submitted += 1
        self.stats.waiting += 1
        self._arrived[sequence] = self._queued[sequence] = now_ns()

    def cancel(self, sequence: Sequence) -> None:
        """Forgets a sequence; one that has ended already stays as it is."""
        if self.scheduler.cancel(sequence):
            self.stats.finished["cancelled"] += 1
            self._arrived.pop(sequence, None)
            self._queued.pop(sequence, None)
            self._count_load()

    def fail_all(self, failure: Failed) -> list[tuple[Sequence, Event]]:
        """Ends everything that waits or runs with one event each."""
        sequences = self.scheduler.clear()
        self.stats.finished["failed"] += len(sequences)
        self._arrived.clear()
        self._queued.clear()
        self._count_load()
        return [(sequence, failure) for sequence in sequences]

    def step(self) -> list[tuple[Sequence, Event]] | None:
        """Waits for one step, whose events it returns; None when there is nothing to run."""
        drafts, before = self.scheduler.drafts, self._last_step_ns
        began = now_ns() if drafts.timing else 0
        step, self._under_way = self._under_way or self._begin(self.scheduler.plan()), None
        if step is None:
            return None
        if self._framed is not None:
            self._under_way = self._begin(self.scheduler.follow(step))
            self.stats.steps_ahead += self._under_way is not None
        if self._annotate is None:
            results, scores = self._finish(step)
        else:
            with self._annotate(step_name(step)):
                results, scores = self._finish(step)
        stamp = now_ns()
        events = self.scheduler.complete(step, results, stamp, self._executor.vocabulary)
        events += self.scheduler.complete_scores(step, scores, stamp)
        self._count_step(step, events, stamp)
        if drafts.timing and step.decodes and not step.prompt_tokens:
            if step.followed:
                began = before  # it ran from the end of the one before it
            drafts.timed(step.decodes, step.decodes + step.drafts, (stamp - began) / 1e9)
        return events

    def _begin(self, step: Step | None) -> Step | None:
        """Prepares a step, and sends it off where the executor runs beside its caller."""
        if step is None:
            return None
        if step.prompt_tokens and self._queued:
            self._count_started(step)
        for copy in step.copies:
            self._executor.copy_page(*copy)
        for mapping in step.mappings:
            self._executor.set_page(*mapping)
        if self._framed is not None and step.slices:
            self._framed.submit(step.slices)
        return step

    def _finish(self, step: Step) -> tuple[list[Sampled | None], list[Sampled]]:
        executor, results = self._executor, []
        if step.slices:
            framed = self._framed
            results = framed.collect() if framed else executor.step(step.slices)
        if step.scored is None:
            return results, []
        sequence, piece = step.scored
        wanted = sequence.generation.prompt_logprobs
        return results, executor.score(piece, scored_targets(sequence, piece), wanted)

    def close(self) -> None:
        self._executor.close()

    def _count_started(self, step: Step) -> None:
        """How long the sequences that begin with this step have waited."""
        now = now_ns()
        for sequence in step.sequences:
            queued = self._queued.pop(sequence, None)
            if queued is not None:
                self.stats.queue_seconds.observe((now - queued) / 1e9)

    def _count_step(self, step: Step, events: list[tuple[Sequence, Event]], stamp_ns: int) -> None:
        stats = self.stats
        stats.steps += 1
        if step.prompt_tokens:
            stats.prompt_tokens += step.prompt_tokens
            stats.prompt_rate.add(step.prompt_tokens, stamp_ns)
        stats.draft_tokens_offered += step.drafts
        stats.draft_tokens_accepted += step.accepted
        stats.rows_discarded += step.discarded
        generated_before = stats.generated_tokens
        # Tokens of one sequence in one step share the time that it took.
        drawn = (sequence for sequence, event in events if isinstance(event, Output))
        share = Counter(drawn) if step.accepted else None
        if step.constrained:
            stats.constrained_max_inflight = 1
            stats.mixed_grammar_decode_steps += 0 < step.constrained_decodes < step.decodes
        ended = False
        for sequence, event in events:
            if isinstance(event, Finished):
                stats.finished[event.reason] += 1
                ended = True
                self._arrived.pop(sequence, None)  # it may have drawn nothing
                continue
            if isinstance(event, Failed):
                stats.finished["failed"] += 1
                ended = True
                self._arrived.pop(sequence, None)
                continue
            if not event.tokens:
                continue
            stats.generated_tokens += 1
            arrived = self._arrived.pop(sequence, None)
            if arrived is not None:
                stats.first_token_seconds.observe((stamp_ns - arrived) / 1e9)
                stats.prefix_hits += event.reused_prompt_tokens > 0
                stats.prefix_misses += event.reused_prompt_tokens == 0
                stats.prompt_tokens_reused += event.reused_prompt_tokens
            else:
                seconds = (stamp_ns - self._last_step_ns) / 1e9
                stats.between_tokens_seconds.observe(seconds / (share[sequence] if share else 1))
        stats.generated_rate.add(stats.generated_tokens - generated_before, stamp_ns)
        self._last_step_ns = stamp_ns
        if ended or step.mappings or step.prompt_tokens:  # in other steps nothing moves
            self._count_load()

    def _count_load(self) -> None:
        scheduler, stats = self.scheduler, self.stats
        stats.running, stats.waiting = len(scheduler.running), len(scheduler.waiting)
        memory = scheduler.memory
        stats.pages_used, stats.pages_cached = memory.held, memory.cache.unheld
        stats.pages_evicted = memory.cache.evicted
        executor = self._executor
        stats.kv_bytes_used = memory.held * executor.page_bytes
        for window, pages in zip(executor.windows, memory.windows, strict=True):
            stats.kv_bytes_used += pages.held * window.page_bytes
