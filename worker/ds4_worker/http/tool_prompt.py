"""Tools for a model whose chat template knows none: described in the system message.

Owns: that description, and the form in which earlier calls and their results are shown: JSON
between tags, which most models that were trained on tools have seen, and which any can imitate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ds4_common.contract.frontend import ToolSyntax
from ds4_worker.http.conversation import Turn
from ds4_worker.http.replay import CallMemory

SYNTAX = ToolSyntax(
    syntax="TOOL_TAGGED_JSON",
    open="<tool_call>",
    close="</tool_call>",
    separator="",
    wrap_newlines=True,
)
_DESCRIPTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def flatten(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], memory: CallMemory
) -> list[Turn]:
    """The same conversation in turns that any template can render; calls as they were sampled,
    where `memory` knows."""
    flat = [_flat(turn, memory) for turn in turns]
    if tools:
        signatures = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
        description = _DESCRIPTION.format(tools=signatures)
        if flat and flat[0].role == "system":
            content = f"{flat[0].content}\n\n{description}"
            flat[0] = msgspec.structs.replace(flat[0], content=content)
        else:
            flat.insert(0, Turn(role="system", content=description))
    return _merge_results(flat)


def _flat(turn: Turn, memory: CallMemory) -> Turn:
    if turn.role == "tool":
        content = f"<tool_response>\n{turn.content}\n</tool_response>"
        return Turn(role="user", content=content, name="tool")
    if not turn.calls:
        return turn
    block = memory.block_of([call.id for call in turn.calls])
    if block is not None:
        before = turn.content.rstrip() if block.after_text else turn.content
        content = before + block.space + block.text
        return Turn(role="assistant", content=content, reasoning=turn.reasoning)
    written = [
        f'<tool_call>\n{{"name": {_json(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in turn.calls
    ]
    content = "\n".join([turn.content, *written] if turn.content else written)
    return Turn(role="assistant", content=content, reasoning=turn.reasoning)


def _merge_results(turns: Sequence[Turn]) -> list[Turn]:
    """Consecutive results become one turn: templates want roles to alternate."""
    merged: list[Turn] = []
    for turn in turns:
        if turn.name == "tool" and turn.role == "user":
            turn = Turn(role="user", content=turn.content)
            if merged and merged[-1].role == "user" and merged[-1].content.endswith(_RESULT_END):
                content = f"{merged[-1].content}\n{turn.content}"
                merged[-1] = Turn(role="user", content=content)
                continue
        merged.append(turn)
    return merged


_RESULT_END = "</tool_response>"


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()
