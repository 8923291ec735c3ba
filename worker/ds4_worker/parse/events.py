"""What an answer consists of, whatever the syntax in which the model writes it.

Owns: the events between the parsers of a model's output and the renderers of the four HTTP APIs,
and the Protocol of a parser. A parser is fed the presented tokens of one sequence, one at a time,
and gives the same events, fragments joined, for every split of the same tokens.

Delimiters that the vocabulary holds as one token act only as that token id; the same characters
spelled by other tokens are text. That is why a parser sees ids beside text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """More of the answer that the reader sees."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of the reasoning before the answer, without its delimiters."""

    text: str


class CallOpened(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins; `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments: the fragments of one call join to one JSON object."""

    index: int
    fragment: str


class CallClosed(msgspec.Struct, frozen=True, gc=False):
    """The call is complete and its arguments are valid JSON."""

    index: int


AnswerEvent = Text | Reasoning | CallOpened | CallArguments | CallClosed


class Tool(msgspec.Struct, frozen=True):
    """One function that the model may call, as every API's request reduces to it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}  # a JSON schema; empty: any object


class AnswerParser(Protocol):
    """Splits one sequence's output into events. Lives as long as the sequence."""

    def push(self, token: int, text: str) -> list[AnswerEvent]:
        """Takes the next presented token and the text that it completed ("" while a character is
        incomplete)."""

    def finish(self) -> list[AnswerEvent]:
        """The sequence ended (for whatever reason): releases what was held back. A call that is
        not complete stays without `CallClosed`."""

    @property
    def block(self) -> str:
        """The exact text of the tool calls so far, from the first opener to the last closer: what
        the next turn must render for the prefix to stay reusable. "" without a complete call."""
