"""Structured answers: the fields that ask for them, and the grammars behind them.

Owns: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, llama.cpp's
`json_schema` and `grammar`, all as one `Constraint`; and compiling it, with the model's envelope
around it, off the event loop. The grammar library is imported by the first request that needs it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ds4_common.errors import GrammarError, GrammarUntried, RequestError
from ds4_worker.engine.api import Grammar
from ds4_worker.grammar.source import ANSWER, answer_grammar, whole_answer
from ds4_worker.http import tool_prompt
from ds4_worker.http.conversation import Constraint, Decoding
from ds4_worker.http.model import ServedModel

if TYPE_CHECKING:
    from ds4_worker.grammar.compiler import Compiler
    from ds4_worker.grammar.kept import GrammarStats
    from ds4_worker.grammar.trial import Trial

_REFUSALS = 64


class JsonSchemaFormat(msgspec.Struct):
    schema_: dict[str, Any] | bool | None = msgspec.field(name="schema", default=None)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """Besides OpenAI's three types: `regex` and `lark`, with the expression in `value`; and a
    `schema` beside `json_object`, as llama.cpp has it."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = msgspec.field(name="schema", default=None)
    value: str | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's field; one of these."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ConstraintFields(msgspec.Struct, kw_only=True):
    """Absent and null mean the same. At most one of them counts."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    grammar: str | None = None

    def constraint(self) -> Constraint | None:
        """Raises RequestError for a wish that is incomplete, and for two of them."""
        found = [*_formats(self.response_format), *_outputs(self.structured_outputs)]
        for field, kind in (
            ("guided_json", "json_schema"),
            ("guided_regex", "regex"),
            ("guided_choice", "choice"),
            ("guided_grammar", "lark"),
            ("json_schema", "json_schema"),
            ("grammar", "lark"),
        ):
            found += _constraint(kind, getattr(self, field), field)
        if len(found) > 1:
            path = found[1].path
            raise RequestError(f"{path}: {found[0].path} constrains the answer too", param=path)
        return found[0] if found else None


def _formats(form: ResponseFormat | None) -> list[Constraint]:
    if form is None or form.type == "text":
        return []
    if form.type == "json_object" and form.schema_ is not None:
        return _constraint("json_schema", form.schema_, "response_format.schema")
    if form.type == "json_object":
        return [Constraint(kind="json_object")]
    if form.type == "json_schema":
        path = "response_format.json_schema.schema"
        schema = None if form.json_schema is None else form.json_schema.schema_
        strict = form.json_schema is not None and bool(form.json_schema.strict)
        value = _given(schema, path)
        return [Constraint(kind="json_schema", value=value, path=path, strict=strict)]
    if form.type in ("regex", "lark"):
        path = "response_format.value"
        return _constraint(form.type, _given(form.value, path), path)
    raise RequestError(
        f"response_format.type: got {form.type[:100]!r}, "
        "expected text, json_object, json_schema, regex or lark",
        param="response_format.type",
    )


def _outputs(wanted: StructuredOutputs | None) -> list[Constraint]:
    if wanted is None:
        return []
    path = "structured_outputs"
    return [
        *_constraint("json_schema", wanted.json, f"{path}.json"),
        *_constraint("json_object", wanted.json_object or None, f"{path}.json_object"),
        *_constraint("regex", wanted.regex, f"{path}.regex"),
        *_constraint("choice", wanted.choice, f"{path}.choice"),
        *_constraint("lark", wanted.grammar, f"{path}.grammar"),
    ]


def _constraint(kind: Any, value: Any, path: str) -> list[Constraint]:
    if value is None or value == "":  # llama.cpp's clients send an empty grammar for none
        return []
    if kind == "json_schema" and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise RequestError(f"{path}: not a JSON schema: {error}", param=path) from error
    if kind == "choice" and not value:
        raise RequestError(f"{path}: is empty, expected at least one text", param=path)
    return [Constraint(kind=kind, value=value, path=path)]


def _given(value: Any, path: str) -> Any:
    if value is None:
        raise RequestError(f"{path}: is missing", param=path)
    return value


# --- compiling ---------------------------------------------------------------------------------


class Wanted(msgspec.Struct, frozen=True):
    """What the whole answer must match: an envelope, which may refer to `constraint`'s grammar."""

    envelope: str
    constraint: Constraint | None
    path: str  # of the field that asks for it


