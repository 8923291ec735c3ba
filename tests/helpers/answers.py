"""Answers for tests of parsers: a vocabulary of single characters and named special tokens.

Owns: turning a written answer into tokens (specials as their ids, or spelled out), feeding it to a
parser in any grouping, and joining what comes out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ds4_common.contract.frontend import Frontend, ReasoningSyntax, SamplingDefaults, ToolSyntax
from ds4_common.tokenizer.encoder import StreamDetokenizer
from ds4_worker.parse.choose import make_parser
from ds4_worker.parse.events import (
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallClosed,
    CallOpened,
    Reasoning,
    Text,
    Tool,
)

_BYTES = 256  # the first ids are the bytes


class TinyVocabulary:
    """One token per byte, then the special tokens. `shown` ones are user-defined, others control.

    A string of `tokens` reads like the answer itself; `spelled` gives the bytes of everything.
    """

    def __init__(self, shown: Sequence[str] = (), control: Sequence[str] = ()) -> None:
        self.texts = [*shown, *control]
        self._first_control = _BYTES + len(shown)
        self.n_vocab = _BYTES + len(self.texts)
        self.adds_space_prefix = False

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self.tokens(text) if parse_special else self.spelled(text)

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            special = max((t for t in self.texts if text.startswith(t, at)), key=len, default="")
            ids += [_BYTES + self.texts.index(special)] if special else text[at].encode()
            at += len(special) or 1
        return ids

    def spelled(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < _BYTES else self.texts[token - _BYTES].encode()

    def is_control(self, token: int) -> bool:
        return token >= self._first_control

    def is_special(self, token: int) -> bool:
        return token >= _BYTES


def frontend(tools: ToolSyntax | None = None, reasoning: ReasoningSyntax | None = None) -> Frontend:
    """A record that says nothing but the syntax."""
    return Frontend(
        served_id="model",
        aliases=(),
        fingerprint="",
        context_tokens=1 << 20,
        vocabulary=1 << 20,
        eos_ids=(1,),
        bos_id=None,
        eos_id=None,
        add_bos=False,
        add_eos=False,
        bos_token="",
        eos_token="",
        chat_template=None,
        defaults=SamplingDefaults(
            temperature=1.0, top_k=0, top_p=1.0, min_p=0.05, repeat_penalty=1.0, max_tokens=0
        ),
        page_tokens=64,
        cache_bytes_per_token_f16=1,
        cache_bytes_per_token_f32=1,
        weights_bytes=1,
        tools=tools,
        reasoning=reasoning,
    )


class Joined(msgspec.Struct, kw_only=True):
    """Events with their fragments joined: the same for every split of the same tokens."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, bool]] = []  # name, arguments, complete
    order: list[str] = []  # kinds of events as they came, neighbours of one kind once
    block: str = ""

    def arguments(self, index: int = 0) -> Any:
        return msgspec.json.decode(self.calls[index][1])


def presented(vocabulary: TinyVocabulary, tokens: Iterable[int]) -> list[tuple[int, str]]:
    """The tokens with the text that the engine presents with each of them."""
    detokenizer = StreamDetokenizer(vocabulary, text_start=False)  # type: ignore[arg-type]
    pairs = [(token, detokenizer.push(token)) for token in tokens]
    if pairs:
        pairs[-1] = (pairs[-1][0], pairs[-1][1] + detokenizer.flush())
    return pairs


def feed(
    parser: AnswerParser, vocabulary: TinyVocabulary, tokens: Iterable[int]
) -> list[AnswerEvent]:
    """What the parser makes of the tokens, with the text as the engine presents it."""
    events: list[AnswerEvent] = []
    for token, text in presented(vocabulary, tokens):
        events += parser.push(token, text)
    return events + parser.finish()


def join(events: Iterable[AnswerEvent], block: str = "") -> Joined:
    joined = Joined(block=block)
    calls: list[list[Any]] = []
    ids: set[str] = set()
    for event in events:
        kind = type(event).__name__
        if not joined.order or joined.order[-1] != kind:
            joined.order.append(kind)
        match event:
            case Text():
                assert event.text
                joined.content += event.text
            case Reasoning():
                assert event.text
                joined.reasoning += event.text
            case CallOpened():
                assert event.index == len(calls)
                assert event.id not in ids
                ids.add(event.id)
                calls.append([event.name, "", False])
            case CallArguments():
                assert event.fragment
                assert event.index == len(calls) - 1
                assert not calls[-1][2]
                calls[-1][1] += event.fragment
            case CallClosed():
                assert event.index == len(calls) - 1
                msgspec.json.decode(calls[-1][1])
                calls[-1][2] = True
    joined.calls = [(name, arguments, complete) for name, arguments, complete in calls]
    return joined


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A syntax over a vocabulary, ready to parse answers."""

    frontend: Frontend
    vocabulary: Any
    tools: tuple[Tool, ...] = ()

    def parser(self, in_reasoning: bool = False, envelope: str = "") -> AnswerParser:
        counter = itertools.count()
        return make_parser(
            self.frontend,
            self.vocabulary,
            tools=self.tools,
            in_reasoning=in_reasoning,
            new_call_id=lambda: f"call_{next(counter)}",
            envelope=envelope,
        )

    def parse_tokens(
        self, tokens: Iterable[int], in_reasoning: bool = False, envelope: str = ""
    ) -> Joined:
        parser = self.parser(in_reasoning, envelope)
        events = feed(parser, self.vocabulary, tokens)
        return join(events, parser.block)

    def parse(self, answer: str, in_reasoning: bool = False, envelope: str = "") -> Joined:
        """`answer` with its special tokens as tokens."""
        return self.parse_tokens(self.vocabulary.tokens(answer), in_reasoning, envelope)

    def parse_spelled(self, answer: str, in_reasoning: bool = False) -> Joined:
        """`answer` without a single special token."""
        return self.parse_tokens(self.vocabulary.spelled(answer), in_reasoning)
