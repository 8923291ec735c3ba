"""Answers in harmony channels:

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>
    {...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

Owns reasoning and tools together. `analysis` is reasoning, `final` and `commentary` are visible; a
message with a recipient is a call of that function, in whatever channel. `<|call|>` ends the
sequence, so it may be missing after complete arguments.
"""

from __future__ import annotations

import re
from typing import Final

from ds4_common.contract.frontend import ToolSyntax
from ds4_worker.parse.answer import Answer
from ds4_worker.parse.blocks import MAX_NAME, NotACall, attempt, skip_space
from ds4_worker.parse.json_reader import arguments_object
from ds4_worker.parse.lark import Envelope, Lark
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Delimiters, Source, Step

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
CONSTRAIN: Final = "<|constrain|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER = re.compile(
    r"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:<\|channel\|>\s*(\w+)[^<]*)?"
    r"(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_PARTIAL = re.compile(r"(?:<\|\w+\|>|[\w\s.=:-])*")
_NAMESPACE: Final = "functions."


def delimiters(tools: ToolSyntax) -> tuple[str, ...]:
    """The delimiters that may be tokens."""
    return START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS


def envelope(lark: Lark, syntax: ToolSyntax, wanted: Envelope) -> str:
    """The grammar of a whole answer: analysis, then a final message or a call. The token that ends
    a call ends the sequence, so there is one call."""
    again = lark.literal(f"{START}assistant")
    analysis_end = lark.text_until(ENDS[0])
    think = (
        f"{analysis_end} {again}"
        if wanted.in_reasoning
        else f"({lark.literal(f'{CHANNEL}analysis{MESSAGE}')} {analysis_end} {again})?"
    )
    parts = []
    if not wanted.must_call:
        parts.append(f"{lark.literal(f'{CHANNEL}final{MESSAGE}')} {wanted.answer}")
    for tool in wanted.tools:
        header = f"{CHANNEL}commentary to={_NAMESPACE}{tool.name} {CONSTRAIN}json{MESSAGE}"
        parts.append(f"{lark.literal(header)} {lark.arguments(tool)}")
    return f"{think} {lark.choice(parts)}"


def program(
    source: Source, answer: Answer, marks: Marks, tools: ToolSyntax, *, in_reasoning: bool
) -> Step[None]:
    """Reads an answer to its end. `in_reasoning`: the prompt ends inside an analysis message;
    otherwise inside the header of a message."""
    messages = _Messages(source, answer, marks)
    if in_reasoning:
        found = yield from source.until(messages.breaks, answer.reasoning)
    else:
        answer.begin_block("")
        found = yield from messages.message()
    while found:
        found = yield from messages.next(found)


class _Messages:
    """Messages, one after another."""

    def __init__(self, source: Source, answer: Answer, marks: Marks) -> None:
        self._source = source
        self._answer = answer
        self._start, self._channel = marks.of(START), marks.of(CHANNEL)
        self._ends = tuple(marks.of(end) for end in ENDS)
        self.breaks = Delimiters(self._start, self._channel, *self._ends)
        self._header_end = Delimiters(marks.of(MESSAGE))
        self._plain = answer.plain

    def next(self, found: str) -> Step[str]:
        """What follows a control token: a message after a header's, else text outside of all."""
        if found not in self._ends:
            self._answer.begin_block(found)
            return (yield from self.message())
        yield from skip_space(self._source)
        return (yield from self._source.until(self.breaks, self._answer.content))

    def message(self) -> Step[str]:
        """A header, which `begin_block` began, and its body; the control token after them."""
        source, answer = self._source, self._answer
        found = yield from source.short(self._header_end, MAX_NAME)
        header = self._plain(answer.block_text(""))
        emit = answer.content
        if found is None:
            if source.finished and _PARTIAL.fullmatch(header):
                answer.drop_block()  # the sequence ended inside a header
            else:
                answer.give_back()
        elif recipient := _RECIPIENT.search(header):
            yield from attempt(answer, self._call(recipient[1]))
        elif channel := _HEADER.fullmatch(header):
            answer.drop_block()
            emit = answer.reasoning if channel[1] == "analysis" else emit
        else:
            answer.give_back()
        return (yield from source.until(self.breaks, emit))

    def _call(self, recipient: str) -> Step[None]:
        source, answer = self._source, self._answer
        name = recipient.removeprefix(_NAMESPACE)
        if name not in answer.tools:
            raise NotACall
        yield from skip_space(source)
        first = yield from source.peek()
        if first in self._ends:
            answer.open_call(name)
            answer.arguments("{}")
        else:
            if first != "{":
                raise NotACall
            answer.open_call(name)
            yield from arguments_object(source, answer, answer.arguments)
            yield from skip_space(source)
        for end in self._ends:
            if (yield from source.accept(end)):
                break
        answer.close_call()
