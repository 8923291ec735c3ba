"""`POST /v1/chat/completions`: its body, and what it means.

Owns: the fields of a chat request and their translation into a `Conversation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ds4_common.errors import RequestError
from ds4_worker.http.bodies import CommonFields, decode_body
from ds4_worker.http.chat_renderer import ChatRenderer
from ds4_worker.http.conversation import (
    Call,
    Conversation,
    Decoding,
    Role,
    Thinking,
    ToolChoice,
    Turn,
)
from ds4_worker.http.effort import effort_of
from ds4_worker.http.generation import unsupported
from ds4_worker.http.messages import EventStream, Request, Response
from ds4_worker.http.service import Service
from ds4_worker.parse.events import Tool

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class CallFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class MessageCall(msgspec.Struct):
    id: str
    function: CallFunction
    type: str = "function"


class Message(msgspec.Struct):
    role: str
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as some clients send it back


class ToolFunction(msgspec.Struct):
    name: str
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class ToolBody(msgspec.Struct):
    type: str
    function: ToolFunction | None = None


class ChosenFunction(msgspec.Struct):
    name: str


class ToolChoiceBody(msgspec.Struct):
    type: str
    function: ChosenFunction | None = None


class ThinkingBody(msgspec.Struct):
    type: str
    budget_tokens: int | None = None


class PredictionBody(msgspec.Struct):
    type: str
    content: str | list[ContentPart]


class ChatBody(CommonFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    prediction: PredictionBody | None = None
    reasoning_effort: str | None = None
    think: bool | None = None
    thinking: bool | ThinkingBody | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def answer(service: Service, request: Request) -> Response | EventStream:
    body, conversation = await service.read(request, read_chat)
    return await service.converse(
        conversation,
        lambda facts: ChatRenderer(
            facts, service.model.tokenizer, include_usage=body.include_usage
        ),
    )


def read_chat(data: bytes) -> tuple[ChatBody, Conversation]:
    body = decode_body(data, ChatBody)
    return body, conversation_of(body)


def conversation_of(body: ChatBody) -> Conversation:
    """Raises RequestError for contradictions and for what no model here takes."""
    if not body.messages:
        raise RequestError("messages: is empty, expected at least one", param="messages")
    for field in ("functions", "function_call"):
        if getattr(body, field):
            raise RequestError(
                f"{field}: was replaced by tools and tool_choice; send those",
                param=field,
                code="unsupported_parameter",
            )
    if body.modalities is not None and body.modalities != ["text"]:
        raise unsupported("modalities")
    tools = tools_of(body.tools or ())
    kwargs = body.chat_template_kwargs or {}
    return Conversation(
        turns=[turn_of(message, f"messages[{i}]") for i, message in enumerate(body.messages)],
        model=body.model,
        tools=tools,
        template_tools=[template_tool(tool) for tool in body.tools or ()],
        tool_choice=tool_choice_of(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=thinking_of(body, kwargs.get("enable_thinking")),
        decoding=decoding_of(body),
        observation=body.observation,
        stream=bool(body.stream),
        template_kwargs=kwargs,
    )


def decoding_of(body: ChatBody) -> Decoding:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs: needs logprobs: true", param="top_logprobs")
    paths = {"logprobs": "top_logprobs"}
    limit = body.max_tokens
    if body.max_completion_tokens is not None:  # the newer name wins
        limit, paths["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
    return body.decoding(
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prediction=prediction_of(body.prediction),
        paths=paths,
    )


def prediction_of(body: PredictionBody | None) -> str:
    if body is None:
        return ""
    if body.type != "content":
        raise RequestError(
            f"prediction.type: got {body.type[:100]!r}, expected content", param="prediction.type"
        )
    if isinstance(body.content, str):
        return body.content
    return "".join(part.text or "" for part in body.content)


# --- thinking ------------------------------------------------------------------------------------


def thinking_of(body: ChatBody, template_says: object) -> Thinking:
    """`think` and `thinking` say whether; `reasoning_effort` says how much, and whether where they
    do not; after them the template's own switch."""
    enabled, effort = effort_of(body.reasoning_effort, "reasoning_effort")
    if enabled is None and isinstance(template_says, bool):
        enabled = template_says
    budget = None
    thinking = body.thinking
    if isinstance(thinking, ThinkingBody):
        if thinking.type not in ("enabled", "disabled", "adaptive"):
            raise RequestError(
                f"thinking.type: got {thinking.type[:100]!r}, "
                "expected enabled, disabled or adaptive",
                param="thinking.type",
            )
        enabled = thinking.type != "disabled"
        budget = thinking.budget_tokens
        if budget is not None and budget < 0:
            raise RequestError(
                f"thinking.budget_tokens: got {budget}, expected 0 or more",
                param="thinking.budget_tokens",
            )
    elif thinking is not None:
        enabled = thinking
    if body.think is not None:
        enabled = body.think
    return Thinking(enabled=enabled, effort=effort if enabled else None, budget_tokens=budget)


