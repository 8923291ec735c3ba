"""Tool calls in DSML:

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

`string` says whether a value is raw text or JSON. The wrapper's word is the contract's. Three
dialects occur and may mix: the prefix whole, without its first bar, and absent; a wrapper may be
missing where the prefix shows what is meant. Where the prefix is a token, only the token is one.
"""  # noqa: RUF002 - the bars are full-width on purpose

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from ds4_common.contract.frontend import ToolSyntax
from ds4_worker.parse.answer import Answer
from ds4_worker.parse.arguments import Arguments
from ds4_worker.parse.blocks import (
    NotACall,
    accept_any,
    attempt,
    expect,
    name_before,
    skip_space,
)
from ds4_worker.parse.content import Content
from ds4_worker.parse.entities import Unescaper, escape, unescape
from ds4_worker.parse.events import Tool
from ds4_worker.parse.json_reader import json_value
from ds4_worker.parse.lark import Calls, Lark
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Delimiters, Source, Step

_OPEN = re.compile(r"<(.*?)(\w+)>")
_ATTRIBUTES = re.compile(r'\s*(?:string="(true|false)")?\s*')
_QUOTE: Final = Delimiters('"')
_TAG_END: Final = Delimiters(">")
_MAX_NESTING: Final = 16


def split_opener(opener: str) -> tuple[str, str]:
    """`<｜DSML｜tool_calls>` as the prefix of all tags and the wrapper's word."""  # noqa: RUF002
    match = _OPEN.fullmatch(opener)
    return (match[1], match[2]) if match else ("", opener)


def delimiters(tools: ToolSyntax) -> tuple[str, ...]:
    """The delimiters that may be tokens."""
    return (split_opener(tools.open)[0],)


def calls(lark: Lark, syntax: ToolSyntax, tools: Sequence[Tool], *, parallel: bool) -> Calls:
    """The grammar of calls."""
    prefix, _ = split_opener(syntax.open)

    def tags(key: str, kind: str) -> tuple[str, str]:
        raw = "true" if kind == "string" else "false"
        begin = f'<{prefix}parameter name="{escape(key)}" string="{raw}">'
        return begin, f"</{prefix}parameter>\n"

    def call(tool: Tool) -> str:
        begin = lark.literal(f'<{prefix}invoke name="{escape(tool.name)}">\n')
        end = lark.literal(f"</{prefix}invoke>\n")
        return f"{begin} {lark.parameters(tool, tags)} {end}"

    any_call = lark.choice([call(tool) for tool in tools])
    several = lark.list_of(any_call, "", parallel=parallel)
    begin, end = lark.literal("\n"), lark.literal(syntax.close)
    return Calls(syntax.open, f"{begin} {several} {end}")


def program(
    source: Source, answer: Answer, marks: Marks, tools: ToolSyntax, dropped: str
) -> Step[None]:
    """Reads an answer to its end. `dropped` is markup that means nothing here."""
    prefix, word = split_opener(tools.open)
    whole = marks.of(prefix)
    reader = _Reader(source, answer, tuple(dict.fromkeys((whole, prefix[1:], ""))), word)
    wrappers = [f"<{prefix}{word}>" for prefix in reader.prefixes]
    invoke = f"<{whole}invoke"
    content = Content(source, answer, *wrappers, invoke, dropped=dropped)
    while opener := (yield from content.next_opener()):
        answer.begin_block(opener)
        if opener == invoke:
            yield from attempt(answer, reader.bare_invoke())
        else:
            yield from attempt(answer, reader.wrapped())


class _Reader:
    """The tags inside a block."""

    def __init__(
        self, source: Source, answer: Answer, prefixes: tuple[str, ...], word: str
    ) -> None:
        self.prefixes = prefixes
        self._source = source
        self._answer = answer
        self._invokes = [f"<{prefix}invoke" for prefix in prefixes]
        self._invoke_ends = [f"</{prefix}invoke>" for prefix in prefixes]
        self._parameters = {f"<{prefix}parameter": prefix for prefix in prefixes}
        self._wrapper_ends = [f"</{prefix}{word}>" for prefix in prefixes]

    def wrapped(self) -> Step[None]:
        source = self._source
        yield from skip_space(source)
        while not (yield from accept_any(source, self._wrapper_ends)):
            if not (yield from accept_any(source, self._invokes)):
                raise NotACall
            yield from self._invoke()
            yield from skip_space(source)
        self._answer.end_block()

    def bare_invoke(self) -> Step[None]:
        yield from self._invoke()

    def _invoke(self) -> Step[None]:
        source, answer = self._source, self._answer
        name = unescape((yield from self._name()))
        rest, _ = yield from name_before(source, _TAG_END)
        if rest.strip() or name not in answer.tools:
            raise NotACall
        arguments = Arguments(answer, name)
        yield from skip_space(source)
        while not (yield from accept_any(source, self._invoke_ends)):
            tag = yield from accept_any(source, self._parameters)
            if not tag:
                raise NotACall
            yield from self._parameter(arguments, self._parameters[tag], _MAX_NESTING)
            yield from skip_space(source)
        arguments.end()
        answer.close_call()

    def _name(self) -> Step[str]:
        """The attribute that every tag begins with."""
        yield from skip_space(self._source)
        yield from expect(self._source, 'name="')
        name, _ = yield from name_before(self._source, _QUOTE)
        return name

    def _parameter(self, arguments: Arguments, prefix: str, depth: int) -> Step[None]:
        source = self._source
        arguments.key(unescape((yield from self._name())))
        text, _ = yield from name_before(source, _TAG_END)
        attributes = _ATTRIBUTES.fullmatch(text)
        if attributes is None:
            raise NotACall
        close = f"</{prefix}parameter>"
        if attributes[1] == "false":
            yield from json_value(source, self._answer, arguments.raw)
            yield from skip_space(source)
            yield from expect(source, close)
            return
        space: list[str] = []
        if attributes[1] is None:
            yield from skip_space(source, space.append)
            tag = yield from accept_any(source, self._parameters)
            if tag:
                yield from self._object(arguments, tag, close, depth - 1)
                return
        string = arguments.string()
        unescaper = Unescaper(string.add)
        unescaper.add("".join(space))
        if not (yield from source.until(Delimiters(close), unescaper.add)):
            raise NotACall
        unescaper.end()
        string.end()

    def _object(self, arguments: Arguments, tag: str, close: str, depth: int) -> Step[None]:
        """Parameters inside a parameter: a nested object."""
        if not depth:
            raise NotACall
        arguments.begin_object()
        while tag:
            yield from self._parameter(arguments, self._parameters[tag], depth)
            yield from skip_space(self._source)
            tag = yield from accept_any(self._source, self._parameters)
        arguments.end()
        yield from expect(self._source, close)
