"""What runs next: banks and the tokens of each step. Pure; runs in the engine thread.

Admission is first come, first served: a sequence enters when a bank is free and `Memory` can
promise its pages, and nobody overtakes the head of the queue. Each step decodes every sequence
that can decode; prompts get the rest: `prefill_chunk` tokens while nobody decodes, the smaller
`live_chunk` while somebody does, so running streams advance in every step. A prompt whose next page
a neighbour computes in the same step waits for that page instead of computing it too.

A sequence that decodes may bring drafts: guesses of its next tokens, computed in the same step.
Each is compared with what is drawn in its place, by the draw that plain decoding would have made
there; from the first wrong one on, what the step computed is dropped and computed again.

Where an executor runs beside the engine, a step may follow another before that one's results are
there (`follow`): its tokens are pending. What it computes for a sequence that ended meanwhile is
dropped. It changes when a token is computed and never which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several

import msgspec

from ds4_common.errors import ExecutorFailure
from ds4_worker.engine.api import Event, Failed, Output, Speculate, TokenLogprob
from ds4_worker.engine.drafts import Drafts
from ds4_worker.engine.draws import Draws
from ds4_worker.engine.memory import Memory
from ds4_worker.engine.pages import pages_for
from ds4_worker.engine.prefix import Node
from ds4_worker.engine.sequence import Sequence, failure_of, positions_of
from ds4_worker.engine.step import Step, check_results, draws_of, scored_targets
from ds4_worker.executor.api import PENDING, Sampled, Slice, WindowPages


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Capacities of the executor and the shape of a step, in tokens."""

    banks: int
    pages: int
    page_tokens: int
    windows: tuple[WindowPages, ...] = ()
    prefill_chunk: int = 512
    live_chunk: int = 128
    batch_tokens: int = 512
    batch_outputs: int = 64  # draws, or tokens of a prompt that is scored, in one step
    reuse_prefixes: bool = True
    rewinds: bool = True  # of the executor, and the next
    divisible: bool = True
    speculate: Speculate = "off"


