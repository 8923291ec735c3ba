"""The engine boundary: all that HTTP and the terminal may say to the engine and get back.

Owns: plain data and the Protocols around it. A `Generation` is one sequence to produce: token ids
in, `Output` events out, closed by exactly one `Finished` or `Failed`. Nothing here names a tensor,
a socket or a template. Times are nanoseconds on the monotonic clock, relative to `ORIGIN_NS`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from ds4_worker.engine.stats import EngineStats
from ds4_worker.executor.api import MOST_DRAFTS as MOST_DRAFTS

ORIGIN_NS = time.monotonic_ns()
SEED_MASK = (1 << 64) - 1

FinishReason = Literal["stop", "length"]
EngineState = Literal["ok", "failed"]
# How many tokens are drafted per sequence and step: "auto" as many as pay; "off" none; n as many as
# the sequence's own past suggests, up to n.
Speculate: TypeAlias = Literal["auto", "off"] | int


def now_ns() -> int:
    """Monotonic nanoseconds since this process imported the engine."""
    return time.monotonic_ns() - ORIGIN_NS


class Matcher(Protocol):
    """A grammar's place in one sequence. Used by the engine thread only."""

    def mask(self) -> int:
        """Address of a bitmask over the vocabulary: what may come next (1 = allowed, token t is bit
        t % 32 of word t // 32). Valid until the next call. Raises GrammarFailure."""

    def allows(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` may come next, one after the other. The place stays."""

    def ahead(self, tokens: Sequence[int]) -> list[int]:
        """Addresses of what may come after each of `tokens`, as `mask` has it, up to the first that
        may not come, or after which nothing may. The place stays. Valid until the next call."""

    def accept(self, token: int) -> bool:
        """Takes the next token, EOS included; True when nothing but the end may follow. Raises
        GrammarFailure for a token that the mask did not allow."""


class Grammar(Protocol):
    """A compiled grammar, shared by any number of sequences. Safe to use from several threads."""

    def matcher(self) -> Matcher:
        """A new place at the grammar's start."""


class ReasoningSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Where reasoning begins and ends in the output, in token ids, and what holds inside."""

    close: tuple[int, ...]  # the first occurrence ends it
    open: tuple[int, ...] = ()  # what begins it; unused when `opened`
    opened: bool = False  # the prompt ends inside the reasoning
    budget: int | None = None  # most tokens of it: then `close` is forced, id by id
    ignore_eos: bool = False  # end-of-sequence ids cannot be drawn inside


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. The HTTP side has validated every field against the model."""

    prompt: Sequence[int]  # at least one id, fewer than the context holds
    # Prompt + max_tokens fit the context. 0: the prompt is only computed (and scored).
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # the draw of token i is a function of (seed, i) and the logits alone
    logprobs: int = -1  # -1: none; n: of the chosen token and the n best
    stop_strings: tuple[str, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    eos_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False  # `eos_ids` cannot be drawn at all
    repetition_penalty: float = 1.0  # on every token of the prompt or the output so far
    frequency_penalty: float = 0.0  # per occurrence in the output so far
    presence_penalty: float = 0.0  # once for every token of the output so far
    logit_bias: tuple[tuple[int, float], ...] = ()  # distinct ids; -100 bans
    # What the client expects to come. Drafts are taken from it; nothing else depends on it.
    prediction: Sequence[int] = ()
    grammar: Grammar | None = None  # decides what may be drawn, and when the sequence is complete
    reasoning: ReasoningSpan | None = None
    reuse_prefix: bool = True  # False: every position of the prompt is computed
    pieces: bool = False  # a parser reads this sequence: `Output.pieces` is wanted
    prompt_logprobs: int = -1  # like `logprobs`, of the prompt's tokens from the second on


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural logarithms under the model's own distribution (temperature 1)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # best first


class Output(msgspec.Struct, frozen=True):
    """What one or more steps gave: raw ids at once, text and log-probabilities once settled.

    `tokens` holds every sampled id, those of EOS and of matched stops too. `text` never holds half
    a character nor any part of a stop. `logprobs` belong to tokens that are presented. `pieces` say
    which token completed which part of `text`, where the generation asks for it; a token of -1
    stands for text that only the end of the sequence could settle. An output without tokens only
    brings `prompt_logprobs`, some of them.
    """

    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    stamp_ns: int = 0  # when the step that sampled `tokens` had completed
    reused_prompt_tokens: int = 0  # of the prompt, from the prefix cache; the same in every event
    pieces: list[tuple[int, str]] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class Finished(msgspec.Struct, frozen=True):
    reason: FinishReason
    completion_tokens: int
    # What matched: a stop string, an EOS or stop token id; None at a limit or a grammar's end.
    stop: str | int | None = None
    reused_prompt_tokens: int = 0
    drafted_tokens: int = 0  # guesses that were computed along with the sequence
    accepted_tokens: int = 0  # of these, that came true


class Failed(msgspec.Struct, frozen=True):
    """The terminal event of a sequence that could not be completed; `status` is an HTTP status."""

    status: int
    message: str
    code: str


Event = Output | Finished | Failed


class Detokenizer(Protocol):
    """Streaming decoder of one sequence: complete characters out, the rest kept back."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Stream(Protocol):
    """The events of the generations of one request."""

    async def take(self) -> list[tuple[int, Event]]:
        """Everything that has arrived, in order, with the index of its generation; waits until
        that is at least one event."""

    def close(self) -> None:
        """Gives up: unfinished sequences are cancelled before the next step."""


class EngineHandle(Protocol):
    """What the HTTP side holds."""

    @property
    def state(self) -> EngineState: ...

    @property
    def stats(self) -> EngineStats: ...

    def submit(self, generations: Sequence[Generation]) -> Stream:
        """Queues sequences. Never blocks, never refuses: admission is the caller's."""
