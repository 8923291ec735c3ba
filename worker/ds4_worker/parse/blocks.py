"""Tool blocks: from an opener to a complete call, or back to text.

Owns: what happens when a block is not what its opener promised. Until a call is opened, everything
read becomes text again; from then on the call stays without its end, and the rest is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from ds4_worker.parse.answer import Answer
from ds4_worker.parse.source import Delimiters, Source, Step

MAX_NAME: Final = 1024  # characters of a name, a key or a tag
MAX_HEAD: Final = 1 << 16  # characters held back before the name of a call is known

_SPACE = re.compile(r"\s+")


def _ignore(text: str) -> None:
    pass


class NotACall(Exception):
    """The text is not what the syntax asks for. Never leaves the parser."""


def attempt(answer: Answer, block: Step[None]) -> Step[None]:
    """Reads a block that `answer.begin_block` began."""
    try:
        yield from block
    except NotACall:
        answer.give_back()


def skip_space(source: Source, emit: Callable[[str], object] = _ignore) -> Step[None]:
    yield from source.run(_SPACE, emit)


def accept_any(source: Source, texts: Iterable[str]) -> Step[str]:
    """Consumes the first of `texts` that comes next; "" if none does."""
    for text in texts:
        if (yield from source.accept(text)):
            return text
    return ""


def expect(source: Source, text: str) -> Step[None]:
    if not (yield from source.accept(text)):
        raise NotACall


def expect_closer(source: Source, closer: str) -> Step[None]:
    """The closer of a block whose call is complete. The end of the sequence closes it as well:
    models that stop at a token of their own leave the closer out."""
    yield from skip_space(source)
    if not source.finished:
        yield from expect(source, closer)


def name_before(source: Source, delimiters: Delimiters) -> Step[tuple[str, str]]:
    """A short text and the delimiter after it."""
    found = yield from source.short(delimiters, MAX_NAME)
    if found is None:
        raise NotACall
    return found


def bounded(emit: Callable[[str], object], most: int) -> Callable[[str], None]:
    """`emit`, for at most that many characters."""
    size = 0

    def take(text: str) -> None:
        nonlocal size
        size += len(text)
        if size > most:
            raise NotACall
        emit(text)

    return take
