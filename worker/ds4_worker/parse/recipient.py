"""Answers in recipient frames, with tool calls in ATEM:

    <|start|>assistant to=self<|message|>...<|eom|>
    <|start|>assistant to=NAME<|message|><atem:function_calls>
    <atem:invoke name="NAME">
    <atem:parameter name="KEY">VALUE</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|>
    <|start|>assistant to=user<|message|>...

Owns reasoning and tools together. `self` is reasoning; `user` and `commentary` are visible; every
other recipient is a tool whose frame holds one invocation of that name. A recipient `ns.*` takes
any name of that namespace, the generic one (the contract's separator) any registered name. Header
controls count only as tokens; a frame's end never ends the sequence.
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
from ds4_worker.parse.lark import Envelope, Lark
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Delimiters, Source, Step
from ds4_worker.parse.tag_values import tag_value

START: Final = "<|start|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|eom|>"
TURN_END: Final = "<|eot|>"

_HEADER = re.compile(r"\s*(?:assistant)?\s*(?:to=(?P<recipient>\S+)\s*)?")
_PARTIAL = re.compile(r"\s*\w*\s*(?:t|to|to=\S*)?")
_INVOKE: Final = '<atem:invoke name="'
_INVOKE_END: Final = "</atem:invoke>"
_PARAMETER: Final = '<atem:parameter name="'
_VALUE_END: Final = Delimiters("</atem:parameter>")
_ATTRIBUTE_END: Final = Delimiters('">')


def delimiters(tools: ToolSyntax) -> tuple[str, ...]:
    """The delimiters that may be tokens."""
    return START, MESSAGE, END, TURN_END


def envelope(lark: Lark, syntax: ToolSyntax, wanted: Envelope) -> str:
    """The grammar of a whole answer: a frame to `self`, then one to the user or frames to tools."""
    again = lark.literal(f"{START}assistant")
    self_end = lark.text_until(END)
    think = (
        f"{self_end} {again}"
        if wanted.in_reasoning
        else f"({lark.literal(f' to=self{MESSAGE}')} {self_end} {again})?"
    )
    parts = []
    if not wanted.must_call:
        parts.append(f"{lark.literal(f' to=user{MESSAGE}')} {wanted.answer}")
    if wanted.tools:
        frames = lark.choice([_frame_rule(lark, syntax, tool) for tool in wanted.tools])
        separator = f"{END}{START}assistant"
        parts.append(lark.list_of(frames, separator, parallel=wanted.parallel))
    return f"{think} {lark.choice(parts)}"


def _frame_rule(lark: Lark, syntax: ToolSyntax, tool: Tool) -> str:
    def tags(key: str, kind: str) -> tuple[str, str]:
        return f'{_PARAMETER}{escape(key)}">', "</atem:parameter>\n"

    begin = f' to={tool.name}{MESSAGE}{syntax.open}\n{_INVOKE}{escape(tool.name)}">\n'
    end = lark.literal(f"{_INVOKE_END}\n{syntax.close}")
    return f"{lark.literal(begin)} {lark.parameters(tool, tags)} {end}"


def program(
    source: Source, answer: Answer, marks: Marks, tools: ToolSyntax, *, in_reasoning: bool
) -> Step[None]:
    """Reads an answer to its end. `in_reasoning`: the prompt ends inside a frame to `self`;
    otherwise inside the header of a frame."""
    frames = _Frames(source, answer, marks, tools)
    if in_reasoning:
        found = yield from frames.body("self")
    else:
        answer.begin_block("")
        found = yield from frames.frame()
    while found:
        found = yield from frames.next(found)


class _Frames:
    """Frames, one after another."""

    def __init__(self, source: Source, answer: Answer, marks: Marks, tools: ToolSyntax) -> None:
        self._source = source
        self._answer = answer
        self._tools = tools
        self._start, self._message = marks.of(START), marks.of(MESSAGE)
        ends = dict.fromkeys((marks.of(END), marks.of(TURN_END)))
        self._starts = Delimiters(self._start, *ends)
        self._header_end = Delimiters(self._message)

    def next(self, found: str) -> Step[str]:
        """What follows a control token: a frame after a start, else text that nobody framed."""
        if found == self._start:
            self._answer.begin_block(found)
            return (yield from self.frame())
        yield from skip_space(self._source)
        return (yield from self._source.until(self._starts, self._answer.content))

    def frame(self) -> Step[str]:
        """A header, which `begin_block` began, and its body; the control token after them."""
        answer = self._answer
        found = yield from self._source.short(self._header_end, MAX_NAME)
        # A prompt may leave the start token to what it holds of the answer.
        header = _HEADER.fullmatch(found[0].removeprefix(self._start)) if found else None
        if header is not None:
            return (yield from self.body(header["recipient"] or "user"))
        if self._source.finished and _PARTIAL.fullmatch(answer.block_text(self._start)):
            answer.drop_block()  # the sequence ended inside a header
        else:
            answer.give_back()
        return (yield from self._source.until(self._starts, answer.content))

    def body(self, recipient: str) -> Step[str]:
        """The rest of a frame; the control token after it."""
        answer = self._answer
        emit = answer.content
        if recipient in ("self", "user", "commentary"):
            answer.drop_block()
            emit = answer.reasoning if recipient == "self" else emit
        else:
            yield from attempt(answer, self._invocation(recipient))
        return (yield from self._source.until(self._starts, emit))

    def _invocation(self, recipient: str) -> Step[None]:
        source, answer = self._source, self._answer
        yield from skip_space(source)
        yield from expect(source, self._tools.open)
        yield from skip_space(source)
        yield from expect(source, _INVOKE)
        written, _ = yield from name_before(source, _ATTRIBUTE_END)
        name = self._registered(unescape(written))
        if name is None or not self._takes(recipient, written, name):
            raise NotACall
        arguments = Arguments(answer, name)
        yield from skip_space(source)
        while not (yield from source.accept(_INVOKE_END)):
            yield from expect(source, _PARAMETER)
            key, _ = yield from name_before(source, _ATTRIBUTE_END)
            yield from tag_value(source, arguments, arguments.key(unescape(key)), _VALUE_END)
            yield from skip_space(source)
        arguments.end()
        yield from skip_space(source)
        yield from expect(source, self._tools.close)
        answer.close_call()

    def _takes(self, recipient: str, written: str, name: str) -> bool:
        """Whether a frame to `recipient` may invoke this: its own name, any of its namespace
        (`ns.*`), or any at all."""
        if recipient.endswith(".*"):
            return written.startswith(recipient[:-1])
        return recipient in (self._tools.separator, written, name)

    def _registered(self, written: str) -> str | None:
        """The tool of that name. A template that knows tools by namespace shows `f` as `f.f`."""
        if written in self._answer.tools:
            return written
        head, _, tail = written.partition(".")
        return head if head == tail and head in self._answer.tools else None
