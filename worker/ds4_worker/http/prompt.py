"""From a conversation to the prompt that the model sees, and to the reader of what follows it.

Owns: the values that a chat template gets, the exact replay of earlier calls, and the state in
which the answer begins. Runs in a thread of its own (`template.run_with_deadline`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from ds4_common.contract.frontend import Frontend, ReasoningSyntax
from ds4_common.errors import RequestError
from ds4_worker.engine.api import ReasoningSpan
from ds4_worker.grammar.source import ANSWER
from ds4_worker.http import tool_prompt
from ds4_worker.http.constraints import Wanted
from ds4_worker.http.conversation import Conversation, Thinking, Turn
from ds4_worker.http.model import ServedModel
from ds4_worker.http.replay import Block, CallMemory
from ds4_worker.http.template_form import CallForm, TemplateForm, marked_calls
from ds4_worker.parse.choose import FRAMED, make_parser
from ds4_worker.parse.events import AnswerParser, Tool

# Below it the most thorough effort would not fit; the published server falls back as well.
MAX_EFFORT_CONTEXT_TOKENS = 393216


class Prompt(msgspec.Struct, kw_only=True):
    """A prepared prompt, and what is known of the answer that follows it."""

    text: str
    ids: list[int]
    in_reasoning: bool
    reasoning: ReasoningSpan | None
    # A new parser for one choice; None when all that is generated is the answer's text.
    parser: Callable[[], AnswerParser] | None
    wanted: Wanted | None = None  # what the answer has to match


def render_prompt(conversation: Conversation, model: ServedModel, memory: CallMemory) -> Prompt:
    """Raises RequestError for what the template refuses or the context cannot hold."""
    thinking = thinking_of(conversation, model)
    tools, template_tools = conversation.tools, conversation.template_tools
    if conversation.tool_choice.mode == "none":
        tools, template_tools = (), ()
    values = {**thinking_values(thinking, model), **conversation.template_kwargs}
    form, turns, frontend = None, conversation.turns, model.frontend
    with_calls = tools or any(turn.calls or turn.role == "tool" for turn in turns)
    if with_calls:  # else there is nothing to ask the template
        form = model.chat_template.form.calls
    framed = frontend.tools is not None and frontend.tools.syntax in FRAMED
    if form is None and with_calls and not framed:
        # The template knows no tools: they are described in words that most models understand.
        frontend = msgspec.structs.replace(frontend, tools=tool_prompt.SYNTAX)
        turns = tool_prompt.flatten(turns, template_tools, memory)
    elif template_tools:
        values["tools"] = template_tools
    text = Rendering(conversation, model, memory, form).text(turns, values)
    model.check_text(text, conversation.path)
    in_reasoning = begins_in_reasoning(frontend.reasoning, text)
    parser = None
    if frontend.reasoning is not None or framed or tools:
        new_id = partial(memory.new_id, conversation.call_prefix)
        envelope = open_envelope(frontend.reasoning, text) or ""
        parser = _parser_of(frontend, model, tools, in_reasoning, envelope, new_id)
    return Prompt(
        text=text,
        ids=model.encode_prompt(text),
        in_reasoning=in_reasoning,
        reasoning=_span(model, thinking, in_reasoning),
        wanted=_wanted(conversation, frontend, model, tools, in_reasoning),
        parser=parser,
    )


def _parser_of(
    frontend: Frontend,
    model: ServedModel,
    tools: tuple[Tool, ...],
    in_reasoning: bool,
    envelope: str,
    new_id: Callable[[], str],
) -> Callable[[], AnswerParser]:
    def make() -> AnswerParser:
        return make_parser(
            frontend,
            model.tokenizer,
            tools=tools,
            in_reasoning=in_reasoning,
            envelope=envelope,
            new_call_id=new_id,
        )

    return make


def _wanted(
    conversation: Conversation,
    frontend: Frontend,
    model: ServedModel,
    tools: tuple[Tool, ...],
    in_reasoning: bool,
) -> Wanted | None:
    """The grammar of the whole answer, where anything is to be enforced."""
    choice, constraint = conversation.tool_choice, conversation.decoding.constraint
    parallel = conversation.parallel_tool_calls
    if constraint is None and choice.mode not in ("required", "named"):
        return None
    from ds4_worker.parse.grammars import structured_grammar, tool_grammar  # no part of starting

    if constraint is None or choice.mode in ("required", "named"):
        envelope = tool_grammar(
            frontend,
            model.tokenizer,
            tools,
            required=True,
            named=choice.name or None,
            parallel=parallel,
            in_reasoning=in_reasoning,
        )
        return Wanted(envelope, None, "tool_choice")
    envelope = structured_grammar(
        frontend,
        model.tokenizer,
        ANSWER,
        tools=tools,
        parallel=parallel,
        in_reasoning=in_reasoning,
    )
    return Wanted(envelope, constraint, constraint.path)


# --- reasoning ---------------------------------------------------------------------------------


def thinking_of(conversation: Conversation, model: ServedModel) -> Thinking:
    """What was asked for; else what the model's name says; else reasoning, where it is known."""
    thinking = conversation.thinking
    if thinking.enabled is None and model.frontend.reasoning is not None:
        named = model.thinking_by_name(conversation.model)
        thinking = msgspec.structs.replace(thinking, enabled=named is not False)
    return thinking


def thinking_values(thinking: Thinking, model: ServedModel) -> dict[str, Any]:
    """The names under which templates look for it."""
    values: dict[str, Any] = {}
    if thinking.enabled is not None:
        values |= {"enable_thinking": thinking.enabled, "thinking": thinking.enabled}
    if thinking.effort is not None:
        effort = thinking.effort
        if effort == "max" and model.context_tokens < MAX_EFFORT_CONTEXT_TOKENS:
            effort = "high"
        values["reasoning_effort"] = effort
    return values


