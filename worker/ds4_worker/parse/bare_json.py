"""Tool calls as the whole answer in JSON: `{"name": N, "parameters": {...}}`.

A call begins where the answer begins, or after the opener (`<|python_tag|>`) anywhere; more calls
may follow after `;` or whitespace. There is no closer: the object's end is the call's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds4_common.contract.frontend import ToolSyntax
from ds4_worker.parse.answer import Answer
from ds4_worker.parse.arguments import Schema
from ds4_worker.parse.blocks import attempt, skip_space
from ds4_worker.parse.content import Content
from ds4_worker.parse.events import Tool
from ds4_worker.parse.json_reader import call_object
from ds4_worker.parse.lark import Calls, Lark
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Source, Step


def delimiters(tools: ToolSyntax) -> tuple[str, ...]:
    """The delimiters that may be tokens."""
    return (tools.open,)


def calls(lark: Lark, syntax: ToolSyntax, tools: Sequence[Tool], *, parallel: bool) -> Calls:
    """The grammar of calls. Each is one schema, because the library cannot tell the beginning of an
    object that it knows as a string from that of an answer that is an object too."""
    call = lark.choice([lark.json(_schema(tool)) for tool in tools])
    return Calls("", lark.list_of(call, "; ", parallel=parallel))


def _schema(tool: Tool) -> dict[str, Any]:
    schema = Schema(tool.parameters)
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            "parameters": schema.closed(),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
        **schema.definitions(),
    }


def program(
    source: Source, answer: Answer, marks: Marks, tools: ToolSyntax, dropped: str
) -> Step[None]:
    """Reads an answer to its end. `dropped` is markup that means nothing here."""
    content = Content(source, answer, *filter(None, (marks.of(tools.open),)), dropped=dropped)
    yield from skip_space(source, answer.content)
    if (yield from source.peek()) == "{":
        answer.begin_block("")
        yield from attempt(answer, _calls(source, answer))
    while opener := (yield from content.next_opener()):
        answer.begin_block(opener)
        yield from attempt(answer, _calls(source, answer))


def _calls(source: Source, answer: Answer) -> Step[None]:
    while True:
        yield from skip_space(source)
        yield from call_object(source, answer)
        answer.close_call()
        following = yield from _space_or_semicolon(source, answer)
        if not following:
            return


def _space_or_semicolon(source: Source, answer: Answer) -> Step[bool]:
    """Whether another object follows the call; what separates them is read."""
    answer.begin_block("")
    yield from skip_space(source)
    if (yield from source.accept(";")):
        yield from skip_space(source)
    if (yield from source.peek()) == "{":
        return True
    answer.give_back()
    return False
