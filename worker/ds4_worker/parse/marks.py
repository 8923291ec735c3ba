"""From presented tokens to marked text: text in which delimiter tokens cannot be mistaken.

Owns: which delimiters are tokens. One that the vocabulary holds as a single special token becomes a
lone surrogate, a character that no decoded text contains; the same characters spelled by other
tokens stay as they are. So every parser behind it works on one string and still obeys token ids.

Text may lag behind its tokens (half a character, a stop string that is not decided yet), so marks
are placed by position: this module decodes the tokens a second time, only to count characters.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

_FIRST: Final = 0xD800
_MOST: Final = 0x0800


class Vocabulary(Protocol):
    """What a parser asks of a tokenizer; see `ds4_common.tokenizer.Tokenizer`."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def is_control(self, token: int) -> bool: ...

    def is_special(self, token: int) -> bool: ...


class Marks:
    """The delimiters of one syntax over one vocabulary. Shared by sequences, never changed."""

    def __init__(self, vocabulary: Vocabulary, delimiters: Iterable[str]) -> None:
        self.vocabulary = vocabulary
        self.characters: dict[int, str] = {}
        self._by_text: dict[str, str] = {}
        self._texts: dict[int, str] = {}
        for text in dict.fromkeys(delimiters):
            ids = vocabulary.encode(text, add_special=False, parse_special=True) if text else []
            if len(ids) == 1 and vocabulary.is_special(ids[0]) and ids[0] not in self.characters:
                assert len(self.characters) < _MOST
                mark = chr(_FIRST + len(self.characters))
                self.characters[ids[0]] = self._by_text[text] = mark
                self._texts[ord(mark)] = text

    def of(self, text: str) -> str:
        """How marked text shows this text if its delimiters are tokens, as in a rendered prompt."""
        for delimiter in sorted(self._by_text, key=len, reverse=True):
            text = text.replace(delimiter, self._by_text[delimiter])
        return text

    def plain(self, text: str) -> str:
        """Marked text as the model wrote it: every mark as its token's text."""
        return text if text.isascii() else text.translate(self._texts)


class MarkedText:
    """The tokens of one sequence as marked text."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = 0  # characters that the tokens so far stand for
        self._base = 0  # characters that have left
        self._held = ""  # received, but inside a mark that has not arrived whole
        self._waiting: deque[tuple[int, int, str]] = deque()  # begin, end, mark

    def push(self, token: int, text: str) -> str:
        """Takes the next token and the text that was presented with it: text of a
        `StreamDetokenizer` that shows no control tokens. A negative token is none: text that is
        left at the end."""
        if not self._marks.characters:
            return text
        if token >= 0:
            self._place(token)
        if not self._waiting:
            self._base += len(text)
            return text
        held = self._held + text
        out: list[str] = []
        while self._waiting and self._waiting[0][1] <= self._base + len(held):
            begin, end, mark = self._waiting.popleft()
            out += held[: max(0, begin - self._base)], mark
            held = held[max(0, end - self._base) :]
            self._base = end
        free = len(held)
        if self._waiting:
            free = max(0, min(free, self._waiting[0][0] - self._base))
        self._base += free
        self._held = held[free:]
        return "".join(out) + held[:free]

    def finish(self) -> str:
        """The sequence ended: the part of a mark that was presented before a stop cut it."""
        held, self._held = self._held, ""
        return held

    def _place(self, token: int) -> None:
        vocabulary = self._marks.vocabulary
        mark = self._marks.characters.get(token)
        if vocabulary.is_control(token):
            if mark is not None:
                self._waiting.append((self._decoded, self._decoded, mark))
            return
        self._decoded += len(self._decoder.decode(vocabulary.token_bytes(token)))
        if mark is not None:
            width = len(self._marks.plain(mark))
            self._waiting.append((self._decoded - width, self._decoded, mark))
