"""One generation from queue to end: what the scheduler keeps of it."""

from __future__ import annotations

from ds4_worker.engine.api import Detokenizer, Failed, Generation
from ds4_worker.engine.drafts import Drafter
from ds4_worker.engine.draws import Draws
from ds4_worker.engine.memory import Holding
from ds4_worker.engine.presenter import Presenter
from ds4_worker.executor.api import Sampled


class Sequence:
    __slots__ = (
        "bank", "consumed", "drafter", "draws", "followed", "generation", "holding", "last",
        "output", "presenter", "reached", "reused",
    )  # fmt: skip

    draws: Draws  # this and the next from admission on
    holding: Holding

    def __init__(self, generation: Generation, detokenizer: Detokenizer) -> None:
        self.generation = generation
        self.presenter = Presenter(generation, detokenizer)
        self.bank = -1
        self.consumed = 0  # positions already in the cache
        self.reached = 0  # positions up to the end of the last slice that was sent off
        self.reused = 0  # of these, positions that were found there
        self.last = -1  # the token that the next decode step consumes
        self.output: list[int] = []
        self.drafter: Drafter | None = None  # from the first decode step on, where there is any
        self.followed = 0  # tokens of the output that it knows

    @property
    def unscored(self) -> int:
        """Positions of the prompt that are still to be computed with log-probabilities: what each
        token but the last says of the next."""
        generation = self.generation
        if generation.prompt_logprobs < 0:
            return 0
        return max(len(generation.prompt) - 1 - self.consumed, 0)

    @property
    def ahead(self) -> bool:
        """Whether more than was booked lies in its pages: drafts that did not come true, or a step
        whose results nobody waited for."""
        return self.reached > self.consumed

    @property
    def prefilling(self) -> bool:
        return self.consumed < len(self.generation.prompt)

    def ids(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens of positions [start, stop)."""
        prompt, output = self.generation.prompt, self.output
        length = len(prompt)
        if stop <= length:
            return tuple(prompt[start:stop])
        return (*prompt[start:], *output[max(0, start - length) : stop - length])


def positions_of(sequence: Sequence) -> int:
    """Positions that a sequence can come to need."""
    # The last token sampled is never fed back, so it needs none.
    return len(sequence.generation.prompt) + max(sequence.generation.max_tokens, 1) - 1


def failure_of(sequence: Sequence, sampled: Sampled) -> Failed | None:
    """Why a sequence cannot go on."""
    if sampled.error is not None:
        return Failed(500, sampled.error, "sampling_failure")
    if sequence.draws.failure is not None:
        return Failed(500, sequence.draws.failure, "grammar_failure")
    return None
