"""The tools of a Responses request, as a model knows them and as the client does.

A model knows functions only. Custom tools become functions of one text, `input`; the tools of a
namespace are called by namespace and name run together; `tool_search` is a function whose calls
the client answers with further tools. Tools that only a hosted service could run are not offered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.http.responses.body import ToolSpec
from ds4_worker.parse.events import Tool

CUSTOM_INPUT = "input"
TOOL_SEARCH = "tool_search"
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
}
_SEARCH_PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string"}},
    "required": ["query"],
}


class Offered(msgspec.Struct, frozen=True):
    """One tool: what the model sees, and what its calls are called towards the client."""

    tool: Tool
    kind: str  # function, custom or tool_search
    name: str
    namespace: str | None = None


class Toolbox:
    """All tools of a request, by the name that the model uses."""

    def __init__(self) -> None:
        self._offered: dict[str, Offered] = {}

    def add(self, specs: Sequence[ToolSpec], place: str) -> None:
        """Raises RequestError for a tool without a name, or a second one of a name. Where tools are
        searched for, those to be found first are left out."""
        searched = any(spec.type == TOOL_SEARCH for spec in specs)
        for index, spec in enumerate(specs):
            where = f"{place}[{index}]"
            for offered in _offers(spec, where, deferred=not searched):
                known = self._offered.setdefault(offered.tool.name, offered)
                # Loaded twice by searches is the same tool; two of one name are a mistake.
                if known is not offered and known != offered:
                    raise RequestError(
                        f"{where}: another tool is named {offered.tool.name[:100]!r} as well",
                        param=where,
                    )

    def restrict(self, names: Iterable[str]) -> None:
        """Keeps the tools of these names (the client's)."""
        kept = set(names)
        self._offered = {k: v for k, v in self._offered.items() if {v.name, k} & kept}

    @property
    def tools(self) -> list[Tool]:
        return [offered.tool for offered in self._offered.values()]

    def find(self, prompt_name: str) -> Offered:
        """The tool that a model called; an unknown name is passed on as a function's."""
        found = self._offered.get(prompt_name)
        return found or Offered(Tool(prompt_name), "function", prompt_name)

    def prompt_name(self, name: str) -> str | None:
        """The model's name for a tool of the client's; None when there is no such tool."""
        if name in self._offered:
            return name
        return next((k for k, v in self._offered.items() if v.name == name), None)


def qualified(namespace: str | None, name: str) -> str:
    """What a model calls a tool."""
    return f"{namespace or ''}{name}"


def _offers(
    spec: ToolSpec, place: str, namespace: str | None = None, *, deferred: bool
) -> list[Offered]:
    """What a tool comes to: one, none, or the tools of a namespace. `deferred`: those that wait
    for a search are among them."""
    if spec.type == "namespace" and namespace is None:
        name = _named(spec, place)
        return [
            offered
            for index, tool in enumerate(spec.tools or ())
            for offered in _offers(tool, f"{place}.tools[{index}]", name, deferred=deferred)
        ]
    if spec.defer_loading and not deferred:
        return []
    description = spec.description or ""
    if spec.type == "function":
        name = _named(spec, place)
        tool = Tool(qualified(namespace, name), description, spec.parameters or {})
        return [Offered(tool, "function", name, namespace)]
    if spec.type == "custom":
        name = _named(spec, place)
        grammar = (spec.format or {}).get("definition")
        if isinstance(grammar, str):
            description = f"{description}\n\nThe input follows this grammar:\n{grammar}".strip()
        tool = Tool(qualified(namespace, name), description, _CUSTOM_PARAMETERS)
        return [Offered(tool, "custom", name, namespace)]
    if spec.type == TOOL_SEARCH:
        tool = Tool(TOOL_SEARCH, description, spec.parameters or _SEARCH_PARAMETERS)
        return [Offered(tool, TOOL_SEARCH, TOOL_SEARCH)]
    return []


def _named(spec: ToolSpec, place: str) -> str:
    if not spec.name:
        raise RequestError(
            f"{place}.name: a tool of type {spec.type[:100]!r} needs a name", param=f"{place}.name"
        )
    return spec.name
