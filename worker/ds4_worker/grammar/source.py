"""What an answer has to match, as the text that the grammar library reads.

Owns: the translation of a request's wish (a schema, an expression, a grammar, some choices) into
one grammar, and putting it inside the envelope that the model's syntax asks for. The texts are
llguidance's: JSON with a list of grammars, of which the first is the whole answer. Whether a
grammar makes sense is the compiler's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from ds4_common.errors import GrammarError

Kind: TypeAlias = Literal["json_schema", "json_object", "regex", "choice", "lark"]

# Compiling takes time that grows with the square of a grammar's size: this much, a second or two.
MAX_SOURCE_CHARS = 1 << 18
ANSWER = "@answer"  # how an envelope refers to the grammar of the answer
# Between the parts of a JSON value; a model that writes nothing but blanks would never end.
WHITESPACE = r"[ \t\r\n]{0,32}"
_JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}


def answer_grammar(kind: Kind, value: Any, *, strict: bool = True) -> dict[str, Any]:
    """The grammar of one answer, named for an envelope. Raises GrammarError.

    `strict` False lets keywords of a JSON schema that cannot be enforced pass unenforced."""
    from llguidance import LLMatcher

    name = ANSWER.removeprefix("@")
    if kind == "choice":
        # A terminal: the lexer takes any number of texts, the parser at most 2000 ways to go on.
        return {"name": name, "lark_grammar": f"start: CHOICE\nCHOICE: {choices(value)}"}
    if kind == "lark":
        return {"name": name, "lark_grammar": _lark(value)}
    if kind in ("json_schema", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else value
        options: Any = {**_JSON_OPTIONS, "lenient": not strict}
        text = _json(schema)
        check_size(text)
        try:
            text = LLMatcher.grammar_from_json_schema(text, overrides=options)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"not a JSON schema: {error}") from error
    else:
        text = LLMatcher.grammar_from_regex(value)
    grammar: dict[str, Any] = msgspec.json.decode(text)["grammars"][0]
    return {**grammar, "name": name}


def check_size(text: str) -> None:
    """Raises GrammarError for what would take too long to compile."""
    if len(text) > MAX_SOURCE_CHARS:
        raise GrammarError(
            f"the grammar has {len(text)} characters, expected at most {MAX_SOURCE_CHARS}"
        )


def choices(values: Sequence[str]) -> str:
    """A Lark expression: exactly one of these texts."""
    return " | ".join(map(_json, values))


def whole_answer(envelope: str, answer: Mapping[str, Any] | None = None) -> str:
    """What the compiler takes: an envelope (Lark, which may refer to `ANSWER`), and the answer."""
    grammars: list[Mapping[str, Any]] = [{"lark_grammar": envelope}]
    if answer is not None:
        grammars.append(answer)
    return _json({"grammars": grammars})


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _lark(text: str) -> str:
    """A grammar as it is, or translated from the GBNF of llama.cpp."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # that is what the converter raises
        raise GrammarError(f"not a GBNF grammar: {error}") from error
