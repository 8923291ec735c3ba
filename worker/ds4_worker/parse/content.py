"""The visible answer: text up to the next tool block.

Owns: what happens between blocks. A syntax calls `content` to find its opener, and calls it again
after each block, until it returns "".
"""

from __future__ import annotations

from ds4_worker.parse.answer import Answer
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
