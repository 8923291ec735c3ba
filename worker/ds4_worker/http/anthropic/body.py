"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, typed.

Owns: names and types of the Messages API's request fields. Unknown fields and what only tunes a
hosted service (`metadata`, `cache_control`, `service_tier`, ...) are ignored; blocks and tools that
would need something this server lacks are refused by `conversation.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier turn. The signature is not needed: nothing is kept here."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only its author can read: left out."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    source: dict[str, Any] = {}


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    source: dict[str, Any] = {}


ResultBlock = TextBlock | ImageBlock | DocumentBlock


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[str | ResultBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
)


class Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[str | Block] | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: JsonSchemaFormat | None = None


class ToolSpec(msgspec.Struct):
    """A tool of the client's. Those that a hosted service runs have no `input_schema`."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """What decides the prompt."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[str | TextBlock] | None = None
    thinking: bool | Thinking | None = None
    output_config: OutputConfig | None = None
    reasoning_effort: str | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    output_format: JsonSchemaFormat | None = None  # older than `output_config.format`
    stream: bool | None = None