def bare_answer(constraint: Constraint | None) -> Wanted | None:
    """An answer without any envelope: the continuation of a prompt as it stands."""
    if constraint is None:
        return None
    return Wanted(f"start: {ANSWER}", constraint, constraint.path)


def check_combinations(decoding: Decoding) -> None:
    """Refuses what a structured answer excludes."""
    constraint = decoding.constraint
    if constraint is not None and decoding.stop:
        raise RequestError(
            f"{decoding.path('stop')}: cannot be combined with {constraint.path}; "
            "stop_token_ids and stop_token_sequences can",
            param=decoding.path("stop"),
        )


class GrammarService:
    """Grammars of one model, compiled in threads, one at a time."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None
        self._turn = asyncio.Lock()
        self._refused: deque[str] = deque(maxlen=_REFUSALS)  # digests of what took too much

    @property
    def stats(self) -> GrammarStats | None:
        """None before the first grammar."""
        return None if self._compiler is None else self._compiler.stats

    async def compile(self, wanted: Wanted, model: ServedModel) -> Grammar:
        """Raises RequestError: 400 with the library's message, 501 without the library, 503 where
        the machine cannot try it now."""
        from ds4_worker.grammar.trial import Trial  # no part of starting

        trial = Trial()
        try:
            async with self._turn:
                return await asyncio.to_thread(self._compile, wanted, model, trial)
        except asyncio.CancelledError:  # the client is gone
            trial.stop()
            raise
        except GrammarError as error:
            raise RequestError(
                f"{wanted.path}: {error}", param=wanted.path, code="invalid_grammar"
            ) from error
        except GrammarUntried as error:
            raise RequestError(
                f"{wanted.path}: {error}", status=503, param=wanted.path, code="grammar_untried"
            ) from error
        except ModuleNotFoundError as error:
            raise RequestError(
                f"{wanted.path}: needs the llguidance package ({error}); pip install llguidance",
                status=501,
                param=wanted.path,
                code="unsupported_parameter",
            ) from error

    def _compile(self, wanted: Wanted, model: ServedModel, trial: Trial) -> Grammar:
        from ds4_worker.grammar.compiler import Compiler

        constraint, answer = wanted.constraint, None
        if constraint is not None:
            answer = answer_grammar(constraint.kind, constraint.value, strict=constraint.strict)
        if self._compiler is None:
            frontend = model.frontend
            self._compiler = Compiler(
                model.tokenizer, frontend.vocabulary, frontend.eos_ids, delimiters_of(model)
            )
        source = whole_answer(wanted.envelope, answer)
        if constraint is not None and constraint.kind == "lark":
            self._try(source, self._compiler, model, trial)
        return self._compiler.compile(source)

    def _try(self, source: str, compiler: Compiler, model: ServedModel, trial: Trial) -> None:
        """Raises GrammarError for a grammar that would take too much, GrammarUntried."""
        if compiler.knows(source):
            return
        digest = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
        if digest in self._refused:
            raise GrammarError("the grammar took too much to compile when it was asked for before")
        frontend = model.frontend
        try:
            trial.run(source, frontend.vocabulary, frontend.eos_ids, compiler.special_tokens)
        except GrammarError:
            if not trial.stopped:
                self._refused.append(digest)
            raise


def delimiters_of(model: ServedModel) -> Sequence[int]:
    """Tokens that the envelopes of this model name by id."""
    from ds4_worker.parse.grammars import delimiter_ids  # no part of starting

    described = msgspec.structs.replace(model.frontend, tools=tool_prompt.SYNTAX)
    return [
        token
        for frontend in (model.frontend, described)
        for token in delimiter_ids(frontend, model.tokenizer)
    ]
