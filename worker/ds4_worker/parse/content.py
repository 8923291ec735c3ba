"""The visible answer: text up to the next tool block.

Owns: what happens between blocks. A syntax asks for its next opener, again after each block, until
there is none; where every block has the same opener, `blocks` does all of that.
"""

from __future__ import annotations

from collections.abc import Callable

from ds4_worker.parse.answer import Answer
from ds4_worker.parse.blocks import attempt
from ds4_worker.parse.source import Delimiters, Source, Step


class Content:
    """Where blocks begin, and which marks between them are nothing but markup."""

    def __init__(self, source: Source, answer: Answer, *openers: str, dropped: str = "") -> None:
        self._source = source
        self._answer = answer
        self._dropped = dropped
        self._delimiters = Delimiters(*filter(None, (*openers, dropped)))

    def next_opener(self) -> Step[str]:
        """Passes text on; the opener that was read, "" at the end of the sequence."""
        while True:
            found = yield from self._source.until(self._delimiters, self._answer.content)
            if not found or found != self._dropped:
                return found


def blocks(
    source: Source, answer: Answer, opener: str, dropped: str, block: Callable[[], Step[None]]
) -> Step[None]:
    """Reads an answer to its end: text, and after every `opener` a block."""
    content = Content(source, answer, opener, dropped=dropped)
    while found := (yield from content.next_opener()):
        answer.begin_block(found)
        yield from attempt(answer, block())
