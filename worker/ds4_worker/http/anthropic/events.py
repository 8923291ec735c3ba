"""The events of a streamed message, and the message itself: one state machine for both.

Owns: content blocks, their order and indices, the names and fields of events. One block is open at
a time; reasoning is closed by its signature (the message's id: nothing here needs to check it). A
message whose only block is reasoning gets an empty text block, as clients expect an answer.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ds4_worker.http.anthropic.errors import AnthropicError
from ds4_worker.parse.events import (
    AnswerEvent,
    CallArguments,
    CallClosed,
    CallOpened,
    Reasoning,
    Text,
)


class OutputDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Prompt tokens are split three ways: new, written to the prefix cache, read from it."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails | UnsetType = UNSET  # known at the end


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Content = ThinkingContent | TextContent | ToolUseContent


class AnthropicMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: str = "assistant"
    model: str
    content: list[Content]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


Delta = ThinkingDelta | SignatureDelta | TextDelta | InputJsonDelta


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Content


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: Delta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | AnthropicError
)

_ENCODER = msgspec.json.Encoder()


def encode_event(event: MessageEvent) -> bytes:
    name = str(type(event).__struct_config__.tag)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _ENCODER.encode(event))


def new_message_id() -> str:
    return f"msg_{os.urandom(12).hex()}"


class MessageWriter:
    """One answer. `message` is complete after `end`."""

    def __init__(self, model: str, *, show_thinking: bool = True) -> None:
        """`show_thinking` False: blocks of reasoning carry their signature only."""
        nothing = MessageUsage(0, 0, 0, 0)
        self.message = AnthropicMessage(id=new_message_id(), model=model, content=[], usage=nothing)
        self._show_thinking = show_thinking
        self._open: Content | None = None
        self._pieces: list[str] = []  # of the open block
        self._calls = 0

    def begin(self, usage: MessageUsage) -> list[MessageEvent]:
        """`usage`: of the prompt."""
        return [MessageStart(msgspec.structs.replace(self.message, content=[], usage=usage))]

    def push(self, event: AnswerEvent) -> list[MessageEvent]:
        """The events for the next part of the answer."""
        if isinstance(event, CallClosed):
            return self._close()
        if isinstance(event, CallOpened):
            self._calls += 1
            return self._start(ToolUseContent(event.id, event.name, {}))
        if isinstance(event, CallArguments):
            return self._add(event.fragment, InputJsonDelta(event.fragment))
        if not event.text:
            return []
        if isinstance(event, Reasoning):
            events = (
                [] if isinstance(self._open, ThinkingContent) else self._start(ThinkingContent())
            )
            if not self._show_thinking:
                return events
            return events + self._add(event.text, ThinkingDelta(event.text))
        assert isinstance(event, Text)
        events = [] if isinstance(self._open, TextContent) else self._start(TextContent())
        return events + self._add(event.text, TextDelta(event.text))

    def end(self, reason: str, stop: str | None, usage: MessageUsage) -> list[MessageEvent]:
        """`reason`: length when a limit was reached. `stop`: the stop sequence that matched."""
        events = self._close()
        content = self.message.content
        if not content or isinstance(content[-1], ThinkingContent):
            events += self._start(TextContent()) + self._close()
        message = self.message
        message.usage = usage
        message.stop_reason, message.stop_sequence = self._stop_reason(reason, stop), stop
        delta = StopDelta(message.stop_reason, stop)
        return [*events, MessageDelta(delta, message.usage), MessageStop()]

    def _stop_reason(self, reason: str, stop: str | None) -> str:
        if reason == "length":
            return "max_tokens"
        if stop is not None:
            return "stop_sequence"
        return "tool_use" if self._calls else "end_turn"

    def _start(self, block: Content) -> list[MessageEvent]:
        events = self._close()
        self._open = block
        self.message.content.append(block)
        started = msgspec.structs.replace(block)
        return [*events, ContentBlockStart(self._index, started)]

    def _add(self, text: str, delta: Delta) -> list[MessageEvent]:
        self._pieces.append(text)
        return [ContentBlockDelta(self._index, delta)]

    def _close(self) -> list[MessageEvent]:
        block, text = self._open, "".join(self._pieces)
        if block is None:
            return []
        self._open, self._pieces = None, []
        stop = ContentBlockStop(self._index)
        if isinstance(block, ThinkingContent):
            block.thinking, block.signature = text, self.message.id
            return [ContentBlockDelta(self._index, SignatureDelta(block.signature)), stop]
        if isinstance(block, TextContent):
            block.text = text
        else:
            block.input = tool_input(text)
        return [stop]

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1


def tool_input(arguments: str) -> dict[str, Any]:
    """The arguments as an object. A call that was cut off is wrapped in the way in which the API's
    documentation tells clients to hand invalid JSON back."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
