"""Marked text as it arrives, read by code that looks as if all of it were there.

Owns: waiting for more text, searching for delimiters across pushes, and the log of what was read
since a block began. Parsers are generators over a `Source`: they pause where text is missing.
Everything is linear in the text: undecided text never exceeds a delimiter, unless a parser asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")
Step = Generator[None, None, _T]  # pauses when the text so far is used up


class Delimiters:
    """Texts to look for. None may be the beginning of another."""

    def __init__(self, *texts: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._prefixes = {text[:n] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, self._prefixes), default=0)

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def undecided(self, text: str, at: int) -> int:
        """Characters at the end of `text` that may be the beginning of a delimiter."""
        for n in range(min(self._longest, len(text) - at), 0, -1):
            if text[-n:] in self._prefixes:
                return n
        return 0


class Source:
    """The text of one sequence. All methods that return a `Step` consume what they return."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._log: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._ended = True

    # --- the log: exact text of a block ---

    def begin_log(self, already_read: str) -> None:
        """Starts to remember what is read, beginning with an opener that was just read."""
        self._log = [already_read]

    @property
    def logging(self) -> bool:
        return self._log is not None

    def log_size(self) -> int:
        """A place in the log, for `logged`."""
        return 0 if self._log is None else len(self._log)

    def logged(self, begin: int, end: int | None = None) -> str:
        """What was read between two such places."""
        return "" if self._log is None else "".join(self._log[begin:end])

    def end_log(self) -> None:
        self._log = None

    # --- reading ---

    @property
    def left(self) -> bool:
        """Whether text has arrived that is not consumed."""
        return self._at < len(self._text)

    @property
    def finished(self) -> bool:
        """Whether everything is consumed and nothing will come."""
        return self._ended and not self.left

    def more(self) -> Step[bool]:
        """Waits for text beyond what there is; False when there will be none."""
        if self._ended:
            return False
        yield
        return True

    def peek(self, count: int = 1) -> Step[str]:
        """The next characters, not consumed; fewer than `count` only at the end."""
        while len(self._text) - self._at < count and (yield from self.more()):
            pass
        return self._text[self._at : self._at + count]

    def take(self, count: int) -> str:
        """Consumes characters that `peek` returned."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        if self._log is not None and text:
            self._log.append(text)
        return text

    def unread(self, text: str) -> None:
        """Puts back what was just read. Not while a log is kept."""
        assert self._log is None
        assert self._text.endswith(text, 0, self._at)
        self._at -= len(text)

    def accept(self, text: str) -> Step[bool]:
        """Consumes `text` if that is what comes next."""
        count = 1
        while True:
            got = yield from self.peek(count)
            if not text.startswith(got) or len(got) < count:
                return False
            if count == len(text):
                self.take(count)
                return True
            count += 1

    def until(self, delimiters: Delimiters, emit: Callable[[str], object]) -> Step[str]:
        """Emits the text before the next delimiter piece by piece; the delimiter, "" at the end."""
        while True:
            found = delimiters.search(self._text, self._at)
            if found is not None:
                self._emit(found.start() - self._at, emit)
                return self.take(len(found[0]))
            held = delimiters.undecided(self._text, self._at)
            self._emit(len(self._text) - self._at - held, emit)
            if not (yield from self.more()):
                self._emit(held, emit)
                return ""

    def run(self, pattern: re.Pattern[str], emit: Callable[[str], object]) -> Step[None]:
        """Emits characters as long as `pattern` (a class with `+`) matches."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None:
                self._emit(len(found[0]), emit)
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def short(self, delimiters: Delimiters, most: int) -> Step[tuple[str, str] | None]:
        """A text of at most `most` characters and the delimiter after it; None without one."""
        parts: list[str] = []
        size = 0
        while True:
            found = delimiters.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            held = 0 if found else delimiters.undecided(self._text, self._at)
            piece = self.take(end - held - self._at)
            size += len(piece)
            parts.append(piece)
            if size > most:
                return None
            if found is not None:
                return "".join(parts), self.take(len(found[0]))
            if not (yield from self.more()):
                self.take(held)
                return None

    def _emit(self, count: int, emit: Callable[[str], object]) -> None:
        if count:
            emit(self.take(count))