# --- tools ---------------------------------------------------------------------------------------


def tools_of(tools: Sequence[ToolBody]) -> tuple[Tool, ...]:
    found: dict[str, Tool] = {}
    for index, body in enumerate(tools):
        function = body.function
        if body.type != "function" or function is None:
            raise RequestError(
                f"tools[{index}]: got a tool of type {body.type[:100]!r}, expected a function",
                param=f"tools[{index}].type",
                code="unsupported_tool",
            )
        path = f"tools[{index}].function.name"
        if not function.name or function.name in found:
            what = f"{function.name[:100]!r} a second time" if function.name else "an empty name"
            raise RequestError(f"{path}: got {what}, expected different names", param=path)
        found[function.name] = Tool(
            function.name, function.description or "", function.parameters or {}
        )
    return tuple(found.values())


def template_tool(tool: ToolBody) -> dict[str, Any]:
    """The tool as the client sent it: templates write it out."""
    values: dict[str, Any] = msgspec.to_builtins(tool)
    return values


def tool_choice_of(choice: str | ToolChoiceBody | None, tools: Sequence[Tool]) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if not tools:
        raise RequestError("tool_choice: needs tools", param="tool_choice")
    if choice == "required":
        return ToolChoice("required")
    if isinstance(choice, str):
        raise RequestError(
            f"tool_choice: got {choice[:100]!r}, expected auto, none, required or a function",
            param="tool_choice",
        )
    if choice.type != "function" or choice.function is None:
        raise RequestError(
            f"tool_choice.type: got {choice.type[:100]!r}, expected function",
            param="tool_choice.type",
        )
    name = choice.function.name
    if all(name != tool.name for tool in tools):
        path = "tool_choice.function.name"
        raise RequestError(f"{path}: {name[:100]!r} is none of the tools", param=path)
    return ToolChoice("named", name)


# --- messages ------------------------------------------------------------------------------------


def turn_of(message: Message, path: str) -> Turn:
    role = ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"{path}.role: got {message.role[:100]!r}, expected one of {', '.join(ROLES)}",
            param=f"{path}.role",
        )
    reasoning = message.reasoning_content
    if reasoning is None:
        reasoning = message.reasoning
    calls = message.tool_calls or ()
    if calls and role != "assistant":
        raise RequestError(
            f"{path}.tool_calls: only an assistant's message has calls", param=f"{path}.tool_calls"
        )
    return Turn(
        role=role,
        content=text_of(message.content, f"{path}.content"),
        reasoning=reasoning if role == "assistant" else None,
        calls=tuple(
            Call(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in calls
        ),
        call_id=message.tool_call_id if role == "tool" else None,
        name=message.name,
    )


def text_of(content: str | list[str | ContentPart] | None, path: str) -> str:
    """The text of a message's content; its parts are joined without a separator."""
    if not isinstance(content, list):
        return content or ""
    texts = []
    for position, part in enumerate(content):
        text = part if isinstance(part, str) else part.text
        if isinstance(part, ContentPart) and part.type == "refusal":
            text = part.refusal
        elif isinstance(part, ContentPart) and part.type != "text":
            text = None
        if text is None:
            kind = "text" if isinstance(part, str) else part.type
            raise RequestError(
                f"{path}[{position}]: got a part of type {kind[:100]!r} without text, "
                "expected text (this model takes no images, audio or files)",
                param=f"{path}[{position}]",
                code="unsupported_content",
            )
        texts.append(text)
    return "".join(texts)
