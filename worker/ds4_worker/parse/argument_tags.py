"""Tool calls in argument tags:

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

Whitespace between tags is free: models write it with and without. Values are raw text, typed by the
tool's schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ds4_common.contract.frontend import ToolSyntax
from ds4_worker.parse.answer import Answer
from ds4_worker.parse.arguments import Arguments
from ds4_worker.parse.blocks import NotACall, expect, name_before, skip_space
from ds4_worker.parse.content import blocks
from ds4_worker.parse.events import Tool
from ds4_worker.parse.lark import Calls, Lark
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Delimiters, Source, Step
from ds4_worker.parse.tag_values import tag_value

KEY: Final = "<arg_key>"
KEY_END: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
VALUE_END: Final = "</arg_value>"


def delimiters(tools: ToolSyntax) -> tuple[str, ...]:
    """The delimiters that may be tokens."""
    return tools.open, tools.close, KEY, KEY_END, VALUE, VALUE_END


def calls(lark: Lark, syntax: ToolSyntax, tools: Sequence[Tool], *, parallel: bool) -> Calls:
    """The grammar of calls, laid out with the contract's separator."""
    space = syntax.separator

    def tags(key: str, kind: str) -> tuple[str, str]:
        return f"{KEY}{key}{KEY_END}{space}{VALUE}", f"{VALUE_END}{space}"

    def call(tool: Tool) -> str:
        begin, end = lark.literal(tool.name + space), lark.literal(syntax.close)
        return f"{begin} {lark.parameters(tool, tags)} {end}"

    any_call = lark.choice([call(tool) for tool in tools])
    return Calls(syntax.open, lark.list_of(any_call, f"{space}{syntax.open}", parallel=parallel))


def program(
    source: Source, answer: Answer, marks: Marks, tools: ToolSyntax, dropped: str
) -> Step[None]:
    """Reads an answer to its end. `dropped` is markup that means nothing here."""
    opener = marks.of(tools.open)
    yield from blocks(
        source,
        answer,
        opener,
        dropped,
        lambda: _block(source, answer, marks, marks.of(tools.close)),
    )


def _block(source: Source, answer: Answer, marks: Marks, close: str) -> Step[None]:
    key_end, value_end = Delimiters(marks.of(KEY_END)), Delimiters(marks.of(VALUE_END))
    yield from skip_space(source)
    name_end = Delimiters("\n", marks.of(KEY), close)
    name, found = yield from name_before(source, name_end)
    name = name.strip()
    if name not in answer.tools:
        raise NotACall
    arguments = Arguments(answer, name)
    while found != close:
        if found != marks.of(KEY):
            yield from skip_space(source)
            # Models that stop at a token of their own leave the closer out.
            if source.finished or (yield from source.accept(close)):
                break
            yield from expect(source, marks.of(KEY))
        key, _ = yield from name_before(source, key_end)
        yield from skip_space(source)
        yield from expect(source, marks.of(VALUE))
        yield from tag_value(source, arguments, arguments.key(key.strip()), value_end)
        found = ""
    arguments.end()
    answer.close_call()
