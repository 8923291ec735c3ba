"""How a chat template wants tool calls: found out by rendering small conversations with it.

Templates agree on names (`tools`, `message.tool_calls`) but not on types: arguments as an object or
as its JSON text, an absent content as "" or as none, ids of any length or of nine characters. The
first form in which a call comes out whole is the template's. Nothing here depends on what the model
is called.

Owns: that form, and what surrounds a turn's calls in a rendered prompt, so that they can be
replaced by what the model wrote.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.http.conversation import Call

if TYPE_CHECKING:
    from ds4_worker.http.template import ChatTemplate

_SHORT_ID = 9  # characters; some templates refuse ids of any other length
# No template writes these, so texts that hold them differ from the template's own at once.
_NEEDLE = "\ue000needle\ue001"
_KEY, _VALUE = "needle_key", "needle_value"
_USER = {"role": "user", "content": "u"}


class CallForm(msgspec.Struct, frozen=True):
    """The form of an assistant message with calls."""

    object_arguments: bool
    empty_content: str | None  # what stands for no content
    short_ids: bool

    def id(self, id_: str) -> str:
        if not self.short_ids or len(id_) == _SHORT_ID:
            return id_
        from hashlib import sha256  # loads OpenSSL: not at start-up

        return sha256(id_.encode()).hexdigest()[:_SHORT_ID]

    def arguments(self, text: str) -> Any:
        """The arguments of a call, given as JSON text."""
        if not self.object_arguments:
            return text
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return text  # an answer that was cut off, or no sane one: passed on as it is
        return value if isinstance(value, dict) else text

    def message(self, content: str, calls: Sequence[Call]) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": content or self.empty_content,
            "tool_calls": [
                {
                    "id": self.id(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": self.arguments(call.arguments)},
                }
                for call in calls
            ],
        }


class Surroundings(msgspec.Struct, frozen=True):
    """What stands between a turn's calls and the rest: from the calls' begin to the first name, and
    from the last name (the calls have no arguments) to the calls' end."""

    head: str
    tail: str


def marked_calls(marks: Sequence[str]) -> list[Call]:
    """Calls that stand for others: all that differs between two such lists is their names."""
    return [Call(id=f"call_{i}", name=mark, arguments="{}") for i, mark in enumerate(marks)]


class TemplateForm:
    """Asks a template, each question once. Safe to use from several threads."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._lock = threading.Lock()
        self._asked = False
        self._calls: CallForm | None = None
        self._surroundings: dict[int, Surroundings | None] = {}

    @property
    def calls(self) -> CallForm | None:
        """None when the template renders no tools or no calls."""
        with self._lock:
            if not self._asked:
                self._calls = self._find_form() if "tools" in self._template.variables else None
                self._asked = True
            return self._calls

    def surroundings(self, count: int) -> Surroundings | None:
        """Of `count` calls in one turn; None when they cannot be told from the rest."""
        form = self.calls
        if form is None:
            return None
        with self._lock:
            if count not in self._surroundings:
                self._surroundings[count] = self._find_surroundings(form, count)
            return self._surroundings[count]

    def _find_form(self) -> CallForm | None:
        call = Call(id="call_0", name=_NEEDLE, arguments=f'{{"{_KEY}":"{_VALUE}"}}')
        for short, as_object, empty in itertools.product((False, True), (True, False), ("", None)):
            form = CallForm(as_object, empty, short)
            text = self._render([_USER, form.message("", [call])])
            if text is not None and _whole(text):
                return form
        return None

    def _find_surroundings(self, form: CallForm, count: int) -> Surroundings | None:
        names = [f"\ue000{i}\ue001" for i in range(count)]
        with_calls = self._render([_USER, form.message("", marked_calls(names))])
        without = self._render([_USER, {"role": "assistant", "content": _NEEDLE}])
        if with_calls is None or without is None or any(with_calls.count(n) != 1 for n in names):
            return None
        begin = _common(with_calls, without)
        after = _common(with_calls[:begin:-1], without[::-1])
        first = with_calls.index(names[0])
        last = with_calls.index(names[-1]) + len(names[-1])
        if not begin <= first < last <= len(with_calls) - after:
            return None
        return Surroundings(
            with_calls[begin:first].lstrip(), with_calls[last : len(with_calls) - after].rstrip()
        )

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        try:
            return self._template.render(messages, add_generation_prompt=False)
        except RequestError:
            return None  # it refuses this form


def _common(a: str, b: str) -> int:
    """Characters that two texts begin with alike."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def _whole(text: str) -> bool:
    """Whether a call came out with its name and its arguments as JSON or in the template's own
    syntax, not as Python's or as JSON inside a JSON string."""
    return (
        all(needle in text for needle in (_NEEDLE, _KEY, _VALUE))
        and f"'{_KEY}'" not in text
        and f'\\"{_KEY}' not in text
    )
