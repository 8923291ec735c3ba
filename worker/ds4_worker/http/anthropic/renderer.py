"""Writes the answer of a Messages request: `MessageWriter` behind the pipeline's `Renderer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds4_common.errors import RequestError
from ds4_worker.http.answer import Choice, End, Facts, Piece, Used, events_of
from ds4_worker.http.anthropic.errors import anthropic_error
from ds4_worker.http.anthropic.events import (
    MessageEvent,
    MessageUsage,
    MessageWriter,
    OutputDetails,
    Ping,
    encode_event,
)


class MessagesRenderer:
    keepalive = encode_event(Ping())

    def __init__(self, facts: Facts, *, show_thinking: bool) -> None:
        self._prompt_tokens = len(facts.prompts[0])
        self._writer = MessageWriter(facts.model, show_thinking=show_thinking)

    def whole(self, choices: Sequence[Choice], used: Used) -> object:
        (choice,) = choices
        for event in events_of(choice):
            self._writer.push(event)
        self._end(choice.end, used)
        return self._writer.message

    def begin(self, choice: int, cached_tokens: int) -> bytes:
        return _encode(self._writer.begin(self._usage(cached_tokens)))

    def piece(self, choice: int, piece: Piece) -> bytes:
        push = self._writer.push
        return _encode(out for event in piece.events for out in push(event))

    def end(self, choice: int, end: End, used: Used | None) -> bytes:
        assert used is not None  # there is one choice
        return _encode(self._end(end, used))

    def failure(self, error: RequestError) -> bytes:
        return encode_event(anthropic_error(error))

    def _end(self, end: End, used: Used) -> list[MessageEvent]:
        stop = end.stop if isinstance(end.stop, str) else None
        usage = self._usage(used.cached_tokens)
        usage.output_tokens = used.completion_tokens
        usage.output_tokens_details = OutputDetails(used.reasoning_tokens)
        return self._writer.end(end.reason, stop, usage)

    def _usage(self, cached_tokens: int) -> MessageUsage:
        """What the prefix cache did not hold is written to it, so no token is merely input."""
        written = self._prompt_tokens - cached_tokens
        return MessageUsage(0, written, cached_tokens, 0)


def _encode(events: Iterable[MessageEvent]) -> bytes:
    return b"".join(map(encode_event, events))
