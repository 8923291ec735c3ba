"""Tools in the form that chat templates render: OpenAI's function objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ds4_worker.parse.events import Tool


def template_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Tool) -> dict[str, Any]:
    values: dict[str, Any] = {"name": tool.name}
    if tool.description:
        values["description"] = tool.description
    # Many templates look into the parameters, whether there are any or not.
    values["parameters"] = dict(tool.parameters) or {"type": "object", "properties": {}}
    return values
