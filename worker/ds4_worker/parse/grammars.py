"""Grammars of whole answers, in the syntax that a model writes.

Owns: what must hold for `tool_choice` required or named, and for structured answers: reasoning
stays free, delimiters are the tokens they must be, arguments and answers follow their schemas. The
text is llguidance's Lark; whoever compiles it must know every id of `delimiter_ids` as a special
token, and no id that ends a generation can be part of a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4_common.contract.frontend import Frontend
from ds4_common.errors import RequestError
from ds4_worker.parse.choose import FRAMED, marks_of, syntax_module
from ds4_worker.parse.events import Tool
from ds4_worker.parse.lark import Envelope, Lark
from ds4_worker.parse.marks import Vocabulary

_SPACE = "(/[ \\n]{1,4}/)?"  # between reasoning and what must follow it


def delimiter_ids(frontend: Frontend, tokenizer: Vocabulary) -> dict[int, str]:
    """The tokens that act as delimiters, with their texts."""
    marks = marks_of(frontend, tokenizer)
    return {token: marks.plain(mark) for token, mark in marks.characters.items()}


def tool_grammar(
    frontend: Frontend,
    tokenizer: Vocabulary,
    tools: Sequence[Tool],
    *,
    required: bool,
    named: str | None,
    parallel: bool,
    in_reasoning: bool = False,
) -> str:
    """The grammar of an answer that may (or, with `required` or `named`, must) call these tools.

    `named` leaves only that tool. Without `parallel` there is at most one call. An answer that need
    not call is free text. Raises RequestError where the model has no syntax for calls.
    """
    lark = Lark(marks_of(frontend, tokenizer))
    callable_ = tuple(tool for tool in tools if named is None or tool.name == named)
    if frontend.tools is None or not callable_:
        what = "no tool of that name" if frontend.tools else "this model has no syntax for calls"
        raise RequestError(f"tool_choice: cannot be enforced: {what}", param="tool_choice")
    wanted = Envelope(
        tools=callable_,
        must_call=required or named is not None,
        parallel=parallel,
        in_reasoning=in_reasoning,
        answer=lark.any_text(),
    )
    return lark.finish(_start(lark, frontend, wanted, free=True))


def structured_grammar(
    frontend: Frontend,
    tokenizer: Vocabulary,
    answer: str,
    *,
    tools: Sequence[Tool] = (),
    parallel: bool = True,
    in_reasoning: bool = False,
) -> str:
    """The grammar of an answer that is `answer`, an expression of the dialect such as
    `%json {...}` or `/regex/`, or else calls of these tools; reasoning before it is free."""
    lark = Lark(marks_of(frontend, tokenizer))
    wanted = Envelope(
        tools=tools if frontend.tools is not None else (),
        must_call=False,
        parallel=parallel,
        in_reasoning=in_reasoning,
        answer=lark.rule("answer", answer),
    )
    return lark.finish(_start(lark, frontend, wanted, free=False))


def _start(lark: Lark, frontend: Frontend, wanted: Envelope, *, free: bool) -> str:
    if frontend.tools is not None and frontend.tools.syntax in FRAMED:
        envelope: str = syntax_module(frontend.tools.syntax).envelope(lark, frontend.tools, wanted)
        return envelope
    reasoning = _reasoning(lark, frontend, in_reasoning=wanted.in_reasoning)
    parts = [] if wanted.must_call else [wanted.answer]
    if wanted.tools and frontend.tools is not None:
        module = syntax_module(frontend.tools.syntax)
        calls = module.calls(lark, frontend.tools, wanted.tools, parallel=wanted.parallel)
        if wanted.must_call or not free or not calls.opener:
            parts.append(f"{lark.literal(calls.opener)} {calls.rest}")
        else:
            parts.append(f"{lark.text_until(calls.opener)} {calls.rest}")
    space = f"{_SPACE} " if reasoning and (wanted.must_call or not free) else ""
    return f"{reasoning} {space}{lark.choice(parts)}".strip()


def _reasoning(lark: Lark, frontend: Frontend, *, in_reasoning: bool) -> str:
    reasoning = frontend.reasoning
    if reasoning is None:
        return ""
    end = lark.text_until(reasoning.close)
    return end if in_reasoning else f"({lark.literal(reasoning.open)} {end})?"
