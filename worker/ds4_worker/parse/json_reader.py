"""JSON as it arrives: checked, stripped of whitespace between tokens, passed on at once.

Owns: the JSON of tool calls. Digits and escapes stay as the model wrote them: nothing is rounded.
Repairs the two faults that models make inside strings and that have one meaning: a raw control
character is escaped, half a surrogate pair becomes U+FFFD. Refuses everything else (`NotACall`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from ds4_worker.parse.answer import Answer, json_text
from ds4_worker.parse.blocks import MAX_HEAD, MAX_NAME, NotACall, bounded, expect
from ds4_worker.parse.source import Source, Step

Emit = Callable[[str], object]

MAX_DEPTH: Final = 128
_MAX_NUMBER: Final = 1024  # characters; Python refuses to read integers beyond 4300 digits

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = re.compile(r"\\u[0-9a-fA-F]{4}")
_HIGH = re.compile(r"\\u[dD][89abAB]")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_CLOSERS: Final = {"{": "}", "[": "]"}


def json_value(source: Source, answer: Answer, emit: Emit) -> Step[None]:
    """One value."""
    open_: list[str] = []  # closers that are due
    while True:
        yield from skip_json_space(source)
        first = yield from source.peek()
        closed = True
        if first in _CLOSERS:
            closed = yield from _container(source, answer, emit, open_)
        elif first == '"':
            yield from _string(source, answer, emit)
        else:
            yield from _scalar(source, emit)
        if closed and not (yield from _next_member(source, answer, emit, open_)):
            return


def json_string(source: Source, answer: Answer, most: int = MAX_NAME) -> Step[str]:
    """The text of a string of at most `most` characters."""
    parts: list[str] = []
    yield from _string(source, answer, bounded(parts.append, most))
    return msgspec.json.decode("".join(parts), type=str)


def minified(text: str, answer: Answer) -> str | None:
    """A complete text as JSON; None if it is not one value."""
    source = Source()
    source.feed(text)
    source.end()
    parts: list[str] = []
    try:
        for _ in json_value(source, answer, parts.append):
            pass
        for _ in skip_json_space(source):
            pass
    except NotACall:
        return None
    return None if source.left else "".join(parts)


def skip_json_space(source: Source) -> Step[None]:
    yield from source.run(_SPACE, lambda space: None)


def call_object(source: Source, answer: Answer) -> Step[None]:
    """`{"name": N, "arguments": {...}}`, members in any order, others ignored. Opens the call and
    writes its arguments; the caller closes it."""
    reading = _CallObject(source, answer)
    yield from expect(source, "{")
    yield from skip_json_space(source)
    if (yield from source.peek()) == "}":
        raise NotACall
    while True:
        yield from skip_json_space(source)
        key = yield from json_string(source, answer)
        yield from skip_json_space(source)
        yield from expect(source, ":")
        yield from skip_json_space(source)
        yield from reading.member(key)
        yield from skip_json_space(source)
        if (yield from source.accept("}")):
            break
        yield from expect(source, ",")
    reading.end()


def arguments_object(source: Source, answer: Answer, emit: Emit) -> Step[None]:
    """The arguments of a call: an object, an object inside a string, or null for none."""
    first = yield from source.peek()
    if first == "{":
        yield from json_value(source, answer, emit)
    elif first == '"':
        text = yield from json_string(source, answer, MAX_HEAD)
        inner = minified(text, answer)
        if inner is None or not inner.startswith("{"):
            raise NotACall
        emit(inner)
    else:
        yield from expect(source, "null")
        emit("{}")


class _CallObject:
    """What is known of a call while its members are read."""

    def __init__(self, source: Source, answer: Answer) -> None:
        self._source = source
        self._answer = answer
        self._name: str | None = None
        self._held: list[str] | None = None  # arguments that came before the name
        self._skipped = bounded(lambda text: None, MAX_HEAD)

    def member(self, key: str) -> Step[None]:
        source, answer = self._source, self._answer
        if key == "name":
            if self._name is not None:
                raise NotACall
            self._name = yield from json_string(source, answer)
            if self._name not in answer.tools:
                raise NotACall
        elif key in ("arguments", "parameters"):
            if self._held is not None:
                raise NotACall
            self._held = []
            if self._name is None:
                hold = bounded(self._held.append, MAX_HEAD)
                yield from arguments_object(source, answer, hold)
            else:
                answer.open_call(self._name)
                yield from arguments_object(source, answer, answer.arguments)
        else:
            yield from json_value(source, answer, self._skipped)

    def end(self) -> None:
        if self._name is None:
            raise NotACall
        if self._held is None or self._held:
            self._answer.open_call(self._name)
            self._answer.arguments("".join(self._held or ["{}"]))


def _container(source: Source, answer: Answer, emit: Emit, open_: list[str]) -> Step[bool]:
    """The opening of an object or array; True if it is empty, and so closed."""
    first = source.take(1)
    closer = _CLOSERS[first]
    emit(first)
    yield from skip_json_space(source)
    if (yield from source.accept(closer)):
        emit(closer)
        return True
    if len(open_) == MAX_DEPTH:
        raise NotACall
    open_.append(closer)
    if closer == "}":
        yield from _key(source, answer, emit)
    return False


def _next_member(source: Source, answer: Answer, emit: Emit, open_: list[str]) -> Step[bool]:
    """After a value: closes what ends here; True if another value follows."""
    while open_:
        yield from skip_json_space(source)
        if (yield from source.accept(open_[-1])):
            emit(open_.pop())
            continue
        yield from expect(source, ",")
        emit(",")
        if open_[-1] == "}":
            yield from skip_json_space(source)
            yield from _key(source, answer, emit)
        return True
    return False


def _key(source: Source, answer: Answer, emit: Emit) -> Step[None]:
    yield from _string(source, answer, emit)
    yield from skip_json_space(source)
    yield from expect(source, ":")
    emit(":")


def _scalar(source: Source, emit: Emit) -> Step[None]:
    parts: list[str] = []
    yield from source.run(_WORD, bounded(parts.append, _MAX_NUMBER))
    word = "".join(parts)
    if word not in ("true", "false", "null") and not _NUMBER.fullmatch(word):
        raise NotACall
    emit(word)


def _string(source: Source, answer: Answer, emit: Emit) -> Step[None]:
    """A string with its quotes, each piece as it comes."""
    yield from expect(source, '"')
    emit('"')
    while True:
        yield from source.run(_PLAIN, lambda text: emit(_escaped_marks(text, answer)))
        next_ = yield from source.peek()
        if next_ == '"':
            emit(source.take(1))
            return
        if next_ == "\\":
            yield from _escape(source, emit)
        elif next_:
            emit(json_text(source.take(1)))
        else:
            raise NotACall


def _escape(source: Source, emit: Emit) -> Step[None]:
    escape = yield from source.peek(2)
    if escape[1:] in ('"', "\\", "/", "b", "f", "n", "r", "t"):
        emit(source.take(2))
        return
    escape = yield from source.peek(6)
    if not _HEX.fullmatch(escape):
        raise NotACall
    if _HIGH.match(escape):
        pair = yield from source.peek(12)
        if _LOW.fullmatch(pair, 6):
            emit(source.take(12))
            return
    source.take(6)
    emit("\\ufffd" if _HIGH.match(escape) or _LOW.fullmatch(escape) else escape)


def _escaped_marks(text: str, answer: Answer) -> str:
    """A delimiter token inside a string is its text."""
    return text if text.isascii() else json_text(answer.plain(text))
