"""What holds for every answer in every syntax, however hostile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ds4_worker.parse.choose import FRAMED, StreamingParser, syntax_delimiters
from ds4_worker.parse.events import AnswerEvent
from ds4_worker.parse.marks import MarkedText, Marks
from helpers.answers import Case, Joined, join, presented
from helpers.syntaxes import BAR, CASES
from helpers.transcripts import TRANSCRIPTS

NAMES = sorted(CASES)
BLOCKS = [name for name in NAMES if CASES[name].frontend.tools.syntax not in FRAMED]  # type: ignore[union-attr]
# Without a delimiter that is no token.
TOKENS = [name for name in NAMES if name not in ("hermes-spelled", "llama", "dsml")]
SNIPPETS = [
    '{"name": "now", "arguments": {}}',
    '{"name": "get_weather", "parameters": {"city": "a"',
    '{"arguments": {"city": 1}, "name": ',
    "<function=get_weather>",
    "<parameter=city>\n",
    "\n</parameter>",
    "</function>",
    "get_weather",
    "write.file",
    f'<{BAR}invoke name="now">',
    f'<{BAR}parameter name="city" string="',
    f"</{BAR}parameter>",
    f"</{BAR}invoke>",
    'call tool="get_weather" index="1"',
    'argument key="a" type="string"',
    '<atem:invoke name="now">',
    " to=self",
    "assistant to=now",
    "commentary to=functions.now ",
    "analysis",
    "final",
    *('"', "\\", "\\u", "\\ud83d", "{", "}", "[", "]", ",", ":", "<", "</", ">", "&", "&am"),
    *(" ", "\n", "\n\n", "é", "€", "😀", "1", "-0.5e", "true", "null", "text", "\0"),
]


def fragments(case: Case) -> st.SearchStrategy[list[int]]:
    """Tokens of an answer made of the syntax's own pieces, whole, spelled out or cut."""
    vocabulary = case.vocabulary
    whole = [t.answer for t in TRANSCRIPTS if CASES[t.case] is case]
    texts = [*syntax_delimiters(case.frontend), *vocabulary.texts, *SNIPPETS]
    piece = st.one_of(
        st.sampled_from(texts).map(vocabulary.tokens),
        st.sampled_from(texts).map(vocabulary.spelled),
        st.integers(0, vocabulary.n_vocab - 1).map(lambda token: [token]),
        st.tuples(st.sampled_from(whole or texts), st.integers(0, 200), st.integers(0, 200)).map(
            lambda cut: vocabulary.tokens(cut[0])[min(cut[1:]) : max(cut[1:])]
        ),
        st.sampled_from(whole or texts).map(vocabulary.tokens),
    )
    return st.lists(piece, max_size=12).map(lambda pieces: [t for p in pieces for t in p])


def lagging(pairs: list[tuple[int, str]], lags: list[int]) -> Iterator[tuple[int, str]]:
    """The same tokens, their text presented later: up to `lag` characters are held back."""
    held = ""
    for i, (token, text) in enumerate(pairs):
        held += text
        lag = lags[i % len(lags)] if lags and i + 1 < len(pairs) else 0
        free = max(0, len(held) - lag)
        yield token, held[:free]
        held = held[free:]


def read(case: Case, pairs: Iterator[tuple[int, str]], inside: bool) -> Joined:
    parser = case.parser(inside)
    events: list[AnswerEvent] = []
    for token, text in pairs:
        events += parser.push(token, text)
    return join(events + parser.finish(), parser.block)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_when_text_is_presented_changes_nothing(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    tokens = data.draw(fragments(case))
    inside = data.draw(st.booleans())
    lags = data.draw(st.lists(st.integers(0, 40), max_size=4))
    pairs = presented(case.vocabulary, tokens)
    assert read(case, lagging(pairs, lags), inside) == read(case, iter(pairs), inside)


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_answer_without_calls_is_its_text(name: str, data: st.DataObject) -> None:
    """No reasoning, no tools: every character is content, in order."""
    case = CASES[name]
    case = structs.replace(case, frontend=structs.replace(case.frontend, reasoning=None), tools=())
    pairs = presented(case.vocabulary, data.draw(fragments(case)))
    marks = Marks(case.vocabulary, syntax_delimiters(case.frontend))
    marked = MarkedText(marks)
    text = marks.plain("".join(marked.push(*pair) for pair in pairs) + marked.finish())
    got = read(case, iter(pairs), False)
    assert got.content == text
    assert (got.reasoning, got.calls, got.block) == ("", [], "")


@pytest.mark.parametrize("name", TOKENS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_spelled_delimiters_open_no_call_and_end_no_reasoning(
    name: str, data: st.DataObject
) -> None:
    case = CASES[name]
    whole = [t.answer for t in TRANSCRIPTS if CASES[t.case] is case]
    pieces = data.draw(st.lists(st.sampled_from([*SNIPPETS, *whole]), max_size=6))
    got = case.parse_spelled("".join(pieces).encode("utf-8", "replace").decode())
    assert got.calls == []
    assert got.reasoning == ""


ADVERSARIES = {
    "whitespace": " \n",
    "openers": "<tool_call>",
    "an endless name": '<tool_call>{"name": "a',
    "an endless number": '<tool_call>{"name": "now", "arguments": {"a": 1',
    "calls": '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n',
    "depth": "[",
    "entities": "&am",
    "tags": f"<{BAR}invoke",
    "frames": "<|start|>assistant",
    "controls": "<|channel|><|message|><|eom|><|open|><|sep|><|end|>",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adversary", sorted(ADVERSARIES))
def test_work_and_held_text_do_not_grow_with_the_answer(name: str, adversary: str) -> None:
    case = CASES[name]
    beginning = case.vocabulary.tokens(BEGINNINGS.get(name, ""))
    tokens = case.vocabulary.tokens(ADVERSARIES[adversary])
    once, twice = (
        operations(case, beginning + tokens * (n // len(tokens))) for n in (1_000, 2_000)
    )
    assert twice < 2.3 * once + 5_000


# An open text or string argument, which takes whatever follows.
BEGINNINGS = {
    "xtml": "<|open|>response<|sep|>",
    "recipient": " to=user<|message|>",
    "harmony": "<|channel|>final<|message|>",
    "qwen": "<tool_call>\n<function=get_weather>\n<parameter=city>\n",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>",
    "dsml": f'<{BAR}tool_calls><{BAR}invoke name="get_weather"><{BAR}parameter name="city" '
    'string="true">',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "',
    "hermes": '<tool_call>{"name": "get_weather", "arguments": {"hours": ',
}


def operations(case: Case, tokens: list[int]) -> int:
    """Calls of functions while these tokens are parsed, and characters that were copied."""
    count = 0
    parser = case.parser()
    assert isinstance(parser, StreamingParser)
    source = parser._source

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += 1

    pairs = presented(case.vocabulary, tokens)
    sys.setprofile(profile)
    try:
        for token, text in pairs:
            parser.push(token, text)
            count += len(source._text)
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_thousand_hostile_tokens_are_read(name: str) -> None:
    case = CASES[name]
    texts = [*syntax_delimiters(case.frontend), *ADVERSARIES.values()]
    tokens = [token for text in texts for token in case.vocabulary.tokens(text)]
    parser = case.parser()
    for token, text in presented(case.vocabulary, tokens * (100_000 // len(tokens))):
        parser.push(token, text)
    parser.finish()
