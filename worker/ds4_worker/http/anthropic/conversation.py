"""From the Messages API's turns and blocks to plain turns and tools.

A user's turn becomes a tool's per `tool_result`, in place, and a user's per run of text between
them. An assistant's stays one turn: its text, its reasoning, its calls. Of `system`,
parts that begin with `x-anthropic-` are bookkeeping of a client and left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.http.anthropic.body import (
    Block,
    CountBody,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolSpec,
    ToolUseBlock,
    Turn,
)
from ds4_worker.http.conversation import Call, Role
from ds4_worker.http.conversation import Turn as PlainTurn
from ds4_worker.parse.events import Tool

_BOOKKEEPING = "x-anthropic-"


def plain_turns(body: CountBody) -> list[PlainTurn]:
    """Raises RequestError naming the block that no text model can take."""
    if not body.messages:
        raise RequestError("messages: is empty, expected at least one", param="messages")
    turns = []
    system = system_text(body.system)
    if system:
        turns.append(PlainTurn(role="system", content=system))
    names: dict[str, str] = {}  # of the tools that were called, by call id
    for index, turn in enumerate(body.messages):
        if turn.role == "assistant":
            turns.append(_assistant(turn, f"messages[{index}]", names))
        else:
            turns += _incoming(turn, turn.role, f"messages[{index}]", names)
    return turns


def system_text(system: str | Sequence[str | TextBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [part if isinstance(part, str) else part.text for part in system]
    return "\n".join(text for text in texts if not text.startswith(_BOOKKEEPING))


def _blocks(turn: Turn) -> Iterable[str | Block]:
    return [turn.content] if isinstance(turn.content, str) else turn.content or []


def _assistant(turn: Turn, place: str, names: dict[str, str]) -> PlainTurn:
    text, reasoning = [], []
    calls: list[Call] = []
    for index, block in enumerate(_blocks(turn)):
        if isinstance(block, str):
            text.append(block)
        elif isinstance(block, TextBlock):
            text.append(block.text)
        elif isinstance(block, ThinkingBlock):
            reasoning.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            arguments = msgspec.json.encode(block.input).decode()
            calls.append(Call(id=block.id, name=block.name, arguments=arguments))
        elif isinstance(block, ToolResultBlock | ImageBlock | DocumentBlock):
            raise _misplaced(block, f"{place}.content[{index}]", "text, thinking or tool_use")
    return PlainTurn(
        role="assistant",
        content="".join(text),
        reasoning="".join(reasoning) or None,
        calls=tuple(calls),
    )


def _incoming(turn: Turn, role: Role, place: str, names: dict[str, str]) -> list[PlainTurn]:
    """A user's turn, or a system's in the middle of a conversation."""
    turns: list[PlainTurn] = []
    text: list[str] = []

    def flush() -> None:
        if text:
            turns.append(PlainTurn(role=role, content="".join(text)))
            text.clear()

    for index, block in enumerate(_blocks(turn)):
        where = f"{place}.content[{index}]"
        if isinstance(block, str):
            text.append(block)
        elif isinstance(block, TextBlock):
            text.append(block.text)
        elif isinstance(block, ToolResultBlock) and role == "user":
            flush()
            turns.append(_tool_result(block, where, names))
        else:
            expected = "text or tool_result" if role == "user" else "text"
            raise _misplaced(block, where, expected)
    flush()
    return turns or [PlainTurn(role=role)]


def _tool_result(block: ToolResultBlock, place: str, names: dict[str, str]) -> PlainTurn:
    parts = [block.content] if isinstance(block.content, str) else block.content or []
    texts = []
    for index, part in enumerate(parts):
        if not isinstance(part, str | TextBlock):
            raise _misplaced(part, f"{place}.content[{index}]", "text")
        texts.append(part if isinstance(part, str) else part.text)
    text = "".join(texts)
    # A model sees only text, so a failure has to be said in it; most clients have done so.
    if block.is_error and not text.lower().lstrip("<").startswith(("error", "tool_use_error")):
        text = f"Error: {text}"
    id_ = block.tool_use_id
    return PlainTurn(role="tool", content=text, call_id=id_, name=names.get(id_))


def _misplaced(block: Block, place: str, expected: str) -> RequestError:
    kind = str(type(block).__struct_config__.tag)
    images = " (this model takes no images or files)"
    hint = images if isinstance(block, ImageBlock | DocumentBlock) else ""
    return RequestError(
        f"{place}: got a block of type {kind!r}, expected {expected}{hint}",
        param=place,
        code="unsupported_content",
    )


def plain_tools(specs: Sequence[ToolSpec] | None) -> list[Tool]:
    """Raises RequestError for tools that only a hosted service could run."""
    tools: dict[str, Tool] = {}
    for index, spec in enumerate(specs or ()):
        place = f"tools[{index}]"
        if spec.input_schema is None:
            raise RequestError(
                f"{place}: {spec.name[:100]!r} of type {(spec.type or '')[:100]!r} has no "
                "input_schema; this server runs no tools itself, define the tool with a schema",
                param=place,
                code="unsupported_tool",
            )
        if spec.name in tools:
            raise RequestError(
                f"{place}: a second tool named {spec.name[:100]!r}", param=f"{place}.name"
            )
        tools[spec.name] = Tool(spec.name, spec.description or "", spec.input_schema)
    return list(tools.values())
