"""Character entities of tag syntaxes, unescaped as text arrives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_CHARACTERS: Final = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_ENTITY = re.compile(f"&({'|'.join(_CHARACTERS)});")
_LONGEST: Final = len("&quot;")


def unescape(text: str) -> str:
    return _ENTITY.sub(lambda match: _CHARACTERS[match[1]], text) if "&" in text else text


def escape(text: str) -> str:
    """An attribute's value."""
    for name in ("amp", "lt", "gt", "quot"):
        text = text.replace(_CHARACTERS[name], f"&{name};")
    return text


class Unescaper:
    """Passes text on without entities; keeps the beginning of one until it is decided."""

    def __init__(self, emit: Callable[[str], object]) -> None:
        self._emit = emit
        self._held = ""

    def add(self, text: str) -> None:
        text = self._held + text
        begin = text.rfind("&", -_LONGEST + 1)
        if begin >= 0 and ";" not in text[begin:]:
            text, self._held = text[:begin], text[begin:]
        else:
            self._held = ""
        if text:
            self._emit(unescape(text))

    def end(self) -> None:
        if self._held:
            self._emit(self._held)
