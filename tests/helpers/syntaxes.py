"""One case per tool syntax: a vocabulary in which its delimiters are tokens as in real ones."""

from __future__ import annotations

from typing import Any

from ds4_common.contract.frontend import ReasoningSyntax, ToolSyntax
from ds4_worker.parse.events import Tool
from helpers.answers import Case, TinyVocabulary, frontend

TOOLS = (
    Tool(
        name="get_weather",
        description="The weather of a city",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "hours": {"type": "array", "items": {"type": "integer"}},
                "where": {"$ref": "#/$defs/place"},
                "label": {"type": ["string", "null"]},
                "size": {"anyOf": [{"type": "number"}, {"type": "string"}]},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city"],
            "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
        },
    ),
    Tool(name="now"),
    Tool(
        name="write.file",
        parameters={
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        },
    ),
)


def tool_syntax(syntax: str, **fields: Any) -> ToolSyntax:
    values: dict[str, Any] = {"open": "", "close": "", "separator": "", "wrap_newlines": False}
    return ToolSyntax(syntax=syntax, **(values | fields))


def reasoning_syntax(syntax: str, **fields: Any) -> ReasoningSyntax:
    texts = ("open", "close", "terminal_marker", "assistant_open", "message_end")
    values = dict.fromkeys(texts, "") | {"wrap_newlines": False} | fields
    return ReasoningSyntax(syntax=syntax, **values)


def think(**fields: Any) -> ReasoningSyntax:
    return reasoning_syntax(
        "REASONING_THINK_TAGS", **({"open": "<think>", "close": "</think>"} | fields)
    )


_TAGS = {"open": "<tool_call>", "close": "</tool_call>"}
_THINK = ("<think>", "</think>")
BAR = "\uff5cDSML\uff5c"

CASES = {
    "hermes": Case(
        frontend=frontend(tool_syntax("TOOL_TAGGED_JSON", **_TAGS), think(wrap_newlines=True)),
        vocabulary=TinyVocabulary(shown=(*_THINK, *_TAGS.values()), control=("<|im_end|>",)),
        tools=TOOLS,
    ),
    "hermes-spelled": Case(
        frontend=frontend(tool_syntax("TOOL_TAGGED_JSON", **_TAGS)),
        vocabulary=TinyVocabulary(),
        tools=TOOLS,
    ),
    "qwen": Case(
        frontend=frontend(tool_syntax("TOOL_FUNCTION_TAGS", **_TAGS, wrap_newlines=True)),
        vocabulary=TinyVocabulary(shown=tuple(_TAGS.values())),
        tools=TOOLS,
    ),
    "glm": Case(
        frontend=frontend(tool_syntax("TOOL_ARGUMENT_TAGS", **_TAGS, separator="\n"), think()),
        vocabulary=TinyVocabulary(
            shown=(
                *_THINK,
                *_TAGS.values(),
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
            )
        ),
        tools=TOOLS,
    ),
    "dsml": Case(
        frontend=frontend(
            tool_syntax("TOOL_DSML", open=f"<{BAR}tool_calls>", close=f"</{BAR}tool_calls>"),
            think(terminal_marker=f"<{BAR}tool_calls>"),
        ),
        vocabulary=TinyVocabulary(shown=(*_THINK, BAR)),
        tools=TOOLS,
    ),
    "xtml": Case(
        frontend=frontend(
            tool_syntax("TOOL_XTML", open="<|open|>tools<|sep|>", close="<|close|>tools<|sep|>"),
            reasoning_syntax(
                "REASONING_XTML_THINK",
                open="<|open|>think<|sep|>",
                close="<|close|>think<|sep|>",
            ),
        ),
        vocabulary=TinyVocabulary(control=("<|open|>", "<|close|>", "<|sep|>")),
        tools=TOOLS,
    ),
    "recipient": Case(
        frontend=frontend(
            tool_syntax(
                "TOOL_RECIPIENT_ATEM",
                open="<atem:function_calls>",
                close="</atem:function_calls>",
                separator="tool",
            ),
            reasoning_syntax(
                "REASONING_RECIPIENT_HEADER", open=" to=self<|message|>", close="<|eom|>"
            ),
        ),
        vocabulary=TinyVocabulary(control=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")),
        tools=TOOLS,
    ),
    "llama": Case(
        frontend=frontend(tool_syntax("TOOL_BARE_JSON", open="<|python_tag|>")),
        vocabulary=TinyVocabulary(control=("<|python_tag|>", "<|eot_id|>")),
        tools=TOOLS,
    ),
    "mistral": Case(
        frontend=frontend(
            tool_syntax("TOOL_BRACKET_JSON", open="[TOOL_CALLS]", separator="[ARGS]"),
            think(open="[THINK]", close="[/THINK]"),
        ),
        vocabulary=TinyVocabulary(
            control=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
        ),
        tools=TOOLS,
    ),
    "harmony": Case(
        frontend=frontend(
            tool_syntax("TOOL_HARMONY", open="<|start|>", close="<|call|>"),
            reasoning_syntax(
                "REASONING_HARMONY",
                open="<|channel|>analysis<|message|>",
                close="<|end|>",
            ),
        ),
        vocabulary=TinyVocabulary(
            control=(
                "<|start|>",
                "<|channel|>",
                "<|message|>",
                "<|constrain|>",
                "<|end|>",
                "<|call|>",
                "<|return|>",
            )
        ),
        tools=TOOLS,
    ),
}
