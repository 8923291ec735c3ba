"""Arguments that a model writes as tagged values, turned into one JSON object as they arrive.

Owns: which values are strings (passed on as they come) and which are JSON (read to their end
first), by the tool's JSON schema. A value that is no JSON where JSON is due becomes a string: the
client validates arguments, and a model's mistake must reach it rather than vanish.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ds4_worker.parse.answer import Answer, json_text
from ds4_worker.parse.json_reader import minified

_MAX_NESTING: Final = 16
_DEFINITIONS: Final = ("$defs", "definitions")
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_KINDS: Final = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean",
                 "n": "null"}  # fmt: skip


class Schema:
    """What a tool's JSON schema says about the kinds of its parameters."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = parameters
        properties = parameters.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._others = parameters.get("additionalProperties")
        required = parameters.get("required")
        self._required = required if isinstance(required, list) else []

    def keys(self) -> list[str]:
        """The parameters that the schema names, in its order."""
        return list(self._properties)

    def required(self, key: str) -> bool:
        return key in self._required

    def of(self, key: str) -> dict[str, Any]:
        """The parameter's own schema, able to refer to the tool's definitions."""
        own = self._properties.get(key)
        return {**self.definitions(), **(own if isinstance(own, Mapping) else {})}

    def closed(self) -> dict[str, Any]:
        """The whole schema. Parameters that it does not name are not to be written, unless it names
        none or says that there are others."""
        closed = {"additionalProperties": False} if self._properties else {}
        return {"type": "object", **closed, **self._root}

    def definitions(self) -> dict[str, Any]:
        """What the tool's schemas refer to."""
        return {name: self._root[name] for name in _DEFINITIONS if name in self._root}

    def constants(self, key: str) -> list[str]:
        """The strings that a parameter is limited to, if it is."""
        values = self.of(key).get("enum")
        strings = values if isinstance(values, list) else []
        return strings if all(isinstance(value, str) for value in strings) else []

    def kinds(self, key: str) -> frozenset[str]:
        """JSON kinds that the parameter may have; empty when the schema does not say."""
        return frozenset(self._kinds(self._properties.get(key, self._others), _MAX_NESTING))

    def _kinds(self, schema: Any, depth: int) -> Iterator[str]:
        if not isinstance(schema, Mapping) or not depth:
            return
        declared = schema.get("type")
        for kind in declared if isinstance(declared, list) else (declared,):
            if isinstance(kind, str):
                yield "number" if kind == "integer" else kind
        if declared is None:
            constants = schema.get("enum")
            for value in constants if isinstance(constants, list) else ():
                yield _kind_of(value)
            if "const" in schema:
                yield _kind_of(schema["const"])
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            for part in parts if isinstance(parts, list) else ():
                yield from self._kinds(part, depth - 1)
        yield from self._kinds(self._referred(schema.get("$ref")), depth - 1)

    def _referred(self, reference: Any) -> Any:
        """The local schema that `$ref` names, if it does."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        found: Any = self._root
        for part in reference[2:].split("/"):
            if not isinstance(found, Mapping):
                return None
            found = found.get(part.replace("~1", "/").replace("~0", "~"))
        return found


class Arguments:
    """Writes one call's arguments object. `text` and `raw` give the value of the last `key`."""

    def __init__(self, answer: Answer, name: str) -> None:
        self._answer = answer
        self._schema = Schema(answer.tools[name].parameters)
        self._separator = ""
        answer.open_call(name)
        self.begin_object()

    def begin_object(self) -> None:
        """Begins the arguments, or an object as the value of the last `key`."""
        self._answer.arguments("{")
        self._separator = ""

    def key(self, key: str) -> frozenset[str]:
        """Begins a parameter; the kinds that its value may have."""
        self._answer.arguments(f'{self._separator}"{json_text(self._answer.plain(key))}":')
        self._separator = ","
        return self._schema.kinds(key)

    def string(self) -> StringValue:
        return StringValue(self._answer)

    def raw(self, text: str) -> None:
        """A piece of JSON."""
        self._answer.arguments(text)

    def typed(self, text: str, kinds: frozenset[str]) -> None:
        """A whole value, written as text, of one of these kinds."""
        self._answer.arguments(typed_json(text, kinds, self._answer))

    def end(self) -> None:
        """Ends the object that was begun last."""
        self._answer.arguments("}")
        self._separator = ","


class StringValue:
    """A string that arrives in pieces."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        answer.arguments('"')

    def add(self, text: str) -> None:
        self._answer.arguments(json_text(self._answer.plain(text)))

    def end(self) -> None:
        self._answer.arguments('"')


def typed_json(text: str, kinds: frozenset[str], answer: Answer) -> str:
    """The JSON of a value that is written as plain text."""
    stripped = text.strip()
    stripped = _PYTHON.get(stripped, stripped)
    value = minified(stripped, answer) if stripped else None
    if value is not None and _fits(value, kinds):
        return value
    return f'"{json_text(answer.plain(text))}"'


def _fits(value: str, kinds: frozenset[str]) -> bool:
    """A union with strings takes what is unmistakably of its other kinds; a schema without strings
    takes any JSON, so that the client sees what the model wrote."""
    return "string" not in kinds or (_kind_at(value) in kinds and _kind_at(value) != "string")


def _kind_at(json: str) -> str:
    return _KINDS.get(json[0], "number")


def _kind_of(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, Mapping):
        return "object"
    return "null" if value is None else "array"
