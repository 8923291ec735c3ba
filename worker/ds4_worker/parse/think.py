"""Reasoning between two tags, then an answer: `<think>...</think>` and its like.

Owns: reasoning as `REASONING_THINK_TAGS` declares it. The first close ends it; a later one that is
a token is markup and dropped, one that is only spelled is text. Reasoning begins in the prompt
(`in_reasoning`), or with the opener as the first thing of the answer.
"""

from __future__ import annotations

import re

from ds4_common.contract.frontend import ReasoningSyntax
from ds4_worker.parse.answer import Answer
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Delimiters, Source, Step

_SPACE = re.compile(r"\s+")
_NEWLINES = re.compile(r"\n+")


def delimiters(reasoning: ReasoningSyntax) -> tuple[str, ...]:
    """The delimiters that may be tokens."""
    return reasoning.open, reasoning.close, reasoning.terminal_marker


def think(
    source: Source, answer: Answer, marks: Marks, reasoning: ReasoningSyntax, *, inside: bool
) -> Step[None]:
    """Reads the reasoning, if there is any, up to the answer or a tool block that ends it."""
    space: list[str] = []
    yield from source.run(_SPACE, space.append)
    opened = yield from source.accept(marks.of(reasoning.open))
    if not opened and not inside:
        answer.content("".join(space))
        return
    close = marks.of(reasoning.close)
    terminal = marks.of(reasoning.terminal_marker)
    stops = Delimiters(*filter(None, (close, terminal)))
    if not reasoning.wrap_newlines:
        if not opened:
            answer.reasoning("".join(space))
        found = yield from source.until(stops, answer.reasoning)
    else:
        held: list[str] = []
        if opened:
            yield from source.run(_NEWLINES, lambda newlines: None)
        else:
            _without_last(answer, held, "".join(space).lstrip("\n"))
        found = yield from source.until(stops, lambda text: _without_last(answer, held, text))
        if not found:
            answer.reasoning("".join(held))
    if found and found == terminal:
        source.unread(found)
    elif found and reasoning.wrap_newlines:
        yield from source.run(_NEWLINES, lambda newlines: None)


def _without_last(answer: Answer, held: list[str], text: str) -> None:
    """Reasoning whose newlines at the end wrap its closer."""
    kept = text.rstrip("\n")
    if kept:
        answer.reasoning("".join(held))
        held.clear()
        answer.reasoning(kept)
    if len(kept) < len(text):
        held.append(text[len(kept) :])
