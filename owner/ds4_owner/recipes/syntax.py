"""How a model writes reasoning and tool calls, read off its chat template and vocabulary.

Owns: the choice of the two syntaxes in the contract and their data (delimiters, separators, where a
prompt leaves the answer). A template writes earlier calls the way its model writes new ones, so the
markers in its text tell the syntax; the model's name never does. Without a template, or with one
whose markers nobody here knows, a model has none. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.tokenizer import layout
from ds4_common.tokenizer.vocabulary import Vocabulary

DSML_PREFIX = "\uff5cDSML\uff5c"  # full-width bars

_SPECIAL = (layout.CONTROL, layout.USER_DEFINED)
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK = re.compile(r"</((?:\w+:)?think)>")
_MARKER = re.compile(r"<(?!/|(?:\w+:)?think>)[^<>\s{}'\"]{1,64}>")
_ROLE = re.compile(r"assistant|model", re.IGNORECASE)
_NEWLINE = r"(?:\n|\\n)"  # as text of a template, or inside a string of one


@dataclass(frozen=True)
class Syntax:
    """What the contract says of a model's answers; None is "writes none"."""

    tools: pb.ToolConfig | None = None
    reasoning: pb.ReasoningConfig | None = None

    def ends(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        """The tokens that end a generation: all of the vocabulary's but one that only ends a frame
        of the answer, whatever the file's metadata say of it."""
        frame_end = b""
        if self.reasoning is not None and self.reasoning.syntax == pb.REASONING_RECIPIENT_HEADER:
            frame_end = self.reasoning.close.encode()
        return tuple(token for token in vocabulary.ends if vocabulary.texts[token] != frame_end)


def detect_syntax(template: str | None, vocabulary: Vocabulary) -> Syntax:
    """The syntax of a model with this template."""
    if not template:
        return Syntax()
    tools, reasoning = _frames(template)
    if tools is None:
        tools = next((found for rule in _BLOCKS if (found := rule(template, vocabulary))), None)
        reasoning = _think_tags(template)
        if reasoning is not None and tools is not None and _is_plain(tools, vocabulary):
            # Models forget to close reasoning before a call; nothing else would ever open one.
            reasoning.terminal_marker = tools.open
    if reasoning is not None:
        reasoning.assistant_open = _assistant_open(template)
        reasoning.message_end = _message_end(template, vocabulary)
    return Syntax(tools, reasoning)


# --- frames around everything --------------------------------------------------------------------


def _frames(template: str) -> tuple[pb.ToolConfig | None, pb.ReasoningConfig | None]:
    if "<|channel|>" in template and "analysis" in template:
        return (
            pb.ToolConfig(syntax=pb.TOOL_HARMONY, open="<|start|>", close="<|call|>"),
            pb.ReasoningConfig(
                syntax=pb.REASONING_HARMONY,
                open="<|channel|>analysis<|message|>",
                close="<|end|>",
            ),
        )
    if "<atem:function_calls>" in template and "to=self" in template:
        return (
            pb.ToolConfig(
                syntax=pb.TOOL_RECIPIENT_ATEM,
                open="<atem:function_calls>",
                close="</atem:function_calls>",
                separator="tool",
            ),
            pb.ReasoningConfig(
                syntax=pb.REASONING_RECIPIENT_HEADER, open=" to=self<|message|>", close="<|eom|>"
            ),
        )
    if all(token in template for token in ("<|open|>", "<|close|>", "<|sep|>")):
        return (
            pb.ToolConfig(
                syntax=pb.TOOL_XTML, open="<|open|>tools<|sep|>", close="<|close|>tools<|sep|>"
            ),
            pb.ReasoningConfig(
                syntax=pb.REASONING_XTML_THINK,
                open="<|open|>think<|sep|>",
                close="<|close|>think<|sep|>",
            ),
        )
    return None, None


# --- blocks inside an answer: the first rule that fits, the most telling markers first -----------


def _dsml(template: str, vocabulary: Vocabulary) -> pb.ToolConfig | None:
    if DSML_PREFIX not in template:
        return None
    word = "function_calls" if "function_calls>" in template else "tool_calls"
    return pb.ToolConfig(
        syntax=pb.TOOL_DSML, open=f"<{DSML_PREFIX}{word}>", close=f"</{DSML_PREFIX}{word}>"
    )


def _argument_tags(template: str, vocabulary: Vocabulary) -> pb.ToolConfig | None:
    if "<arg_key>" not in template or _OPEN not in template or "<tool_sep>" in template:
        return None
    apart = re.search(f"</arg_key>{_NEWLINE}\\s*<arg_value>", template)
    separator = "\n" if apart else ""
    return pb.ToolConfig(
        syntax=pb.TOOL_ARGUMENT_TAGS, open=_OPEN, close=_CLOSE, separator=separator
    )


def _function_tags(template: str, vocabulary: Vocabulary) -> pb.ToolConfig | None:
    if not all(tag in template for tag in ("<function=", "<parameter=", _OPEN)):
        return None
    return pb.ToolConfig(syntax=pb.TOOL_FUNCTION_TAGS, open=_OPEN, close=_CLOSE, wrap_newlines=True)


def _bracket_json(template: str, vocabulary: Vocabulary) -> pb.ToolConfig | None:
    if "[TOOL_CALLS]" not in template:
        return None
    separator = "[ARGS]" if "[ARGS]" in template else ""
    return pb.ToolConfig(syntax=pb.TOOL_BRACKET_JSON, open="[TOOL_CALLS]", separator=separator)


def _tagged_json(template: str, vocabulary: Vocabulary) -> pb.ToolConfig | None:
    if _OPEN not in template or "arguments" not in template:
        return None
    return pb.ToolConfig(syntax=pb.TOOL_TAGGED_JSON, open=_OPEN, close=_CLOSE)


def _bare_json(template: str, vocabulary: Vocabulary) -> pb.ToolConfig | None:
    if "ipython" not in template or '"parameters"' not in template:
        return None
    opener = "<|python_tag|>"
    known = opener.encode() in vocabulary.texts
    return pb.ToolConfig(syntax=pb.TOOL_BARE_JSON, open=opener if known else "")


_BLOCKS: tuple[Callable[[str, Vocabulary], pb.ToolConfig | None], ...] = (
    _dsml,
    _argument_tags,
    _function_tags,
    _bracket_json,
    _tagged_json,
    _bare_json,
)


def _is_plain(tools: pb.ToolConfig, vocabulary: Vocabulary) -> bool:
    """Whether the opener cannot be meant otherwise: it is, or holds, a token of its own."""
    if tools.syntax == pb.TOOL_DSML:
        return True
    opener = tools.open.encode()
    return opener in vocabulary.texts and (
        vocabulary.types[vocabulary.texts.index(opener)] in _SPECIAL
    )


# --- reasoning -----------------------------------------------------------------------------------


def _think_tags(template: str) -> pb.ReasoningConfig | None:
    if "[/THINK]" in template:
        open_, close = "[THINK]", "[/THINK]"
    elif found := _THINK.search(template):
        open_, close = f"<{found[1]}>", f"</{found[1]}>"
    else:
        return None
    wrapped = re.search(f"{re.escape(open_)}{_NEWLINE}|{_NEWLINE}{re.escape(close)}", template)
    trimmed = "content.strip()" in template or "content.lstrip(" in template
    return pb.ReasoningConfig(
        syntax=pb.REASONING_THINK_TAGS,
        open=open_,
        close=close,
        wrap_newlines=bool(wrapped) or trimmed,
    )


def _assistant_open(template: str) -> str:
    """What begins the assistant's message: the marker with that role in it or after it, among
    those that the template writes when it is asked for one; else the end of an instruction."""
    _, asked, tail = template.rpartition("add_generation_prompt")
    first = ""
    for marker in _MARKER.finditer(tail if asked else ""):
        role = _ROLE.match(tail, marker.end())
        if role is not None or _ROLE.search(marker[0]):
            return marker[0] + (role[0] if role else "")
        first = first or marker[0]
    return first or ("[/INST]" if "[/INST]" in template else "")


def _message_end(template: str, vocabulary: Vocabulary) -> str:
    """A token that ends generations and that the template writes after messages."""
    texts = [vocabulary.texts[token].decode("utf-8", "replace") for token in vocabulary.ends]
    for token, text in zip(vocabulary.ends, texts, strict=True):
        if text in template and vocabulary.types[token] in _SPECIAL:
            return text
    if vocabulary.eos >= 0 and "eos_token" in template:
        return vocabulary.texts[vocabulary.eos].decode("utf-8", "replace")
    return ""
