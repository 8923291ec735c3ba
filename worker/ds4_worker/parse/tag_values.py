"""One raw value between tags: a string passed on as it comes, or anything else read whole."""

from __future__ import annotations

from collections.abc import Callable

from ds4_worker.parse.arguments import Arguments
from ds4_worker.parse.blocks import NotACall
from ds4_worker.parse.source import Delimiters, Source, Step

_STRING = frozenset({"string"})


def tag_value(
    source: Source,
    arguments: Arguments,
    kinds: frozenset[str],
    end: Delimiters,
    *,
    wrapped: bool = False,
) -> Step[None]:
    """Reads a value up to its closing tag. With `wrapped` one newline on each side is markup."""
    if wrapped:
        yield from source.accept("\n")
    if kinds == _STRING:
        string = arguments.string()
        held = _LastNewline(string.add) if wrapped else None
        if not (yield from source.until(end, held.add if held else string.add)):
            raise NotACall
        string.end()
        return
    parts: list[str] = []
    closed = yield from source.until(end, parts.append)
    text = "".join(parts)
    if not closed:
        arguments.raw(text)
        raise NotACall
    arguments.typed(text.removesuffix("\n") if wrapped else text, kinds)


class _LastNewline:
    """Passes text on, but for a newline at its end."""

    def __init__(self, emit: Callable[[str], object]) -> None:
        self._emit = emit
        self._held = ""

    def add(self, text: str) -> None:
        text = self._held + text
        kept = text.removesuffix("\n")
        self._held = text[len(kept) :]
        if kept:
            self._emit(kept)
