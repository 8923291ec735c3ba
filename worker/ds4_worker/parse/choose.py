"""Chooses the parser of an answer by the syntax that the prepared contract names.

Owns: the way from the frontend record to an `AnswerParser`. Knows syntaxes, never models. A syntax
is a module with `delimiters` (what may be a token) and `program` (a generator that reads an answer
to its end); it is imported when a model that uses it is served.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, cast

from ds4_common.contract.frontend import Frontend
from ds4_common.errors import ContractError
from ds4_worker.parse import think
from ds4_worker.parse.answer import Answer
from ds4_worker.parse.content import Content
from ds4_worker.parse.events import AnswerEvent, AnswerParser, Text, Tool
from ds4_worker.parse.marks import MarkedText, Marks, Vocabulary
from ds4_worker.parse.source import Source, Step

# Blocks inside an answer: they go with any reasoning tags, or none.
TAGGED: Final = {
    "TOOL_TAGGED_JSON": "tagged_json",
    "TOOL_FUNCTION_TAGS": "function_tags",
    "TOOL_ARGUMENT_TAGS": "argument_tags",
    "TOOL_DSML": "dsml",
    "TOOL_BARE_JSON": "bare_json",
    "TOOL_BRACKET_JSON": "bracket_json",
}
# Frames around everything: reasoning, answer and calls are one syntax.
FRAMED: Final = {
    "TOOL_XTML": "xtml",
    "TOOL_RECIPIENT_ATEM": "recipient",
    "TOOL_HARMONY": "harmony",
}


def make_parser(
    frontend: Frontend,
    tokenizer: Vocabulary,
    *,
    tools: Sequence[Tool],
    in_reasoning: bool,
    new_call_id: Callable[[], str],
    envelope: str = "",
) -> AnswerParser:
    """A parser for one sequence.

    `tools` are the functions that the request lets the model call; a call of any other name is
    text. `in_reasoning` says that the prompt ends inside reasoning. `new_call_id` makes the id of a
    call, once per call. `envelope` is what the prompt holds of the assistant's own message, after
    what begins it: frames continue where it leaves them. Raises ContractError for a syntax that no
    parser here knows.
    """
    if frontend.tools is None and frontend.reasoning is None:
        return PlainParser()
    source = Source()
    marks = marks_of(frontend, tokenizer)
    answer = Answer(source, marks, tools, new_call_id)
    framed = frontend.tools is not None and frontend.tools.syntax in FRAMED
    before = envelope if framed else ""
    program = _program(source, answer, marks, frontend, in_reasoning and not before)
    parser = StreamingParser(MarkedText(marks), source, answer, program)
    if before:
        parser.resume(marks.of(before))
    return parser


def marks_of(frontend: Frontend, tokenizer: Vocabulary) -> Marks:
    """The delimiters of a model's syntax, looked up in its vocabulary once."""
    return _marks(cast(Hashable, tokenizer), syntax_delimiters(frontend))


@functools.lru_cache(maxsize=8)
def _marks(tokenizer: Any, delimiters: tuple[str, ...]) -> Marks:
    return Marks(tokenizer, delimiters)  # a process serves one tokenizer; it is its own key


def syntax_delimiters(frontend: Frontend) -> tuple[str, ...]:
    """The delimiters of a model's syntax: each that is one token acts only as that token."""
    found: tuple[str, ...] = ()
    if frontend.reasoning is not None:
        found += think.delimiters(frontend.reasoning)
    if frontend.tools is not None:
        found += syntax_module(frontend.tools.syntax).delimiters(frontend.tools)
    return tuple(filter(None, found))


def syntax_module(syntax: str) -> Any:
    """The module of a tool syntax."""
    name = TAGGED.get(syntax) or FRAMED.get(syntax)
    if name is None:
        raise ContractError(
            f"frontend, tools: syntax: got {syntax!r}, expected one of "
            f"{', '.join((*TAGGED, *FRAMED))}; owner and worker must be of the same version"
        )
    return importlib.import_module(f"ds4_worker.parse.{name}")


class PlainParser:
    """A model that writes neither reasoning nor tool calls."""

    block = ""

    def push(self, token: int, text: str) -> list[AnswerEvent]:
        return [Text(text)] if text else []

    def finish(self) -> list[AnswerEvent]:
        return []


class StreamingParser:
    """Feeds a program token by token."""

    def __init__(
        self, marked: MarkedText, source: Source, answer: Answer, program: Step[None]
    ) -> None:
        self._marked = marked
        self._source = source
        self._answer = answer
        self._program = program
        next(program)  # up to where it needs text

    def resume(self, marked: str) -> None:
        """Reads what the prompt holds of the answer: its text is known already, a call that it
        leaves open is not."""
        self._source.feed(marked)
        next(self._program)
        self._answer.forget_text()

    def push(self, token: int, text: str) -> list[AnswerEvent]:
        marked = self._marked.push(token, text)
        if not marked:
            return []
        self._source.feed(marked)
        next(self._program)
        return self._answer.drain()

    def finish(self) -> list[AnswerEvent]:
        self._source.feed(self._marked.finish())
        self._source.end()
        for _ in self._program:  # one step: nothing is waited for any more
            pass
        self._answer.end()
        return self._answer.drain()

    @property
    def block(self) -> str:
        return self._answer.block


def _program(
    source: Source, answer: Answer, marks: Marks, frontend: Frontend, in_reasoning: bool
) -> Step[None]:
    reasoning, tools = frontend.reasoning, frontend.tools
    if tools is not None and tools.syntax in FRAMED:
        frames = syntax_module(tools.syntax).program
        yield from frames(source, answer, marks, tools, in_reasoning=in_reasoning)
        return
    dropped = ""
    if reasoning is not None:
        yield from think.think(source, answer, marks, reasoning, inside=in_reasoning)
        if marks.of(reasoning.close) != reasoning.close:
            dropped = marks.of(reasoning.close)
    if tools is not None:
        yield from syntax_module(tools.syntax).program(source, answer, marks, tools, dropped)
        return
    content = Content(source, answer, dropped=dropped)
    while (yield from content.next_opener()):
        pass
