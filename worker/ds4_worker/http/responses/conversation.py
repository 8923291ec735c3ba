"""From the Responses API's input items to plain turns.

Owns: what each kind of item means. Reasoning belongs to the assistant's next message or call; calls
that follow an assistant's message are part of it. Tools that a hosted service would have run appear
as calls like any other, so that no earlier action is lost. Kinds that would need something kept
from an earlier response, and anything but text, are refused: an answer without them would be an
answer to another question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.http.conversation import Call, Role, Turn
from ds4_worker.http.responses.body import Item, Part, ResponsesBody
from ds4_worker.http.responses.tools import CUSTOM_INPUT, TOOL_SEARCH, Toolbox, qualified

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES: dict[str, Role] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}


def plain_turns(body: ResponsesBody, toolbox: Toolbox) -> list[Turn]:
    """Raises RequestError naming the item that cannot be understood. Tools that searches loaded
    are added to `toolbox`."""
    reader = _Reader(toolbox)
    if body.instructions:
        reader.turns.append(Turn(role="system", content=body.instructions))
    if isinstance(body.input, str):
        reader.turns.append(Turn(role="user", content=body.input))
        return reader.turns
    if not body.input:
        raise RequestError("input: is empty, expected at least one item", param="input")
    for index, item in enumerate(body.input):
        reader.read(item, f"input[{index}]")
    return reader.finish()


class _Reader:
    """Items in, turns out."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.turns: list[Turn] = []
        self._toolbox = toolbox
        self._reasoning = ""  # waits for the assistant's next item
        self._names: dict[str, str] = {}  # of the tools that were called, by call id
        self._kinds: dict[str, Callable[[Item, str], None]] = {
            "message": self._message,
            "reasoning": self._reason,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "local_shell_call": self._hosted_call,
            "web_search_call": self._hosted_call,
            "tool_search_call": self._search_call,
            "image_generation_call": self._image_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "local_shell_call_output": self._output,
            "tool_search_output": self._search_output,
            "additional_tools": self._more_tools,
            "compaction": self._skip,
            "context_compaction": self._skip,
        }

    def read(self, item: Item, place: str) -> None:
        kind = item.type or ("message" if item.role is not None else "")
        handler = self._kinds.get(kind)
        if handler is None:
            raise RequestError(
                f"{place}.type: got {kind[:100]!r}, expected one of {', '.join(self._kinds)}",
                param=f"{place}.type",
                code="unsupported_item",
            )
        if item.status not in (None, "completed"):
            raise RequestError(
                f"{place}.status: got {item.status[:100]!r}, expected 'completed': only "
                "finished items can be continued from",
                param=f"{place}.status",
            )
        handler(item, place)

    def finish(self) -> list[Turn]:
        if self._reasoning:  # it belongs to a message that never came
            self._continue_assistant(())
        return self.turns

    def _message(self, item: Item, place: str) -> None:
        given = item.role or ""
        role = _ROLES.get(given)
        if role is None:
            raise RequestError(
                f"{place}.role: got {given[:100]!r}, expected one of {', '.join(_ROLES)}",
                param=f"{place}.role",
            )
        text = _text(item.content, f"{place}.content")
        reasoning = self._take_reasoning() if role == "assistant" else None
        self.turns.append(Turn(role=role, content=text, reasoning=reasoning))

    def _reason(self, item: Item, place: str) -> None:
        self._reasoning += _text(item.summary, f"{place}.summary")
        self._reasoning += _text(item.content, f"{place}.content")

    def _function_call(self, item: Item, place: str) -> None:
        arguments = item.arguments
        if not isinstance(arguments, str):
            raise RequestError(
                f"{place}.arguments: expected a string of JSON", param=f"{place}.arguments"
            )
        self._call(item, qualified(item.namespace, _name(item, place)), arguments, place)

    def _custom_call(self, item: Item, place: str) -> None:
        arguments = _json({CUSTOM_INPUT: item.input or ""})
        self._call(item, qualified(item.namespace, _name(item, place)), arguments, place)

    def _hosted_call(self, item: Item, place: str) -> None:
        name = (item.type or "").removesuffix("_call")
        self._call(item, name, _json(item.action or {}), place)

    def _image_call(self, item: Item, place: str) -> None:
        arguments = {"prompt": item.revised_prompt} if item.revised_prompt else {}
        self._call(item, "image_generation", _json(arguments), place)

    def _search_call(self, item: Item, place: str) -> None:
        arguments = item.arguments
        text = arguments if isinstance(arguments, str) else _json(arguments or {})
        self._call(item, TOOL_SEARCH, text, place)

    def _call(self, item: Item, name: str, arguments: str, place: str) -> None:
        id_ = item.call_id or item.id
        if not id_:
            raise RequestError(f"{place}.call_id: is missing", param=f"{place}.call_id")
        self._names[id_] = name
        self._continue_assistant((Call(id=id_, name=name, arguments=arguments),))

    def _continue_assistant(self, calls: tuple[Call, ...]) -> None:
        """Adds calls, and the reasoning before them, to the assistant's turn."""
        reasoning = self._take_reasoning()
        last = self.turns[-1] if self.turns else None
        if last is None or last.role != "assistant":
            self.turns.append(Turn(role="assistant", reasoning=reasoning, calls=calls))
            return
        self.turns[-1] = msgspec.structs.replace(
            last,
            reasoning=(last.reasoning or "") + (reasoning or "") or None,
            calls=(*last.calls, *calls),
        )

    def _take_reasoning(self) -> str | None:
        reasoning, self._reasoning = self._reasoning, ""
        return reasoning or None

    def _output(self, item: Item, place: str) -> None:
        self._answer(item, _text(item.output, f"{place}.output"), place)

    def _search_output(self, item: Item, place: str) -> None:
        specs = item.tools or []
        self._toolbox.add(specs, f"{place}.tools")
        self._answer(item, _json(specs), place)

    def _answer(self, item: Item, text: str, place: str) -> None:
        id_ = item.call_id or item.id
        if not id_:
            raise RequestError(f"{place}.call_id: is missing", param=f"{place}.call_id")
        name = self._names.get(id_)
        self.turns.append(Turn(role="tool", content=text, call_id=id_, name=name))

    def _more_tools(self, item: Item, place: str) -> None:
        self._toolbox.add(item.tools or [], f"{place}.tools")

    def _skip(self, item: Item, place: str) -> None:
        """What was compacted is only readable where it was written."""


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _name(item: Item, place: str) -> str:
    if not item.name:
        raise RequestError(f"{place}.name: is missing", param=f"{place}.name")
    return item.name


def _text(content: str | Sequence[str | Part] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif part.type in _TEXT_PARTS and part.text is not None:
            texts.append(part.text)
        elif part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        else:
            raise RequestError(
                f"{place}[{index}]: got a part of type {part.type[:100]!r}, expected text "
                "(this model takes no images, audio or files)",
                param=f"{place}[{index}]",
                code="unsupported_content",
            )
    return "".join(texts)