class Scheduler:
    """Owns every sequence that is waiting or running."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.memory = Memory(
            limits.pages,
            limits.page_tokens,
            reuse=limits.reuse_prefixes,
            divisible=limits.divisible,
            windows=limits.windows,
        )
        self.drafts = Drafts(limits.speculate if limits.rewinds else "off", limits.batch_outputs)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._free_banks = list(range(limits.banks - 1, -1, -1))
        self._short: Sequence | None = None  # found too few pages since the last sequence ended

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises ValueError if it could never run."""
        need = pages_for(positions_of(sequence), self._limits.page_tokens)
        if need > self._limits.pages:
            raise ValueError(f"sequence needs {need} KV pages, the pool has {self._limits.pages}")
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> bool:
        """Forgets a sequence at once; its bank and pages are free for the next step. False when it
        had ended already."""
        if sequence.bank >= 0:
            self._retire(sequence, keep=False)
            return True
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return True
        return False

    def clear(self) -> list[Sequence]:
        """Cancels everything; the sequences that were waiting or running."""
        everything = [*self.running, *self.waiting]
        for sequence in everything:
            self.cancel(sequence)
        return everything

    def plan(self) -> Step | None:
        """The next step, or None when there is nothing to do."""
        self._admit()
        step = Step([], [], [], [])
        decoding = [sequence for sequence in self.running if not sequence.prefilling]
        for sequence, draft in zip(decoding, self._draft(decoding), strict=True):
            self._add_decode(step, sequence, draft)
        step.decodes = len(decoding)
        if step.decodes < len(self.running):
            chunk = self._limits.live_chunk if step.decodes else self._limits.prefill_chunk
            free = self._limits.batch_tokens - step.decodes - step.drafts
            self._add_prompts(step, min(free, chunk))
        return step if step.slices or step.scored else None

    def follow(self, step: Step) -> Step | None:
        """What runs right behind a step whose results are not there yet; None when the next step
        needs them: a prompt is not done or may enter, or a sequence does not go on by itself."""
        if step.scored is not None or not all(map(_draws_one, step.slices)):
            return None
        pairs = zip(step.slices, step.sequences, strict=True)
        lanes = [(piece, sequence) for piece, sequence in pairs if sequence.bank >= 0]
        if len(lanes) < len(self.running) or self._may_admit():
            return None
        lanes = [lane for lane in lanes if _tokens_left(lane[1]) > 1]
        if self.waiting and len(lanes) < len(self.running):  # for the bank that will be free
            return None
        if not all(self._goes_on(piece, sequence) for piece, sequence in lanes):
            return None
        if any(self._draft([sequence for _, sequence in lanes])):  # the next ones may be known
            return None
        following = Step([], [], [], [], decodes=len(lanes), followed=True)
        for piece, sequence in lanes:
            start, sampling = _end(piece), sequence.draws.after_next()
            self._map(following, sequence, start + 1)
            self._append(following, sequence, Slice(sequence.bank, start, (PENDING,), sampling))
        return following if following.slices else None

    def _may_admit(self) -> bool:
        """Whether the head of the queue has not been turned away yet."""
        return bool(self.waiting and self._free_banks) and self.waiting[0] is not self._short

    def _goes_on(self, piece: Slice, sequence: Sequence) -> bool:
        """Whether the token after this slice's own can be drawn before anybody has seen that. Stops
        of the request are decided before another token is asked for."""
        wanted = sequence.generation
        if wanted.stop_strings or wanted.stop_token_sequences or not sequence.draws.foreseeable:
            return False
        return self.memory.fits(sequence.holding, sequence.consumed, _end(piece) + 1)

    def _draft(self, decoding: Several[Sequence]) -> list[list[int]]:
        """The drafts of each sequence that decodes."""
        if not self.drafts.on or not decoding:
            return [[] for _ in decoding]
        limits, lanes = self._limits, []
        for sequence in decoding:
            drafter = sequence.drafter
            if drafter is None:
                drafter = sequence.drafter = self.drafts.drafter(sequence.generation)
            drafter.follow(sequence.output[sequence.followed :])
            sequence.followed = len(sequence.output)
            # The last token of all needs no draft after it, and no position.
            left = _tokens_left(sequence) - 1
            lanes.append((drafter, sequence.draws.possible(drafter.draft[:left])))
        prompts = len(self.running) - len(decoding)  # each may draw its first token
        packed = min(
            limits.batch_outputs - prompts,
            limits.batch_tokens - (limits.live_chunk if prompts else 0),
        )
        shares = self.drafts.share(lanes, max(packed, len(decoding)))
        return [drafter.draft[:n] for (drafter, _), n in zip(lanes, shares, strict=True)]

    def complete(
        self, step: Step, results: list[Sampled | None], stamp_ns: int, vocabulary: int
    ) -> list[tuple[Sequence, Event]]:
        """Books the results of a step; the events it gives rise to, in order.

        Raises ExecutorFailure when the results do not answer the step: then nothing is trusted.
        """
        check_results(step, results, vocabulary)
        events: list[tuple[Sequence, Event]] = []
        for piece, sequence, drawn in draws_of(step, results):
            if sequence.bank < 0:  # it ended while this was computed
                step.discarded += 1
                continue
            sequence.consumed += len(piece.tokens) - len(piece.drafts)
            if drawn:
                accepted = self._take(sequence, drawn, piece.drafts, stamp_ns, events)
                sequence.presenter.drafted += len(piece.drafts)
                sequence.presenter.accepted += accepted
                step.accepted += accepted
            elif not sequence.prefilling:  # the prompt was all that was asked for
                sequence.presenter.finished = "length"
            if sequence.bank < 0:  # it failed
                continue
            if sequence.consumed >= sequence.holding.full_at:
                self.memory.publish(sequence.holding, sequence.ids, sequence.consumed)
            if sequence.presenter.finished is not None:
                self._end(sequence, events)
        return events

    def _take(
        self,
        sequence: Sequence,
        drawn: Several[Sampled],
        drafts: Several[int],
        stamp_ns: int,
        events: list[tuple[Sequence, Event]],
    ) -> int:
        """Books draws up to the first whose place had a wrong draft, or none; how many had a right
        one. Each right draft is a position that has been computed."""
        presenter = sequence.presenter
        presenter.reused = sequence.reused
        for place, sampled in enumerate(drawn):
            complete = sampled.error is None and sequence.draws.accept(sampled.token)
            failure = failure_of(sequence, sampled)
            if failure is not None:
                events.append((sequence, failure))
                self._retire(sequence, keep=False)
                return place
            sequence.last = sampled.token
            sequence.output.append(sampled.token)
            events.append((sequence, presenter.push(sampled, stamp_ns, complete)))
            if presenter.finished is not None or place == len(drafts):
                break
            if sampled.token != drafts[place]:
                break
            sequence.consumed += 1
        return place

    def complete_scores(
        self, step: Step, scores: list[Sampled], stamp_ns: int
    ) -> list[tuple[Sequence, Event]]:
        """Books the log-probabilities of the step's piece of prompt. Raises ExecutorFailure when
        they do not answer it."""
        if step.scored is None:
            return []
        sequence, piece = step.scored
        targets = scored_targets(sequence, piece)
        failed = next((score.error for score in scores if score.error is not None), None)
        if failed is not None:
            self._retire(sequence, keep=False)
            return [(sequence, Failed(500, failed, "sampling_failure"))]
        if [score.token for score in scores] != targets:
            raise ExecutorFailure(f"executor: bank {piece.bank}: scores of other tokens than asked")
        sequence.consumed += len(piece.tokens)
        if sequence.consumed >= sequence.holding.full_at:
            self.memory.publish(sequence.holding, sequence.ids, sequence.consumed)
        found = [
            TokenLogprob(score.token, score.logprob or 0.0, score.top or []) for score in scores
        ]
        return [(sequence, Output([], "", None, stamp_ns, prompt_logprobs=found))]

    def _end(self, sequence: Sequence, events: list[tuple[Sequence, Event]]) -> None:
        sequence.presenter.reused = sequence.reused
        events.append((sequence, sequence.presenter.end()))
        self._retire(sequence, keep=not sequence.presenter.cut)

    def _admit(self) -> None:
        while self.waiting and self._free_banks:
            sequence = self.waiting[0]
            if sequence is self._short:
                return
            generation = sequence.generation
            holding = self.memory.admit(
                generation.prompt, positions_of(sequence), reuse=generation.reuse_prefix
            )
            if holding is None:
                self._short = sequence
                return
            self.waiting.popleft()
            sequence.holding = holding
            sequence.consumed = sequence.reused = holding.shared * self._limits.page_tokens
            sequence.draws = Draws(generation)
            sequence.bank = self._free_banks.pop()
            self.running.append(sequence)

    def _add_prompts(self, step: Step, budget: int) -> None:
        computing: set[tuple[Node, tuple[int, ...]]] = set()  # pages that this step completes
        for sequence in self.running:
            if budget <= 0:
                return
            if not sequence.prefilling or not self._find_prefix(step, sequence, computing):
                continue
            prompt, holding = sequence.generation.prompt, sequence.holding
            if sequence.unscored:
                if step.scored is None:
                    budget -= self._add_scored(step, sequence, budget)
                continue
            tokens = list(prompt[sequence.consumed : sequence.consumed + budget])
            end = sequence.consumed + len(tokens)
            page = self.memory.next_page(holding, prompt)
            if page is not None and end >= holding.full_at:
                computing.add((holding.node, page))
            draw = end == len(prompt) and sequence.generation.max_tokens > 0
            self._add(step, sequence, tokens, draw=draw)
            budget -= len(tokens)
            step.prompt_tokens += len(tokens)

    def _add_scored(self, step: Step, sequence: Sequence, budget: int) -> int:
        """Adds the next piece of a prompt that is scored; its tokens."""
        count = min(budget, self._limits.batch_outputs, sequence.unscored)
        start = sequence.consumed
        self._map(step, sequence, start + count)
        tokens = list(sequence.generation.prompt[start : start + count])
        step.scored = (sequence, Slice(sequence.bank, start, tokens))
        sequence.reached = start + count
        step.prompt_tokens += count
        return count

    def _find_prefix(
        self, step: Step, sequence: Sequence, computing: set[tuple[Node, tuple[int, ...]]]
    ) -> bool:
        """Skips the positions that the cache holds. False when a neighbour completes the next page
        in this step: it is there after it."""
        prompt, holding = sequence.generation.prompt, sequence.holding
        aligned = sequence.consumed == holding.full_at - self._limits.page_tokens
        if not aligned or not sequence.generation.reuse_prefix:
            return True
        start = sequence.consumed
        self.memory.adopt(holding, prompt)
        sequence.consumed = holding.shared * self._limits.page_tokens
        page = self.memory.next_page(holding, prompt)
        waits = page is not None and (holding.node, page) in computing
        if not waits:
            tokens, copies = self.memory.branch(holding, prompt)
            step.copies += copies
            sequence.consumed += tokens
        sequence.reused += sequence.consumed - start
        return not waits

    def _add(self, step: Step, sequence: Sequence, tokens: list[int], draw: bool) -> None:
        self._map(step, sequence, sequence.consumed + len(tokens))
        sampling = None
        if draw:
            sampling = sequence.draws.next()
            if sequence.draws.constrained:
                step.constrained = True
        self._append(step, sequence, Slice(sequence.bank, sequence.consumed, tokens, sampling))

    def _append(self, step: Step, sequence: Sequence, piece: Slice) -> None:
        step.slices.append(piece)
        step.sequences.append(sequence)
        sequence.reached = _end(piece)

    def _add_decode(self, step: Step, sequence: Sequence, draft: list[int]) -> None:
        """Adds the next token of a sequence, and what may follow it."""
        draws = sequence.draws
        samples = [draws.next()]
        if draft:
            samples += draws.ahead(draft)
        tokens = [sequence.last, *draft[: len(samples) - 1]]
        self._map(step, sequence, sequence.consumed + len(tokens))
        piece = Slice(sequence.bank, sequence.consumed, tokens, samples[-1], samples[:-1])
        self._append(step, sequence, piece)
        step.drafts += len(tokens) - 1
        if draws.constrained:
            step.constrained_decodes += 1
            step.constrained = True

    def _map(self, step: Step, sequence: Sequence, end: int) -> None:
        """Has pages for all positions before `end`."""
        holding = sequence.holding
        if end > len(holding.pages) * self._limits.page_tokens:
            self.memory.extend(holding, sequence.consumed, end)
        while holding.mapped < len(holding.pages):
            index = holding.mapped
            step.mappings.append((sequence.bank, index, holding.pages[index], 0))
            holding.mapped = index + 1
        for history, span in enumerate(holding.spans, start=1):
            for index in range(max(span.mapped, span.first), span.end):
                page = span.pages[index - span.first]
                step.mappings.append((sequence.bank, index, page, history))
            span.mapped = span.end

    def _retire(self, sequence: Sequence, *, keep: bool) -> None:
        """`keep`: the last page's beginning is worth keeping, too."""
        start = sequence.holding.full_at - self._limits.page_tokens
        keep = keep and (self._limits.divisible or not sequence.ahead)
        tail = sequence.ids(start, sequence.consumed) if keep else ()
        self.memory.end(sequence.holding, tail)
        self._short = None
        self.running.remove(sequence)
        sequence.drafter = None
        self._free_banks.append(sequence.bank)
        sequence.bank = -1


def _end(piece: Slice) -> int:
    return piece.start + len(piece.tokens)


def _draws_one(piece: Slice) -> bool:
    """Whether a slice gives exactly one token."""
    return piece.sample is not None and not piece.checks


def _tokens_left(sequence: Sequence) -> int:
    """Tokens that may still be drawn, beyond those that came."""
    return sequence.generation.max_tokens - len(sequence.output)
