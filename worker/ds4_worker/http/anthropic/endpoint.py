"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: from a body to the pipeline.

Owns: what the Messages API's fields mean in neutral terms. Every refusal names the client's field.
"""

from __future__ import annotations

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.http.anthropic.body import CountBody, MessagesBody, Thinking, ToolChoice
from ds4_worker.http.anthropic.conversation import plain_tools, plain_turns
from ds4_worker.http.anthropic.renderer import MessagesRenderer
from ds4_worker.http.bodies import decode_body
from ds4_worker.http.conversation import Constraint, Conversation, Decoding
from ds4_worker.http.conversation import Thinking as PlainThinking
from ds4_worker.http.conversation import ToolChoice as PlainChoice
from ds4_worker.http.effort import effort_of
from ds4_worker.http.messages import EventStream, Request, Response, json_response
from ds4_worker.http.service import Service
from ds4_worker.http.tools import template_tools


class TokenCount(msgspec.Struct):
    input_tokens: int


async def create(service: Service, request: Request) -> Response | EventStream:
    body, conversation = await service.read(request, _read_messages)
    thinking = body.thinking
    shown = not (isinstance(thinking, Thinking) and thinking.display == "omitted")
    return await service.converse(
        conversation, lambda facts: MessagesRenderer(facts, show_thinking=shown)
    )


async def count_tokens(service: Service, request: Request) -> Response:
    """Of a prompt that the context cannot hold, too: clients ask in order to shorten it."""
    conversation = await service.read(request, lambda data: counted(decode_body(data, CountBody)))
    service.model.resolve(conversation.model)
    prompt = await service.prepare(conversation)
    return json_response(TokenCount(len(prompt.ids)))


def _read_messages(data: bytes) -> tuple[MessagesBody, Conversation]:
    body = decode_body(data, MessagesBody)
    return body, conversation_of(body)


def conversation_of(body: MessagesBody) -> Conversation:
    """The request in neutral form. Raises RequestError."""
    decoding = Decoding(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=tuple(body.stop_sequences or ()),
        constraint=constraint_of(body),
        paths={"stop": "stop_sequences"},
    )
    return msgspec.structs.replace(counted(body), decoding=decoding, stream=bool(body.stream))


def constraint_of(body: MessagesBody) -> Constraint | None:
    form, path = body.output_format, "output_format.schema"
    if body.output_config is not None and body.output_config.format is not None:
        form, path = body.output_config.format, "output_config.format.schema"
    return None if form is None else Constraint(kind="json_schema", value=form.schema, path=path)


def counted(body: CountBody) -> Conversation:
    """What decides the prompt, in neutral form."""
    turns = plain_turns(body)
    if turns[-1].calls:
        place = f"messages[{len(body.messages) - 1}]"
        raise RequestError(f"{place}: its calls have no tool_result after them", param=place)
    tools = plain_tools(body.tools)
    choice = body.tool_choice or ToolChoice("auto")
    return Conversation(
        turns=turns,
        model=body.model,
        tools=tuple(tools),
        template_tools=template_tools(tools),
        tool_choice=tool_choice(choice, {tool.name for tool in tools}),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        thinking=thinking_of(body),
        # The API goes on with an answer that the client has begun.
        continue_last=turns[-1].role == "assistant",
        call_prefix="toolu_",
    )


def tool_choice(choice: ToolChoice, names: set[str]) -> PlainChoice:
    """Raises RequestError for a choice that no tool can satisfy."""
    if choice.type in ("any", "tool") and not names:
        raise RequestError(
            f"tool_choice: {choice.type!r} needs tools, and there are none", param="tool_choice"
        )
    if choice.type == "tool":
        if choice.name not in names:
            raise RequestError(
                f"tool_choice.name: got {(choice.name or '')[:100]!r}, expected the name of a tool",
                param="tool_choice.name",
            )
        return PlainChoice("named", choice.name or "")
    if choice.type == "any":
        return PlainChoice("required")
    return PlainChoice("none" if choice.type == "none" else "auto")


def thinking_of(body: CountBody) -> PlainThinking:
    """`thinking` says whether; `output_config.effort`, or `reasoning_effort`, says how much."""
    word, path = body.reasoning_effort, "reasoning_effort"
    if body.output_config is not None and body.output_config.effort is not None:
        word, path = body.output_config.effort, "output_config.effort"
    enabled, effort = effort_of(word, path)
    thinking = body.thinking
    if isinstance(thinking, bool):
        return PlainThinking(enabled=thinking, effort=effort if thinking else None)
    if thinking is None:
        return PlainThinking(enabled=enabled, effort=effort)
    budget = thinking.budget_tokens
    if budget is not None and budget < 1:
        raise RequestError(
            f"thinking.budget_tokens: got {budget}, expected 1 or more",
            param="thinking.budget_tokens",
        )
    if thinking.type == "disabled":
        return PlainThinking(enabled=False)
    return PlainThinking(enabled=True, effort=effort, budget_tokens=budget)
