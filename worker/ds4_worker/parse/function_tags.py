"""Tool calls in function tags:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are raw text, typed by the tool's schema; with `wrap_newlines` one newline on each side of a
value is markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ds4_common.contract.frontend import ToolSyntax
from ds4_worker.parse.answer import Answer
from ds4_worker.parse.arguments import Arguments
from ds4_worker.parse.blocks import (
    NotACall,
    expect,
    expect_closer,
    name_before,
    skip_space,
)
from ds4_worker.parse.content import blocks
from ds4_worker.parse.events import Tool
from ds4_worker.parse.lark import Calls, Lark
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Delimiters, Source, Step
from ds4_worker.parse.tag_values import tag_value

_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"
_NAME_END: Final = Delimiters(">")


def delimiters(tools: ToolSyntax) -> tuple[str, ...]:
    """The delimiters that may be tokens."""
    return tools.open, tools.close, _FUNCTION_END, _PARAMETER_END


def calls(lark: Lark, syntax: ToolSyntax, tools: Sequence[Tool], *, parallel: bool) -> Calls:
    """The grammar of calls."""
    newline = "\n" if syntax.wrap_newlines else ""

    def tags(key: str, kind: str) -> tuple[str, str]:
        return f"{_PARAMETER}{key}>{newline}", f"{newline}{_PARAMETER_END}\n"

    def call(tool: Tool) -> str:
        begin = lark.literal(f"\n{_FUNCTION}{tool.name}>\n")
        end = lark.literal(f"{_FUNCTION_END}\n{syntax.close}")
        return f"{begin} {lark.parameters(tool, tags)} {end}"

    any_call = lark.choice([call(tool) for tool in tools])
    return Calls(syntax.open, lark.list_of(any_call, f"\n{syntax.open}", parallel=parallel))


def program(
    source: Source, answer: Answer, marks: Marks, tools: ToolSyntax, dropped: str
) -> Step[None]:
    """Reads an answer to its end. `dropped` is markup that means nothing here."""
    opener = marks.of(tools.open)
    yield from blocks(source, answer, opener, dropped, lambda: _block(source, answer, marks, tools))


def _block(source: Source, answer: Answer, marks: Marks, tools: ToolSyntax) -> Step[None]:
    value_end = Delimiters(marks.of(_PARAMETER_END))
    yield from skip_space(source)
    yield from expect(source, _FUNCTION)
    name, _ = yield from name_before(source, _NAME_END)
    if name not in answer.tools:
        raise NotACall
    arguments = Arguments(answer, name)
    yield from skip_space(source)
    while not (yield from source.accept(marks.of(_FUNCTION_END))):
        yield from expect(source, _PARAMETER)
        key, _ = yield from name_before(source, _NAME_END)
        kinds = arguments.key(key)
        yield from tag_value(source, arguments, kinds, value_end, wrapped=tools.wrap_newlines)
        yield from skip_space(source)
    arguments.end()
    yield from expect_closer(source, marks.of(tools.close))
    answer.close_call()
