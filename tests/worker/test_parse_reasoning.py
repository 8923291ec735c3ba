"""Reasoning between tags: what opens it, what ends it, what stays text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ds4_common.contract.frontend import ReasoningSyntax
from ds4_common.tokenizer.build import build_blob
from ds4_common.tokenizer.encoder import Tokenizer
from ds4_worker.parse.choose import PlainParser
from ds4_worker.parse.events import Reasoning, Text
from ds4_worker.parse.marks import MarkedText, Marks
from helpers.answers import Case, TinyVocabulary, frontend, presented
from helpers.vocabularies import bpe_fields


def think_tags(*, wrap_newlines: bool = False) -> ReasoningSyntax:
    return ReasoningSyntax(
        syntax="REASONING_THINK_TAGS",
        open="<think>",
        close="</think>",
        wrap_newlines=wrap_newlines,
        terminal_marker="",
        assistant_open="",
        message_end="",
    )


SHOWN = TinyVocabulary(shown=("<think>", "</think>"))
CONTROL = TinyVocabulary(control=("<think>", "</think>"))
SPELLED = TinyVocabulary()
PLAIN = Case(frontend=frontend(), vocabulary=SHOWN)


def case(vocabulary: TinyVocabulary, *, wrap_newlines: bool = False) -> Case:
    return Case(
        frontend=frontend(reasoning=think_tags(wrap_newlines=wrap_newlines)), vocabulary=vocabulary
    )


@pytest.mark.parametrize("vocabulary", [SHOWN, CONTROL, SPELLED])
@pytest.mark.parametrize(
    ("answer", "inside", "reasoning", "content"),
    [
        ("<think>a b</think>c", False, "a b", "c"),
        ("a b</think>c", True, "a b", "c"),
        ("<think>a b</think>c", True, "a b", "c"),
        ("\n<think>a</think>c", False, "a", "c"),
        ("plain", False, "", "plain"),
        (" plain ", False, "", " plain "),
        ("never ends", True, "never ends", ""),
        ("", True, "", ""),
        ("</think>", True, "", ""),
    ],
)
def test_reasoning_runs_to_the_first_closer(
    vocabulary: TinyVocabulary, answer: str, inside: bool, reasoning: str, content: str
) -> None:
    got = case(vocabulary).parse(answer, inside)
    assert (got.reasoning, got.content) == (reasoning, content)


@pytest.mark.parametrize("vocabulary", [SHOWN, CONTROL])
def test_a_later_closer_is_dropped_if_it_is_the_token(vocabulary: TinyVocabulary) -> None:
    got = case(vocabulary).parse("r</think>a</think>b", True)
    assert (got.reasoning, got.content) == ("r", "ab")
    assert case(vocabulary).parse("a</think>b").content == "ab"


def test_a_later_closer_that_is_spelled_is_text() -> None:
    tokens = [*SHOWN.tokens("r</think>a"), *SHOWN.spelled("</think>b")]
    assert case(SHOWN).parse_tokens(tokens, True).content == "a</think>b"
    assert case(SPELLED).parse("r</think>a</think>b", True).content == "a</think>b"


@pytest.mark.parametrize("vocabulary", [SHOWN, CONTROL])
def test_spelled_delimiters_do_nothing_where_they_are_tokens(vocabulary: TinyVocabulary) -> None:
    got = case(vocabulary).parse_spelled("<think>a</think>b")
    assert (got.reasoning, got.content) == ("", "<think>a</think>b")
    got = case(vocabulary).parse_spelled("a</think>b", True)
    assert (got.reasoning, got.content) == ("a</think>b", "")


def test_an_opener_inside_the_answer_opens_nothing() -> None:
    got = case(SHOWN).parse("a <think>b</think>")
    assert (got.reasoning, got.content) == ("", "a <think>b")


def test_newlines_that_wrap_reasoning_are_neither_reasoning_nor_answer() -> None:
    got = case(SHOWN, wrap_newlines=True).parse("<think>\na\n\nb\n</think>\n\nc\n")
    assert (got.reasoning, got.content) == ("a\n\nb", "c\n")
    got = case(SHOWN, wrap_newlines=True).parse("\n\n</think>\n\n", True)
    assert (got.reasoning, got.content) == ("", "")


def test_a_model_without_syntax_is_text() -> None:
    assert isinstance(PLAIN.parser(), PlainParser)
    assert PLAIN.parse("<think>a</think>").content == "<think>a</think>"


def test_reasoning_streams_token_by_token() -> None:
    parser = case(SHOWN).parser(in_reasoning=True)
    assert parser.push(97, "a") == [Reasoning("a")]
    assert parser.push(SHOWN.tokens("</think>")[0], "</think>") == []
    assert parser.push(98, "b") == [Text("b")]
    assert parser.finish() == []


def test_text_that_a_stop_string_holds_back_stays_on_its_side_of_a_delimiter() -> None:
    parser = case(CONTROL).parser(in_reasoning=True)
    (close,) = CONTROL.tokens("</think>")
    assert parser.push(97, "") == []
    assert parser.push(close, "") == []
    assert parser.push(98, "ab") == [Reasoning("a"), Text("b")]


def test_a_stop_that_cuts_a_shown_delimiter_leaves_its_beginning_as_text() -> None:
    parser = case(SHOWN).parser(in_reasoning=True)
    (close,) = SHOWN.tokens("</think>")
    assert parser.push(close, "</th") == []
    assert parser.finish() == [Reasoning("</th")]


def test_text_of_no_token_ends_a_sequence() -> None:
    parser = case(SHOWN).parser()
    assert parser.push(0xE2, "") == []
    assert parser.push(-1, "\ufffd") == [Text("\ufffd")]
    assert parser.finish() == []


def test_half_a_character_before_a_delimiter_is_shown_before_it() -> None:
    tokens = [0xE2, 0x82, *SHOWN.tokens("</think>ok")]
    got = case(SHOWN).parse_tokens(tokens, True)
    assert (got.reasoning, got.content) == ("\ufffd", "ok")


@given(st.lists(st.integers(0, SHOWN.n_vocab - 1)), st.booleans())
def test_marked_text_without_its_marks_is_the_presented_text(
    tokens: list[int], shown: bool
) -> None:
    vocabulary = SHOWN if shown else CONTROL
    marks = Marks(vocabulary, ("<think>", "</think>"))
    marked = MarkedText(marks)
    pairs = presented(vocabulary, tokens)
    got = "".join(marked.push(token, text) for token, text in pairs) + marked.finish()
    text = "".join(text for _, text in pairs)
    assert sum("\ud800" <= c <= "\udfff" for c in got) == sum(t in marks.characters for t in tokens)
    if shown:
        assert marks.plain(got) == text
    else:
        assert "".join(c for c in got if not "\ud800" <= c <= "\udfff") == text


def test_a_real_tokenizer_tells_tokens_from_their_spelling() -> None:
    tokenizer = Tokenizer(build_blob(bpe_fields("qwen2")))
    tags = structs.replace(think_tags(), close="<|tool|>")
    real = Case(frontend=frontend(reasoning=tags), vocabulary=tokenizer)
    tokens = tokenizer.encode("<think>a \u20ac<|tool|>b", add_special=False, parse_special=True)
    spelled = tokenizer.encode("<|tool|>", add_special=False, parse_special=False)
    got = real.parse_tokens([*tokens[:-2], *spelled, *tokens[-2:]])
    assert (got.reasoning, got.content) == ("a \u20ac<|tool|>", "b")
