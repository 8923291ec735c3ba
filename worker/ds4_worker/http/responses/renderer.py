"""Writes the answer of a Responses request: `ResponseWriter` behind the pipeline's `Renderer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds4_common.errors import RequestError
from ds4_worker.engine.api import TokenLogprob
from ds4_worker.http.answer import Choice, End, Piece, TextPart, Used, events_of
from ds4_worker.http.messages import KEEPALIVE
from ds4_worker.http.model import Tokenizer
from ds4_worker.http.responses.objects import (
    InputDetails,
    OutputDetails,
    OutputLogprob,
    ResponseEvent,
    ResponseUsage,
    TextLogprob,
    encode_event,
)
from ds4_worker.http.responses.writer import ResponseWriter
from ds4_worker.http.shapes import MIN_LOGPROB
from ds4_worker.parse.events import Text


class ResponsesRenderer:
    """Log-probabilities are given with the text that their tokens are part of."""

    keepalive = KEEPALIVE

    def __init__(self, writer: ResponseWriter, tokenizer: Tokenizer) -> None:
        self._writer = writer
        self._tokenizer = tokenizer

    def whole(self, choices: Sequence[Choice], used: Used) -> object:
        (choice,) = choices
        texts = iter([part for part in choice.parts if isinstance(part, TextPart)])
        for event in events_of(choice):
            scored = next(texts).logprobs if isinstance(event, Text) else ()
            self._writer.push(event, self._logprobs(scored))
        self._writer.end(choice.end.reason, usage_of(used))
        return self._writer.response

    def begin(self, choice: int, cached_tokens: int) -> bytes:
        return _encode(self._writer.begin())

    def piece(self, choice: int, piece: Piece) -> bytes:
        scored = self._logprobs(piece.text_logprobs)
        events: list[ResponseEvent] = []
        for event in piece.events:
            if isinstance(event, Text):
                events += self._writer.push(event, scored)
                scored = []
            else:
                events += self._writer.push(event)
        return _encode(events)

    def end(self, choice: int, end: End, used: Used | None) -> bytes:
        assert used is not None  # there is one choice
        return _encode(self._writer.end(end.reason, usage_of(used)))

    def failure(self, error: RequestError) -> bytes:
        return _encode(self._writer.fail(error))

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[OutputLogprob]:
        return [
            OutputLogprob(
                *self._fields(item.token, item.logprob),
                [TextLogprob(*self._fields(*top)) for top in item.top],
            )
            for item in logprobs
        ]

    def _fields(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        data = self._tokenizer.token_bytes(token)
        return data.decode(errors="replace"), max(logprob, MIN_LOGPROB), list(data)


def usage_of(used: Used) -> ResponseUsage:
    """What the prefix cache did not hold is written to it."""
    written = used.prompt_tokens - used.cached_tokens
    return ResponseUsage(
        input_tokens=used.prompt_tokens,
        input_tokens_details=InputDetails(used.cached_tokens, written),
        output_tokens=used.completion_tokens,
        output_tokens_details=OutputDetails(used.reasoning_tokens),
        total_tokens=used.prompt_tokens + used.completion_tokens,
    )


def _encode(events: Iterable[ResponseEvent]) -> bytes:
    return b"".join(map(encode_event, events))
