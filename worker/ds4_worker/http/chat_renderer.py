"""The answers of `POST /v1/chat/completions`, whole and in chunks.

Owns: field names, order and presence, as the OpenAI clients expect them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from ds4_worker.engine.api import TokenLogprob
from ds4_worker.http.answer import Choice, Facts, Piece, ToolCall
from ds4_worker.http.model import Tokenizer
from ds4_worker.http.shapes import MIN_LOGPROB, ChoiceBody, CompletionRenderer
from ds4_worker.parse.events import (
    AnswerEvent,
    CallArguments,
    CallClosed,
    CallOpened,
    Reasoning,
    Text,
)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class FunctionBody(msgspec.Struct):
    name: str | UnsetType
    arguments: str


class CallBody(msgspec.Struct, kw_only=True):
    """A call, the header of a streamed one, or (without id and type) more of its arguments."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionBody


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallBody] | None = None


class Message(msgspec.Struct):
    role: str
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET


class ChunkChoice(ChoiceBody, kw_only=True):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class WholeChoice(ChoiceBody, kw_only=True):
    message: Message
    logprobs: ChatLogprobs | None = None


class ChatRenderer(CompletionRenderer):
    """Log-probabilities belong to all presented tokens, those of reasoning and calls too, each
    once and in order."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, facts: Facts, tokenizer: Tokenizer, *, include_usage: bool) -> None:
        super().__init__(facts, include_usage=include_usage)
        self._tokenizer = tokenizer

    def write_whole(self, index: int, choice: Choice) -> WholeChoice:
        text, reasoning, calls = choice.text, choice.reasoning, choice.calls
        message = Message("assistant", text if text or not calls else None)
        if reasoning is not None:
            message.reasoning_content = reasoning
        if calls:
            message.tool_calls = [whole_call(call) for call in calls]
        return WholeChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(choice.logprobs),
            finish_reason=choice.end.reason,
        )

    def write_opening(self, index: int) -> ChunkChoice:
        return ChunkChoice(index=index, delta=Delta(role="assistant", content=""))

    def write_piece(self, index: int, piece: Piece) -> Sequence[ChunkChoice]:
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        deltas = [delta for item in piece.events if (delta := delta_of(item)) is not None]
        if logprobs is not None and not deltas:
            deltas = [Delta(content="")]
        chunks = [ChunkChoice(index=index, delta=delta) for delta in deltas]
        if chunks:
            chunks[0].logprobs = logprobs
        return chunks

    def write_empty(self, index: int, reason: str | None) -> ChunkChoice:
        return ChunkChoice(index=index, delta=Delta(), finish_reason=reason)

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
        if logprobs is None:
            return None
        content = []
        for item in logprobs:
            top = [TopLogprob(*self._fields(token, value)) for token, value in item.top]
            content.append(ChatLogprob(*self._fields(item.token, item.logprob), top))
        return ChatLogprobs(content)

    def _fields(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        data = self._tokenizer.token_bytes(token)
        return data.decode(errors="replace"), max(logprob, MIN_LOGPROB), list(data)


def whole_call(call: ToolCall) -> CallBody:
    function = FunctionBody(call.name, call.arguments)
    return CallBody(id=call.id, type="function", function=function)


def delta_of(item: AnswerEvent) -> Delta | None:
    if isinstance(item, Text):
        return Delta(content=item.text)
    if isinstance(item, Reasoning):
        return Delta(reasoning_content=item.text)
    if isinstance(item, CallOpened):
        function = FunctionBody(item.name, "")
        header = CallBody(index=item.index, id=item.id, type="function", function=function)
        return Delta(tool_calls=[header])
    if isinstance(item, CallArguments):
        fragment = CallBody(index=item.index, function=FunctionBody(UNSET, item.fragment))
        return Delta(tool_calls=[fragment])
    assert isinstance(item, CallClosed)
    return None
