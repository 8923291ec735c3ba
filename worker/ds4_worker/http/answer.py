"""What a request is answered with, in one form for every API, and the Protocol of a renderer.

Owns: the seam between running a request (`generate.py`) and writing its answer down. A renderer
lives as long as one request. It is told, choice by choice, what the model said; it gives one JSON
value at the end or server-sent events on the way, and decides nothing about the generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.engine.api import TokenLogprob
from ds4_worker.http.conversation import Observation
from ds4_worker.parse.events import (
    AnswerEvent,
    CallArguments,
    CallClosed,
    CallOpened,
    Reasoning,
    Text,
)

EndReason = Literal["stop", "length", "tool_calls"]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request before its answer begins."""

    model: str  # the name that the answer carries
    prompts: Sequence[Sequence[int]]  # token ids; several only for text completions
    choices_per_prompt: int
    observation: Observation
    ingress_ns: int  # the body had been decoded
    enqueue_ns: int  # the engine was about to be asked

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.choices_per_prompt

    def prompt_of(self, choice: int) -> Sequence[int]:
        return self.prompts[choice // self.choices_per_prompt]


class Piece(msgspec.Struct):
    """What one step added to a choice."""

    events: Sequence[AnswerEvent]
    tokens: Sequence[int]  # raw, those of EOS and hidden stops too
    stamp_ns: int  # when the step had completed
    logprobs: Sequence[TokenLogprob] | None = None  # of the tokens presented; None: not asked for
    prompt_logprobs: Sequence[TokenLogprob] | None = None  # of the prompt from its second token on
    text_logprobs: Sequence[TokenLogprob] = ()  # of the tokens that its text came from


class End(msgspec.Struct, frozen=True):
    """How a choice ended. `stop`: the stop string or stop token id that the client had given."""

    reason: EndReason
    stop: str | int | None = None


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, over all choices. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, that needed no work
    reasoning_tokens: int = 0  # of the completion
    accepted_tokens: int = 0  # of the completion, that had been guessed
    rejected_tokens: int = 0  # guessed in vain, and not part of it


class ToolCall(msgspec.Struct):
    """A call as a whole. `closed` is false when the answer ended inside it."""

    id: str
    name: str
    arguments: str
    closed: bool = False


class TextPart(msgspec.Struct):
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningPart(msgspec.Struct):
    text: str


Part = TextPart | ReasoningPart | ToolCall


class Choice(msgspec.Struct):
    """One choice as a whole: its parts in the order in which the model wrote them."""

    parts: list[Part]
    tokens: list[int]
    stamps_ns: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob] | None
    end: End

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str | None:
        """None when there was none."""
        texts = [part.text for part in self.parts if isinstance(part, ReasoningPart)]
        return "".join(texts) if texts else None

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]


def events_of(choice: Choice) -> list[AnswerEvent]:
    """The events that a choice was made of, in as few fragments as there can be."""
    events: list[AnswerEvent] = []
    index = 0
    for part in choice.parts:
        if isinstance(part, TextPart):
            events.append(Text(part.text))
        elif isinstance(part, ReasoningPart):
            events.append(Reasoning(part.text))
        else:
            events.append(CallOpened(index, part.id, part.name))
            events.append(CallArguments(index, part.arguments))
            if part.closed:
                events.append(CallClosed(index))
            index += 1
    return events


class Renderer(Protocol):
    """Writes the answer of one request in an API's own form.

    Whole: `whole` once. Streamed: for each choice `begin`, `piece`*, `end`; choices interleave.
    `end` gets `used` with the last choice that ends, and then closes the stream. Instead of what
    would have come, `failure` may end a stream at any point. Each returns the bytes of the
    server-sent events it amounts to, b"" for none. `keepalive` breaks silences.
    """

    keepalive: bytes

    def whole(self, choices: Sequence[Choice], used: Used) -> object:
        """The value whose JSON is the response's body."""

    def begin(self, choice: int, cached_tokens: int) -> bytes:
        """`cached_tokens`: of the choice's prompt."""

    def piece(self, choice: int, piece: Piece) -> bytes: ...

    def end(self, choice: int, end: End, used: Used | None) -> bytes: ...

    def failure(self, error: RequestError) -> bytes: ...
