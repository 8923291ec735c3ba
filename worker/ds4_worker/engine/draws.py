"""What the sampler is told about one sequence: penalties, biases, grammar, forced tokens.

Owns: everything that decides a draw besides the logits, kept up token by token. The sampler gets
addresses of lists that live here, so a step copies nothing and walks no vocabulary. A draw depends
on prompt, parameters, seed and index alone: all state is a function of the tokens so far.
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from ds4_common.errors import GrammarFailure
from ds4_worker.engine.api import Generation, ReasoningSpan
from ds4_worker.executor.api import Adjustments, Sampling

BAN = -100.0  # a bias of this or less rules the token out

_BIAS = struct.Struct("<if")


class Draws:
    """The draws of one sequence, in order."""

    __slots__ = (
        "_ends", "_free", "_held", "_inside", "_matcher", "_plain", "_reasoning", "_seen", "_step",
        "constrained", "failure",
    )  # fmt: skip

    def __init__(self, generation: Generation) -> None:
        span, grammar = generation.reasoning, generation.grammar
        self.failure: str | None = None  # why the grammar broke down
        self.constrained = grammar is not None
        self._matcher = None if grammar is None else grammar.matcher()
        self._reasoning = None if span is None else ReasoningState(span)
        self._seen = SeenTokens(generation) if _has_penalties(generation) else None
        self._ends = generation.eos_ids
        self._held: list[array[int]] = []  # what the sampler reads of tokens that are drafts
        banned = generation.eos_ids if generation.ignore_eos else ()
        self._free = biases(generation.logit_bias, banned)
        self._inside = self._free  # while reasoning is open
        if span is not None and span.ignore_eos:
            self._inside = biases(generation.logit_bias, generation.eos_ids)
        adjust = None
        if self._seen is not None or self._free or self._inside:
            adjust = Adjustments(
                repetition=generation.repetition_penalty,
                frequency=generation.frequency_penalty,
                presence=generation.presence_penalty,
                drawn=None if self._seen is None else self._seen.drawn,
            )
        self._step = Sampling(
            temperature=generation.temperature,
            top_k=generation.top_k,
            top_p=generation.top_p,
            min_p=generation.min_p,
            seed=generation.seed,
            index=0,
            logprobs=generation.logprobs,
            adjust=adjust,
        )
        self._plain = adjust is None and span is None and grammar is None

    def next(self) -> Sampling:
        """How to draw the next token. The same object every time, changed."""
        if not self._plain:
            self._prepare(self._step, self._reasoning)
            if self._seen is not None and self._step.adjust is not None:
                self._step.adjust.seen, self._step.adjust.n_seen = self._seen.records()
            if self._matcher is not None:
                try:
                    mask_by(self._step, self._matcher.mask())
                except GrammarFailure as error:
                    self._step.mask, self.failure = 0, str(error)
        return self._step

    @property
    def foreseeable(self) -> bool:
        """Whether the draw after the next is known already, whatever the next one gives."""
        if self._matcher is not None:
            return False
        reasoning = self._reasoning
        if reasoning is None or reasoning.closed:
            return True
        return not reasoning.forces and self._inside is self._free

    def after_next(self) -> Sampling:
        """The draw after the next, where that is foreseeable. What is seen is what is known so far:
        the executor adds what it drew."""
        following = replace(self._step, index=self._step.index + 1)
        if self._seen is not None and following.adjust is not None:
            seen, n_seen = self._seen.records()
            following.adjust = replace(following.adjust, seen=seen, n_seen=n_seen)
        return following

    def possible(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft may be drawn one after the other and leave the sequence open,
        as far as that can be told."""
        count = len(draft)
        if not self._ends.isdisjoint(draft):
            count = next(i for i, token in enumerate(draft) if token in self._ends)
        if count and self._matcher is not None:
            return self._matcher.allows(draft[:count])
        return count

    def ahead(self, draft: Sequence[int]) -> list[Sampling]:
        """After `next`: how to draw after each token of a draft, were it drawn; for fewer of them
        when the grammar ends. Until the next call."""
        step = self._step
        if self._plain:
            return [replace(step, index=step.index + i) for i in range(1, len(draft) + 1)]
        masks = None if self._matcher is None else self._matcher.ahead(draft)
        draft = draft if masks is None else draft[: len(masks)]
        seen = None if self._seen is None else self._seen.copy()
        reasoning = None if self._reasoning is None else self._reasoning.copy()
        self._held, samplings = [], []
        for place, token in enumerate(draft):
            sampling = replace(step, index=step.index + place + 1)
            if step.adjust is not None:
                sampling.adjust = replace(step.adjust)
                if seen is not None:
                    seen.add(token)
                    self._held.append(seen.snapshot())
                    records = records_of(self._held[-1])
                    sampling.adjust.seen, sampling.adjust.n_seen = records
            if reasoning is not None:
                reasoning.push(token)
            self._prepare(sampling, reasoning)
            if masks is not None:
                mask_by(sampling, masks[place])
            samplings.append(sampling)
        return samplings

    def _prepare(self, step: Sampling, reasoning: ReasoningState | None) -> None:
        """What follows from the place of a token: all but its mask and the tokens seen."""
        adjust = step.adjust
        if reasoning is not None:
            step.forced = reasoning.forced
        if adjust is not None:
            table = self._inside if reasoning is not None and reasoning.inside else self._free
            adjust.biases, length = table.buffer_info()
            adjust.n_biases = length * table.itemsize // _BIAS.size

    def accept(self, token: int) -> bool:
        """Takes what was drawn; True when the grammar allows nothing more but the end."""
        self._step.index += 1
        if self._plain:
            return False
        if self._seen is not None:
            self._seen.add(token)
        if self._reasoning is not None:
            self._reasoning.push(token)
        if self._matcher is None or self.failure is not None:
            return False
        try:
            return self._matcher.accept(token)
        except GrammarFailure as error:
            self.failure = str(error)
            return False


