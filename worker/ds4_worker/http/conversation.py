"""What a request asks for, in one form for every API.

Owns: plain data. Each API translates its own body into a `Conversation` (or, for text completions,
into prompts) and `Decoding`; everything behind that - templates, sampling, parsers, the engine -
knows only these. A field that an API lacks keeps its default. `Decoding.paths` tells where a value
stood in the API's own body, so that a refusal names the client's field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ds4_worker.parse.events import Tool

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["low", "medium", "high", "max"]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an earlier assistant turn, as the client sends it back."""

    id: str
    name: str
    arguments: str  # the JSON text of an object; anything else is passed on as a string


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message. `content` is text: no model here takes anything else."""

    role: Role
    content: str = ""
    reasoning: str | None = None  # of an assistant
    calls: tuple[Call, ...] = ()  # of an assistant
    call_id: str | None = None  # of a tool result: the call that it answers
    name: str | None = None  # of a tool result: the tool; else the participant


class ToolChoice(msgspec.Struct, frozen=True):
    """`none` renders no tools and looks for no calls; `required` and `named` are enforced."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""  # of the tool that must be called, for `named`


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and how long the model reasons first. `enabled` None: as the model does by itself."""

    enabled: bool | None = None
    effort: Effort | None = None
    budget_tokens: int | None = None  # then its end is forced


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer has to match."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    value: Any = None  # the schema, the expression, the texts or the grammar (Lark or GBNF)
    strict: bool = True  # a keyword of the schema that cannot be enforced is refused
    path: str = "response_format"  # of the field, for refusals


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """How to generate. None means the model's default, and where it has none the server's."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = {}
    seed: int | None = None
    n: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    constraint: Constraint | None = None
    prediction: str = ""  # of the answer's text: changes its speed alone
    paths: Mapping[str, str] = {}  # this Struct's field -> the path in the API's body

    def path(self, field: str) -> str:
        return self.paths.get(field, field)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the client wants to see of the generation itself."""

    token_ids: bool = False
    timestamps: bool = False


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request. `model` is the name that the client used, checked by `ServedModel.resolve`.

    `template_tools` are the same tools as `tools`, in the form that chat templates render: OpenAI's
    `{"type": "function", "function": {...}}`.
    """

    turns: Sequence[Turn]
    model: str | None = None
    tools: tuple[Tool, ...] = ()
    template_tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    thinking: Thinking = Thinking()
    decoding: Decoding = Decoding()
    observation: Observation = Observation()
    stream: bool = False
    template_kwargs: Mapping[str, Any] = {}  # win over everything that the server would set
    continue_last: bool = False  # the last turn is the assistant's and goes on
    call_prefix: str = "call_"  # of the ids that the answer's calls get
    path: str = "messages"  # where the turns stood in the API's body
