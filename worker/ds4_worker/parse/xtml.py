"""Answers in XTML: channels and tool calls as tags of three control tokens.

    <|open|>think<|sep|>...<|close|>think<|sep|>
    <|open|>response<|sep|>...<|close|>response<|sep|>
    <|open|>tools<|sep|>
    <|open|>call tool="NAME" index="1"<|sep|>
    <|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>
    <|close|>call<|sep|>
    <|close|>tools<|sep|>

Owns reasoning and tools together: channels are frames around both. Values of type string are raw
text, others JSON; a call may instead hold one `json` tag with all its arguments.
"""

from __future__ import annotations

import re
from typing import Final

from ds4_common.contract.frontend import ToolSyntax
from ds4_worker.parse.answer import Answer
from ds4_worker.parse.arguments import Arguments
from ds4_worker.parse.blocks import MAX_NAME, NotACall, attempt, expect, name_before, skip_space
from ds4_worker.parse.entities import escape, unescape
from ds4_worker.parse.events import Tool
from ds4_worker.parse.json_reader import arguments_object, json_value
from ds4_worker.parse.lark import Envelope, Lark
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Delimiters, Source, Step

OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"

_ATTRIBUTE = re.compile(r'\s(\w+)="([^"]*)"')
_TAGS: Final = ("think", "response", "tools", "message")


def delimiters(tools: ToolSyntax) -> tuple[str, ...]:
    """The delimiters that may be tokens."""
    return OPEN, CLOSE, SEP


def envelope(lark: Lark, syntax: ToolSyntax, wanted: Envelope) -> str:
    """The grammar of a whole answer: reasoning, the answer or calls, the end of the message. A
    prompt that does not end inside reasoning may end inside the response."""
    think_end = lark.text_until(f"{CLOSE}think{SEP}")
    begin, end = lark.literal(f"{OPEN}response{SEP}"), lark.literal(f"{CLOSE}response{SEP}")
    think = think_end
    if not wanted.in_reasoning:
        think = f"({lark.literal(f'{OPEN}think{SEP}')} {think_end})?"
        begin = f"({begin})?"
    parts = []
    if not wanted.must_call:
        parts.append(f"{begin} {wanted.answer} {end}")
    if wanted.tools:
        calls = [_call_rule(lark, tool) for tool in wanted.tools]
        several = lark.list_of(lark.choice(calls), "", parallel=wanted.parallel)
        tools = f"{lark.literal(syntax.open)} {several} {lark.literal(syntax.close)}"
        parts.append(f"({begin} {end})? {tools}")
    message_end = lark.literal(f"{CLOSE}message{SEP}")
    return f"{think} {lark.choice(parts)} ({message_end})?"


def _call_rule(lark: Lark, tool: Tool) -> str:
    def tags(key: str, kind: str) -> tuple[str, str]:
        begin = f'{OPEN}argument key="{escape(key)}" type="{kind}"{SEP}'
        return begin, f"{CLOSE}argument{SEP}"

    begin = lark.literal(f'{OPEN}call tool="{escape(tool.name)}" index="')
    index, head_end = "/[0-9]{1,4}/", lark.literal(f'"{SEP}')
    end = lark.literal(f"{CLOSE}call{SEP}")
    return f"{begin} {index} {head_end} {lark.parameters(tool, tags)} {end}"


def program(
    source: Source, answer: Answer, marks: Marks, tools: ToolSyntax, *, in_reasoning: bool
) -> Step[None]:
    """Reads an answer to its end. `in_reasoning`: the prompt ends inside the think channel."""
    reader = _Reader(source, answer, marks)
    yield from reader.channels(in_reasoning)


class _Reader:
    """Channels, and the calls in the tools channel."""

    def __init__(self, source: Source, answer: Answer, marks: Marks) -> None:
        self._source = source
        self._answer = answer
        self._open, self._close = marks.of(OPEN), marks.of(CLOSE)
        self._sep = marks.of(SEP)
        self._tags = Delimiters(self._open, self._close)
        self._tag_end = Delimiters(self._sep)
        self._argument_end = Delimiters(self._closing("argument"))

    def channels(self, reasoning: bool) -> Step[None]:
        source, answer = self._source, self._answer
        channel = "think" if reasoning else ""
        while True:
            if not channel:
                yield from skip_space(source)  # layout between channels
            emit = answer.reasoning if channel == "think" else answer.content
            opener = yield from source.until(self._tags, emit)
            if not opener:
                return
            answer.begin_block(opener)
            channel = yield from self._switch(opener, channel)

    def _switch(self, opener: str, channel: str) -> Step[str]:
        """Reads a tag between channels; the channel after it."""
        source, answer = self._source, self._answer
        head = yield from source.short(self._tag_end, MAX_NAME)
        if head is None:
            tag = answer.block_text(opener)
            if source.finished and any(known.startswith(tag) for known in _TAGS):
                answer.drop_block()  # the sequence ended inside a tag
            else:
                answer.give_back()
            return channel or "response"
        tag = head[0].split(" ")[0]
        if tag not in _TAGS:
            answer.give_back()
            return channel or "response"
        if opener == self._open and tag == "tools":
            yield from attempt(answer, self._calls())
            return "response"
        answer.drop_block()
        return tag if opener == self._open else ""

    def _closing(self, tag: str) -> str:
        return f"{self._close}{tag}{self._sep}"

    def _calls(self) -> Step[None]:
        source = self._source
        yield from skip_space(source)
        while not (yield from source.accept(self._closing("tools"))):
            yield from self._call()
            yield from skip_space(source)
        self._answer.end_block()

    def _call(self) -> Step[None]:
        source, answer = self._source, self._answer
        attributes = yield from self._tag("call")
        name = attributes.get("tool", "")
        if name not in answer.tools:
            raise NotACall
        yield from skip_space(source)
        if (yield from source.accept(f"{self._open}json")):
            yield from name_before(source, self._tag_end)
            answer.open_call(name)
            yield from skip_space(source)
            yield from arguments_object(source, answer, answer.arguments)
            yield from skip_space(source)
            yield from expect(source, self._closing("json"))
            yield from skip_space(source)
            yield from expect(source, self._closing("call"))
        else:
            arguments = Arguments(answer, name)
            while not (yield from source.accept(self._closing("call"))):
                yield from self._argument(arguments)
                yield from skip_space(source)
            arguments.end()
        answer.close_call()

    def _argument(self, arguments: Arguments) -> Step[None]:
        source = self._source
        attributes = yield from self._tag("argument")
        if "key" not in attributes:
            raise NotACall
        arguments.key(attributes["key"])
        if attributes.get("type", "string") == "string":
            string = arguments.string()
            if not (yield from source.until(self._argument_end, string.add)):
                raise NotACall
            string.end()
        else:
            yield from json_value(source, self._answer, arguments.raw)
            yield from skip_space(source)
            yield from expect(source, self._closing("argument"))

    def _tag(self, name: str) -> Step[dict[str, str]]:
        """An opening tag; its attributes."""
        yield from expect(self._source, f"{self._open}{name}")
        text, _ = yield from name_before(self._source, self._tag_end)
        if _ATTRIBUTE.sub("", text).strip():
            raise NotACall
        return {key: unescape(value) for key, value in _ATTRIBUTE.findall(text)}