def _has_penalties(generation: Generation) -> bool:
    return (
        generation.repetition_penalty != 1.0
        or generation.frequency_penalty != 0.0
        or generation.presence_penalty != 0.0
    )


def mask_by(step: Sampling, mask: int) -> None:
    """What the grammar allows is drawn from. A delimiter that must come waits where the grammar
    does not have it yet: in the middle of a character."""
    step.mask, token = mask, step.forced
    if token >= 0:
        word = ctypes.c_uint32.from_address(mask + token // 32 * 4).value
        if not word >> token % 32 & 1:
            step.forced = -1


def biases(pairs: Iterable[tuple[int, float]], banned: Iterable[int]) -> array[int]:
    """Records (int32 id, float32 bias) of the sampler. Each id once; a ban wins."""
    table = dict(pairs)
    table.update((token, BAN) for token in banned)
    records = array("i")
    for token, bias in table.items():
        records.frombytes(_BIAS.pack(token, -math.inf if bias <= BAN else bias))
    return records


def records_of(table: array[int]) -> tuple[int, int]:
    """Address and number of records of two integers, until the table changes."""
    address, length = table.buffer_info()
    return address, length // 2


class SeenTokens:
    """Records (int32 id, int32 occurrences in the output) of the tokens that penalties apply to.

    The repetition penalty also counts the prompt, as vLLM and Transformers have it; frequency and
    presence penalties count the output alone, as the OpenAI API has it."""

    __slots__ = ("_place", "_records", "drawn")

    def __init__(self, generation: Generation) -> None:
        self.drawn: list[int] = []  # the output, for an executor that counts by itself
        self._place: dict[int, int] = {}  # id to the index of its count
        self._records = array("i")
        if generation.repetition_penalty != 1.0:
            for token in dict.fromkeys(generation.prompt):
                self._append(token, 0)

    def add(self, token: int) -> None:
        self.drawn.append(token)
        place = self._place.get(token)
        if place is None:
            self._append(token, 1)
        else:
            self._records[place] += 1

    def records(self) -> tuple[int, int]:
        """Address and number of the records, until the next `add`."""
        return records_of(self._records)

    def snapshot(self) -> array[int]:
        """The records as they are now."""
        return self._records[:]

    def copy(self) -> SeenTokens:
        other = SeenTokens.__new__(SeenTokens)
        other._place, other._records, other.drawn = self._place.copy(), self.snapshot(), []
        return other

    def _append(self, token: int, occurrences: int) -> None:
        self._place[token] = len(self._records) + 1
        self._records.extend((token, occurrences))


class ReasoningState:
    """Whether a sequence is inside its reasoning, and what is forced when that gets too long.

    Delimiters count as token ids only. The first close ends the reasoning for good."""

    __slots__ = ("_closed", "_count", "_left", "_recent", "_span", "inside")

    def __init__(self, span: ReasoningSpan) -> None:
        self._span = span
        self._recent: tuple[int, ...] = ()
        self._closed = False
        self._count = 0
        self._left: tuple[int, ...] = ()  # of the delimiter that is being forced
        self.inside = span.opened
        self._check_budget()

    def copy(self) -> ReasoningState:
        other = ReasoningState.__new__(ReasoningState)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    @property
    def forced(self) -> int:
        """The id that must come next, or -1."""
        return self._left[0] if self._left else -1

    @property
    def closed(self) -> bool:
        """Whether it has ended for good."""
        return self._closed

    @property
    def forces(self) -> bool:
        """Whether it may come to force tokens."""
        return self._span.budget is not None

    def push(self, token: int) -> None:
        if self._closed:
            return
        delimiter = self._span.close if self.inside else self._span.open
        self._recent = (*self._recent, token)[-len(delimiter) :] if delimiter else ()
        if delimiter and self._recent == delimiter:
            self._closed, self.inside = self.inside, not self.inside
            self._recent = self._left = ()
            self._count = 0
        elif self._left:  # another token: the grammar made the delimiter wait
            self._left = self._left[1:] if token == self._left[0] else self._span.close
        elif self.inside:
            self._count += 1
        self._check_budget()

    def _check_budget(self) -> None:
        budget = self._span.budget
        if self.inside and not self._left and budget is not None and self._count >= budget:
            self._left = self._span.close
