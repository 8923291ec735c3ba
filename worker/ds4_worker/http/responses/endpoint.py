"""`POST /v1/responses`: from a body to the pipeline.

Owns: what the Responses API's fields mean in neutral terms. Nothing is kept between requests, so
what would need an earlier response, or the answer at another time, is refused.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.http.bodies import decode_body
from ds4_worker.http.conversation import Constraint, Conversation, Decoding, Thinking, ToolChoice
from ds4_worker.http.effort import effort_of
from ds4_worker.http.generation import unsupported
from ds4_worker.http.messages import EventStream, Request, Response
from ds4_worker.http.responses import body as fields
from ds4_worker.http.responses.body import ResponsesBody, TextFormat
from ds4_worker.http.responses.conversation import plain_turns
from ds4_worker.http.responses.objects import ReasoningEcho, ResponseObject
from ds4_worker.http.responses.renderer import ResponsesRenderer
from ds4_worker.http.responses.tools import Toolbox
from ds4_worker.http.responses.writer import ResponseWriter, new_id
from ds4_worker.http.service import Service
from ds4_worker.http.tools import template_tools

_KEPT_ELSEWHERE = ("previous_response_id", "conversation", "prompt")


async def create(service: Service, request: Request) -> Response | EventStream:
    body, conversation, toolbox = await service.read(request, _read_response)
    shown = summary_of(body) not in (None, "none")
    return await service.converse(
        conversation,
        lambda facts: ResponsesRenderer(
            ResponseWriter(response_of(body, facts.model), toolbox, show_reasoning=shown),
            service.model.tokenizer,
        ),
    )


def _read_response(data: bytes) -> tuple[ResponsesBody, Conversation, Toolbox]:
    body = decode_body(data, ResponsesBody)
    return body, *conversation_of(body)


def conversation_of(body: ResponsesBody) -> tuple[Conversation, Toolbox]:
    """The request in neutral form, and its tools by the model's names. Raises RequestError."""
    refuse(body)
    toolbox = Toolbox()
    toolbox.add(body.tools or (), "tools")
    turns = plain_turns(body, toolbox)
    choice = tool_choice(body.tool_choice, toolbox)
    limit, limit_path = body.max_output_tokens, "max_output_tokens"
    if limit is None:
        limit, limit_path = body.max_tokens, "max_tokens"
    effort_word = body.reasoning.effort if body.reasoning else None
    enabled, effort = effort_of(effort_word, "reasoning.effort")
    decoding = Decoding(
        max_tokens=limit,
        temperature=body.temperature,
        top_p=body.top_p,
        constraint=constraint_of(body.text.format if body.text else None),
        logprobs=logprobs_of(body),
        paths={"max_tokens": limit_path, "logprobs": "top_logprobs"},
    )
    conversation = Conversation(
        turns=turns,
        model=body.model,
        tools=tuple(toolbox.tools),
        template_tools=template_tools(toolbox.tools),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=Thinking(enabled=enabled, effort=effort),
        decoding=decoding,
        stream=bool(body.stream),
        path="input",
    )
    return conversation, toolbox


def summary_of(body: ResponsesBody) -> str | None:
    reasoning = body.reasoning or fields.Reasoning()
    return reasoning.summary or reasoning.generate_summary


def logprobs_of(body: ResponsesBody) -> int | None:
    """Alternatives per token; None when log-probabilities were not asked for."""
    if body.top_logprobs is not None:
        return body.top_logprobs
    return 0 if "message.output_text.logprobs" in (body.include or ()) else None


def refuse(body: ResponsesBody) -> None:
    for field in _KEPT_ELSEWHERE:
        if getattr(body, field) is not None:
            raise RequestError(
                f"{field}: this server keeps nothing between requests; send the whole "
                "conversation as input",
                param=field,
                code="unsupported_parameter",
            )
    if body.background:
        raise unsupported("background")


def tool_choice(choice: str | fields.ToolChoice | None, toolbox: Toolbox) -> ToolChoice:
    """Raises RequestError for a choice that no tool can satisfy. `allowed_tools` takes the others
    out of `toolbox`."""
    if isinstance(choice, fields.ToolChoice) and choice.type == "allowed_tools":
        names = [str(tool.get("name", tool.get("type"))) for tool in choice.tools or ()]
        toolbox.restrict(names)
        choice = choice.mode or "auto"
    if isinstance(choice, fields.ToolChoice):
        wanted = choice.name or choice.type
        name = toolbox.prompt_name(wanted)
        if name is None:
            raise RequestError(
                f"tool_choice: no tool of this request is called {wanted[:100]!r}",
                param="tool_choice",
            )
        return ToolChoice("named", name)
    if choice == "required":
        if not toolbox.tools:
            raise RequestError(
                "tool_choice: 'required' needs tools, and there are none", param="tool_choice"
            )
        return ToolChoice("required")
    return ToolChoice("none" if choice == "none" else "auto")


def constraint_of(wanted: TextFormat | None) -> Constraint | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint(kind="json_object", path="text.format")
    if wanted.schema is None:
        raise RequestError("text.format.schema: is missing", param="text.format.schema")
    return Constraint(
        kind="json_schema",
        value=wanted.schema,
        strict=bool(wanted.strict),
        path="text.format.schema",
    )


def response_of(body: ResponsesBody, model: str) -> ResponseObject:
    """The resource before its output, repeating the request."""
    text: dict[str, Any] = msgspec.to_builtins(body.text or fields.TextConfig())
    text["format"] = text.get("format") or {"type": "text"}
    choice: Any = msgspec.to_builtins(body.tool_choice) if body.tool_choice else "auto"
    limit = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
    return ResponseObject(
        id=new_id("resp"),
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=limit,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=ReasoningEcho(
            body.reasoning.effort if body.reasoning else None, summary_of(body)
        ),
        temperature=body.temperature,
        text=text,
        tool_choice=choice,
        tools=msgspec.to_builtins(body.tools or []),
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
