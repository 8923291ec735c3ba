"""The body of `POST /v1/responses`, typed.

Owns: names and types of the Responses API's request fields. Items and tools come in many kinds that
share their fields (and messages come without a kind), so each is one struct whose fields are
optional; `conversation.py` says what a kind needs. Unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Part(msgspec.Struct):
    """Text in one of its many wrappings; other types are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, kw_only=True):
    """One input item of whatever kind."""

    type: str | None = None  # absent: a message
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[str | Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None  # of functions, a JSON text; of tool_search, an object
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | list[str | Part] | None = None
    tools: list[ToolSpec] | None = None
    revised_prompt: str | None = None


class ToolSpec(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One tool of whatever kind."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None  # of a custom tool's input
    tools: list[ToolSpec] | None = None  # of a namespace
    execution: str | None = None  # of tool_search
    defer_loading: bool | None = None  # to be found by a search first


class ToolChoice(msgspec.Struct, omit_defaults=True):
    """`function` and `custom` name one tool; `allowed_tools` lists some."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tokens: int | None = None  # the same by its older name
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None  # a template that is kept by a hosted service
