"""Writes grammars in llguidance's dialect of Lark.

Owns: how delimiters, free text and JSON schemas are written there. A delimiter token is named by
its id, so only that token matches; a spelled one is a string. Free text runs up to a delimiter, and
how depends on it: a token ends a greedy terminal, a string must be looked for lazily.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ds4_worker.parse.arguments import Schema
from ds4_worker.parse.events import Tool
from ds4_worker.parse.marks import Marks

ANY_TEXT = r"(.|\n)*"
# Blanks between tokens are bounded, or a model could write them for ever. What the library cannot
# enforce of a tool's schema stays unenforced: a tool must not become unusable for it.
_JSON_OPTIONS: Final = {
    "x-guidance": {
        "whitespace_pattern": r"[ \t\r\n]{0,32}",
        "json_allow_general_unicode_escapes": True,
        "lenient": True,
    }
}
_PARTS = re.compile("[\ud800-\udfff]|[^\ud800-\udfff]+")
_META = re.compile(r"[.+*?()|\[\]{}^$\\/]")


class Calls(NamedTuple):
    """The grammar of a block of calls: the delimiter that begins it, and everything after that."""

    opener: str
    rest: str


class Envelope(NamedTuple):
    """What an answer may be, whatever its syntax."""

    tools: Sequence[Tool]  # those that may be called
    must_call: bool
    parallel: bool
    in_reasoning: bool  # the prompt ends inside reasoning
    answer: str  # the expression of the visible answer


class Lark:
    """One grammar under construction. All methods but `finish` return an expression."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._tokens = {mark: token for token, mark in marks.characters.items()}
        self._rules: dict[str, str] = {}
        self._named: dict[str, str] = {}  # body -> name

    def literal(self, text: str) -> str:
        """Exactly this text, its delimiter tokens as tokens."""
        return " ".join(self._parts(self._marks.of(text)))

    def any_text(self) -> str:
        """Any text without delimiter tokens, to the end of the answer."""
        return f"/{ANY_TEXT}/"

    def text_until(self, delimiter: str, regex: str = ANY_TEXT) -> str:
        """Free text and the delimiter that ends it."""
        marked = self._marks.of(delimiter)
        parts = _PARTS.findall(marked)
        token = next((i for i, part in enumerate(parts) if part in self._tokens), None)
        if token is None:
            return self.rule("until", f"/{regex}/ {_string(marked)}", "[lazy]")
        before = "".join(parts[:token])
        rest = " ".join(self._parts("".join(parts[token:])))
        return f"/{regex}{_in_regex(before)}/ {rest}"

    def json(self, schema: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**schema, **_JSON_OPTIONS}, ensure_ascii=False)}"

    def json_call(self, tool: Tool, *, key: str, before: str = "", after: str = "") -> str:
        """`{"name": N, KEY: {...}}`. The arguments' schema stands alone, so that it can refer to
        its own definitions."""
        begin = f'{before}{{"name": {_string(tool.name)}, "{key}": '
        return f"{self.literal(begin)} {self.arguments(tool)} {self.literal('}' + after)}"

    def arguments(self, tool: Tool) -> str:
        """The whole arguments object as JSON."""
        return self.json(Schema(tool.parameters).closed())

    def parameters(self, tool: Tool, tags: Callable[[str, str], tuple[str, str]]) -> str:
        """Arguments as tagged values, in the schema's order; optional ones may be left out.
        `tags` gives the texts around a value by its key and kind ("string" for raw text)."""
        schema = Schema(tool.parameters)
        written = []
        for key in schema.keys():
            kinds = schema.kinds(key)
            raw = not kinds or "string" in kinds
            begin, end = tags(key, "string" if raw else min(kinds))
            constants = [self.literal(value) for value in schema.constants(key)]
            if raw and not constants:
                value = self.text_until(end)
            else:
                whole = self.choice(constants) if constants else self.json(schema.of(key))
                value = f"{whole} {self.literal(end)}"
            parameter = self.rule("parameter", f"{self.literal(begin)} {value}")
            written.append(parameter if schema.required(key) else f"{parameter}?")
        return " ".join(written)

    def choice(self, expressions: Sequence[str]) -> str:
        return f"({' | '.join(expressions)})"

    def list_of(self, item: str, separator: str, *, parallel: bool) -> str:
        """One item, or several with a text between them."""
        if not parallel:
            return item
        again = f"{self.literal(separator)} {item}" if separator else item
        return f"{item} ({again})*"

    def rule(self, name: str, body: str, options: str = "") -> str:
        """A rule of that name, numbered where there is another; the same body is the same rule."""
        known = self._named.get(options + body)
        if known is not None:
            return known
        number = sum(rule.split("_")[0] == name for rule in self._rules)
        full = f"{name}_{number}"
        self._rules[full] = f"{full}{options}: {body}"
        self._named[options + body] = full
        return full

    def finish(self, start: str) -> str:
        """The grammar's text."""
        return "\n".join(("%llguidance {}", f"start: {start}", *self._rules.values(), ""))

    def _parts(self, marked: str) -> Iterator[str]:
        for part in _PARTS.findall(marked):
            yield f"<[{self._tokens[part]}]>" if part in self._tokens else _string(part)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _in_regex(text: str) -> str:
    return _META.sub(r"\\\g<0>", text).replace("\n", "\\n")
