"""Tool calls as JSON between tags: `<tool_call>{"name": N, "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from ds4_common.contract.frontend import ToolSyntax
from ds4_worker.parse.answer import Answer
from ds4_worker.parse.blocks import expect_closer, skip_space
from ds4_worker.parse.content import blocks
from ds4_worker.parse.events import Tool
from ds4_worker.parse.json_reader import call_object
from ds4_worker.parse.lark import Calls, Lark
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Source, Step


def delimiters(tools: ToolSyntax) -> tuple[str, ...]:
    """The delimiters that may be tokens."""
    return tools.open, tools.close


def calls(lark: Lark, syntax: ToolSyntax, tools: Sequence[Tool], *, parallel: bool) -> Calls:
    """The grammar of calls."""
    call = lark.choice(
        [
            lark.json_call(tool, before="\n", key="arguments", after=f"\n{syntax.close}")
            for tool in tools
        ]
    )
    return Calls(syntax.open, lark.list_of(call, f"\n{syntax.open}", parallel=parallel))


def program(
    source: Source, answer: Answer, marks: Marks, tools: ToolSyntax, dropped: str
) -> Step[None]:
    """Reads an answer to its end. `dropped` is markup that means nothing here."""
    opener = marks.of(tools.open)
    yield from blocks(
        source, answer, opener, dropped, lambda: _block(source, answer, marks.of(tools.close))
    )


def _block(source: Source, answer: Answer, close: str) -> Step[None]:
    yield from skip_space(source)
    yield from call_object(source, answer)
    yield from expect_closer(source, close)
    answer.close_call()