def open_envelope(syntax: ReasoningSyntax | None, prompt: str) -> str | None:
    """What the prompt holds of the assistant's own message; None where nothing tells."""
    boundaries = [m for m in (syntax.assistant_open, syntax.message_end) if m] if syntax else []
    if not boundaries:
        return None
    ends = [prompt.rfind(mark) + len(mark) for mark in boundaries if mark in prompt]
    return prompt[max(ends, default=0) :]


def begins_in_reasoning(syntax: ReasoningSyntax | None, prompt: str) -> bool:
    """Whether the prompt ends inside reasoning. Only the assistant's open envelope tells: what
    stands in messages that have ended is somebody's text."""
    if syntax is None or not syntax.open:
        return False
    envelope = open_envelope(syntax, prompt)
    if envelope is None:
        return prompt.rstrip().endswith(syntax.open.rstrip())
    opened = envelope.rfind(syntax.open)
    return opened >= 0 and (not syntax.close or envelope.find(syntax.close, opened) < 0)


def _span(model: ServedModel, thinking: Thinking, in_reasoning: bool) -> ReasoningSpan | None:
    """What the engine has to know of reasoning; nothing where it has nothing to enforce."""
    syntax, budget = model.frontend.reasoning, thinking.budget_tokens
    if syntax is None or not syntax.close:
        return None
    if budget is None and not model.ignore_eos_in_reasoning:
        return None

    def ids(text: str) -> tuple[int, ...]:
        encoded = model.tokenizer.encode(text, add_special=False, parse_special=True)
        return tuple(encoded) if text else ()

    return ReasoningSpan(
        close=ids(syntax.close),
        open=ids(syntax.open),
        opened=in_reasoning,
        budget=budget,
        ignore_eos=model.ignore_eos_in_reasoning,
    )


# --- messages ----------------------------------------------------------------------------------


class Rendering:
    """One conversation through the model's template."""

    def __init__(
        self,
        conversation: Conversation,
        model: ServedModel,
        memory: CallMemory,
        form: CallForm | None,
    ) -> None:
        self._conversation = conversation
        self._model = model
        self._memory = memory
        self._form = form

    def text(self, turns: Sequence[Turn], values: Mapping[str, Any]) -> str:
        blocks = {
            index: block
            for index, turn in enumerate(turns)
            if turn.calls and (block := self._memory.block_of([c.id for c in turn.calls]))
        }
        text = self._render(turns, values, blocks) if blocks else None
        if text is None:
            text = self._render(turns, values, {})
        assert text is not None
        return text

    def _render(
        self, turns: Sequence[Turn], values: Mapping[str, Any], blocks: Mapping[int, Block]
    ) -> str | None:
        """None when a block has no place in what the template writes."""
        marks = {index: [os.urandom(16).hex() for _ in turns[index].calls] for index in blocks}
        names = tool_names(turns)
        messages = [
            self._message(turn, marks.get(index), names) for index, turn in enumerate(turns)
        ]
        end = None
        if self._conversation.continue_last:
            end = os.urandom(16).hex()
            messages[-1]["content"] = f"{messages[-1]['content'] or ''}{end}"
        text = self._model.render(messages, values, add_generation_prompt=end is None)
        for index, block in blocks.items():
            replaced = replay(text, marks[index], block, self._model.chat_template.form)
            if replaced is None:
                return None
            text = replaced
        return text if end is None else _until(text, end)

    def _message(
        self, turn: Turn, marks: Sequence[str] | None, names: Mapping[str, str]
    ) -> dict[str, Any]:
        """A message as chat templates expect it. `marks` stand for the calls of a turn that is
        replayed: no text of anybody's can hold them, for they are drawn anew each time."""
        values: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.calls and self._form is not None:
            calls = turn.calls if marks is None else marked_calls(marks)
            values = self._form.message(turn.content, calls)
        name = turn.name
        if turn.role == "tool" and turn.call_id is not None:
            values["tool_call_id"] = self._form.id(turn.call_id) if self._form else turn.call_id
            name = name or names.get(turn.call_id)
        if name is not None:
            values["name"] = name
        if turn.reasoning is not None:
            values["reasoning_content"] = turn.reasoning
            if self._model.chat_template.names_thinking and not turn.content:
                values["thinking"] = turn.reasoning
        return values


def tool_names(turns: Sequence[Turn]) -> dict[str, str]:
    """The name of the tool behind each call id: results need not repeat it."""
    return {call.id: call.name for turn in turns for call in turn.calls}


def replay(text: str, marks: Sequence[str], block: Block, form: TemplateForm) -> str | None:
    """Puts `block` where the calls named `marks` stand; None when they do not stand as expected."""
    around = form.surroundings(len(marks))
    if around is None or any(text.count(mark) != 1 for mark in marks):
        return None
    begin = text.index(marks[0]) - len(around.head)
    last = text.index(marks[-1]) + len(marks[-1])
    end = last + len(around.tail)
    if begin < 0 or text[begin : begin + len(around.head)] != around.head:
        return None
    if text[last:end] != around.tail:
        return None
    before = text[:begin]
    if block.after_text:
        before = before.rstrip()
    return before + block.space + block.text + text[end:]


def _until(text: str, mark: str) -> str:
    position = text.find(mark)
    if position < 0:
        raise RequestError(
            "the model's chat template does not show the message that is to be continued",
            param="messages",
            code="template_error",
        )
    return text[:position]
