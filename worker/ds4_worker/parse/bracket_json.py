"""Tool calls after `[TOOL_CALLS]`, in two forms: a list `[{"name": N, "arguments": {...}}, ...]`,
and `NAME[ARGS]{...}`, repeated with its opener for every call.

An id that the model writes (`[CALL_ID]`, `"id"`) is not the call's: ids are the server's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from ds4_common.contract.frontend import ToolSyntax
from ds4_worker.parse.answer import Answer
from ds4_worker.parse.blocks import (
    MAX_NAME,
    NotACall,
    bounded,
    expect,
    name_before,
    skip_space,
)
from ds4_worker.parse.content import blocks
from ds4_worker.parse.events import Tool
from ds4_worker.parse.json_reader import arguments_object, call_object
from ds4_worker.parse.lark import Calls, Lark
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Delimiters, Source, Step

ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
_NAME = re.compile(r"[\w.:/-]+")


def delimiters(tools: ToolSyntax) -> tuple[str, ...]:
    """The delimiters that may be tokens."""
    return tools.open, ARGUMENTS, CALL_ID


def calls(lark: Lark, syntax: ToolSyntax, tools: Sequence[Tool], *, parallel: bool) -> Calls:
    """The grammar of calls, in the form that the contract's separator tells."""
    if syntax.separator:
        call = lark.choice(
            [
                f"{lark.literal(tool.name + syntax.separator)} {lark.arguments(tool)}"
                for tool in tools
            ]
        )
        return Calls(syntax.open, lark.list_of(call, syntax.open, parallel=parallel))
    call = lark.choice([lark.json_call(tool, key="arguments") for tool in tools])
    calls = lark.list_of(call, ", ", parallel=parallel)
    return Calls(syntax.open, f"{lark.literal('[')} {calls} {lark.literal(']')}")


def program(
    source: Source, answer: Answer, marks: Marks, tools: ToolSyntax, dropped: str
) -> Step[None]:
    """Reads an answer to its end. `dropped` is markup that means nothing here."""
    opener = marks.of(tools.open)
    yield from blocks(source, answer, opener, dropped, lambda: _block(source, answer, marks))


def _block(source: Source, answer: Answer, marks: Marks) -> Step[None]:
    yield from skip_space(source)
    first = yield from source.peek()
    if first == "[":
        source.take(1)
        yield from _list(source, answer)
    elif first == "{":
        yield from call_object(source, answer)
        answer.close_call()
    else:
        yield from _named(source, answer, marks)


def _list(source: Source, answer: Answer) -> Step[None]:
    while True:
        yield from skip_space(source)
        yield from call_object(source, answer)
        answer.close_call()
        yield from skip_space(source)
        if (yield from source.accept("]")):
            answer.end_block()
            return
        yield from expect(source, ",")


def _named(source: Source, answer: Answer, marks: Marks) -> Step[None]:
    """`NAME[ARGS]{...}`, with or without `[CALL_ID]ID` before, or even without `[ARGS]`."""
    arguments = marks.of(ARGUMENTS)
    parts: list[str] = []
    yield from source.run(_NAME, bounded(parts.append, MAX_NAME))
    name = "".join(parts)
    if name not in answer.tools:
        raise NotACall
    if (yield from source.accept(marks.of(CALL_ID))):
        yield from name_before(source, Delimiters(arguments))
    else:
        yield from source.accept(arguments)
    yield from skip_space(source)
    if (yield from source.peek()) != "{":
        raise NotACall
    answer.open_call(name)
    yield from arguments_object(source, answer, answer.arguments)
    answer.close_call()
