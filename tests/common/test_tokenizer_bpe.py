"""Byte-level BPE: every pre-tokenizer gives the ids of the `tokenizers` library."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from ds4_common.native import generate_unicode_classes
from ds4_common.tokenizer import layout
from ds4_common.tokenizer.build import build_blob
from ds4_common.tokenizer.encoder import Tokenizer
from ds4_common.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from helpers.texts import TRICKY, texts
from helpers.vocabularies import (
    SPECIALS,
    USER_DEFINED,
    bpe_fields,
    fields,
    library_bpe,
    plain_bpe,
    stdlib_texts,
)

NATIVE = ["gpt-2", "smollm", "qwen2", "stablelm2", "llama-bpe", "default", "falcon", "qwen35",
          "deepseek-v3"]  # fmt: skip
LIBRARY = [
    "gpt-4o", "tekken", "bailingmoe", "seed-coder", "bloom", "deepseek-coder", "deepseek-llm",
    "kimi-k2", "youtu",
]  # fmt: skip


@functools.cache
def tokenizer_of(pre: str) -> Tokenizer:
    return Tokenizer(build_blob(bpe_fields(pre)))


@functools.cache
def library_of(pre: str) -> Callable[[str], list[int]]:
    return library_bpe(bpe_fields(pre))


def ids_of(pre: str, text: str) -> list[int]:
    return tokenizer_of(pre).encode(text, add_special=False, parse_special=False)


def test_every_scanner_is_covered() -> None:
    scanners = {p.scanner for p in PRE_TOKENIZERS.values() if p.scanner is not None}
    assert {PRE_TOKENIZERS[pre].scanner for pre in NATIVE} == scanners


def test_character_classes_are_those_of_the_installed_library() -> None:
    assert generate_unicode_classes.HEADER.read_text() == generate_unicode_classes.header_text()


@pytest.mark.parametrize("pre", NATIVE)
@given(text=texts)
def test_random_text_encodes_as_in_tokenizers(pre: str, text: str) -> None:
    text = text.replace(USER_DEFINED, "")
    assert ids_of(pre, text) == library_of(pre)(text)


@pytest.mark.parametrize("pre", NATIVE)
def test_pairs_of_tricky_characters_encode_as_in_tokenizers(pre: str) -> None:
    """All pairs, between letters, spaces and digits: the look-ahead of every rule."""
    ours, theirs = tokenizer_of(pre), library_of(pre)
    for a in TRICKY:
        text = "".join(f"x{a}{b}1{a} {b}{b}  " for b in TRICKY)
        assert ours.encode(text, add_special=False, parse_special=False) == theirs(text), repr(a)


@pytest.mark.parametrize("pre", NATIVE)
def test_standard_library_encodes_as_in_tokenizers(pre: str) -> None:
    for text in stdlib_texts(12):
        assert ids_of(pre, text) == library_of(pre)(text)


@pytest.mark.parametrize("pre", LIBRARY)
def test_pre_tokenizers_without_a_scanner_run_in_the_library(pre: str) -> None:
    tokenizer = tokenizer_of(pre)
    text = "It's 1234567 naïve  WORDS\n\n日本語 'tis"
    expected = library_of(pre)(text)
    end, think = (tokenizer.id_of(t) for t in (SPECIALS[1], USER_DEFINED))
    assert tokenizer.encode(text, add_special=False, parse_special=False) == expected
    got = tokenizer.encode(
        f"{text}{SPECIALS[1]}{USER_DEFINED}{text}", add_special=True, parse_special=True
    )
    assert got == [tokenizer.bos_id, *expected, end, think, *expected]


@given(word=st.text("abehtr ", min_size=1, max_size=60))
def test_words_merge_as_the_definition_says(word: str) -> None:
    # This pre-tokenizer takes a run of letters as one word.
    word = word.replace(" ", "")
    if word:
        assert ids_of("llama-bpe", word) in (
            plain_bpe(bpe_fields("llama-bpe"), word.encode()),
            [tokenizer_of("llama-bpe").id_of(word)],
        )


def test_names_of_one_family_share_their_scanner() -> None:
    for pre in ("llama3", "llama-v3", "falcon3"):
        assert PRE_TOKENIZERS[pre] == PRE_TOKENIZERS["llama-bpe"]
    assert PRE_TOKENIZERS["starcoder"] == PRE_TOKENIZERS["smollm"]
    assert PRE_TOKENIZERS["phi-2"] == PRE_TOKENIZERS["gpt-2"]
    assert PRE_TOKENIZERS["deepseek-r1-qwen"] == PRE_TOKENIZERS["stablelm2"]


# Words as the models' own files cut them; their order of expressions cuts "wörld" in three.
WORDS = {
    "kimi-k2": ("I'm 漢字カナ 123/\n ab漢", "I'm| |漢字|カナ| |123|/\n| ab|漢"),
    "youtu": ("I'm한글。、漢字 12!\n/x", "I'm|한글|。、|漢字| |1|2|!\n/|x"),
    "deepseek-llm": ("world w\u00f6rld 漢字 12!\n", "world| w|\u00f6|rld| |漢字| |12|!|\n"),
}


@pytest.mark.parametrize("pre", WORDS)
def test_expressions_cut_the_words_of_the_models_that_use_them(pre: str) -> None:
    text, words = WORDS[pre]
    splits = [Split(Regex(e), "isolated") for e in PRE_TOKENIZERS[pre].expressions]
    assert [word for word, _ in Sequence(splits).pre_tokenize_str(text)] == words.split("|")


def test_every_name_in_files_of_the_supported_families_is_known() -> None:
    names = (
        "default", "llama-bpe", "tekken", "smollm", "qwen2", "deepseek-r1-qwen", "dbrx", "gpt-4o",
        "glm4", "glm5", "deepseek-llm", "deepseek-coder", "deepseek-v3", "kimi-k2", "kanana2",
        "gigachat", "youtu", "joyai-llm", "solar-open", "megrez", "seed-coder", "smaug-bpe",
    )  # fmt: skip
    assert set(names) <= PRE_TOKENIZERS.keys()


def test_a_missing_pre_is_the_default() -> None:
    without = Tokenizer(build_blob(bpe_fields("default").changed(pre=None)))
    text = "a.b 1234567$x"
    assert without.encode(text, add_special=False, parse_special=False) == ids_of("default", text)


@pytest.mark.parametrize("pre", ["llama-bpe", "glm4", "glm5"])
def test_a_word_that_is_a_token_is_taken_whatever_its_merges(pre: str) -> None:
    metadata = fields(
        model="gpt2", pre=pre, tokens=[b"a", b"b", b"ab", b"abb"], merges=[b"a b"],
        add_bos_token=False,
    )  # fmt: skip
    whole, merged = (Tokenizer(build_blob(metadata.changed(pre=p))) for p in (pre, "qwen2"))
    assert whole.encode("abb", add_special=False, parse_special=False) == [3]
    assert merged.encode("abb", add_special=False, parse_special=False) == [2, 1]


def test_qwen2_composes_characters_but_never_into_a_special_token() -> None:
    tokenizer = tokenizer_of("qwen2")
    end = tokenizer.id_of(SPECIALS[1])
    decomposed = f"{SPECIALS[1]}\u0338e\u0301"
    ids = tokenizer.encode(decomposed, add_special=True, parse_special=True)
    assert ids[:2] == [tokenizer.bos_id, end]
    assert tokenizer.decode(ids[2:]) == "\u0338é".encode()
    assert tokenizer_of("stablelm2").encode(
        "e\u0301", add_special=False, parse_special=False
    ) != tokenizer.encode("e\u0301", add_special=False, parse_special=False)


# --- special tokens ---


def test_control_tokens_are_parsed_only_when_asked() -> None:
    tokenizer = tokenizer_of("smollm")
    text = f"a{SPECIALS[0]}{SPECIALS[1]} b"
    start, end = (tokenizer.id_of(t) for t in SPECIALS[:2])
    parsed = tokenizer.encode(text, add_special=False, parse_special=True)
    plain = tokenizer.encode(text, add_special=False, parse_special=False)
    assert parsed[1:3] == [start, end]
    assert not {start, end} & set(plain)
    assert tokenizer.decode(plain) == tokenizer.decode(parsed) == text.encode()


def test_user_defined_tokens_are_always_parsed() -> None:
    tokenizer = tokenizer_of("smollm")
    ids = tokenizer.encode(USER_DEFINED, add_special=False, parse_special=False)
    assert ids == [tokenizer.id_of(USER_DEFINED)]
    assert not tokenizer.is_control(ids[0])


@pytest.mark.parametrize("pre", ["smollm", "tekken"])
def test_bos_and_eos_are_added_as_the_metadata_say(pre: str) -> None:
    for bos in (False, True):
        for eos in (False, True):
            metadata = bpe_fields(pre).changed(add_bos_token=bos, add_eos_token=eos)
            tokenizer = Tokenizer(build_blob(metadata))
            body = tokenizer.encode("hi", add_special=False, parse_special=False)
            assert tokenizer.encode("hi", add_special=True, parse_special=False) == (
                [0] * bos + body + [1] * eos
            )


def partition(text: str, names: list[str]) -> list[str]:
    """Cuts by the rule: each name, longest first, takes its leftmost places in what is left. (Names
    of one length, whose order llama.cpp leaves open, compete by place.)"""
    parts = [(text, False)]
    for name in sorted(names, key=len, reverse=True):
        cut: list[tuple[str, bool]] = []
        for part, taken in parts:
            if taken:
                cut.append((part, True))
                continue
            for i, between in enumerate(part.split(name)):
                cut += [(name, True)] * (i > 0) + [(between, False)] * bool(between)
        parts = cut
    return [part for part, _ in parts]


@given(text=st.text("ab", max_size=30))
def test_overlapping_specials_resolve_longest_first_then_leftmost(text: str) -> None:
    names = ["bb", "aba", "abab", "bbbab", "baabba"]
    tokenizer = overlapping(tuple(names))
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    expected = [
        token
        for part in partition(text, names)
        for token in ([tokenizer.id_of(part)] if part in names else map(tokenizer.id_of, part))
    ]
    assert ids == expected


@functools.cache
def overlapping(names: tuple[str, ...]) -> Tokenizer:
    tokens = [b"a", b"b", *(name.encode() for name in names)]
    types = [1, 1] + [3] * len(names)
    metadata = fields(model="gpt2", pre="gpt-2", merges=[], token_type=types, tokens=tokens)
    return Tokenizer(build_blob(metadata))


def test_a_megabyte_of_overlapping_specials_is_cut_in_linear_time() -> None:
    names = tuple("a" * n for n in range(2, 33))
    tokenizer = overlapping(names)
    ids = tokenizer.encode("a" * 1_000_001, add_special=False, parse_special=True)
    assert [tokenizer.token_text(i) for i in ids] == ["a" * 32] * 31_250 + ["a"]


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_a_megabyte_without_a_space_encodes(pre: str) -> None:
    """A quadratic merge would need hours here; the suite's time-out makes that a failure."""
    text = "thequickbrownfox" * 65_536
    ids = ids_of(pre, text)
    assert tokenizer_of(pre).decode(ids) == text.encode()


# --- text that is not Unicode ---


def test_lone_surrogates_encode_as_the_replacement_character() -> None:
    assert ids_of("smollm", "a\ud800b") == ids_of("smollm", "a\ufffdb")
    assert ids_of("smollm", "\ud83d\ude00") == ids_of("smollm", "😀")


def test_layout_kind_follows_the_pre_tokenizer() -> None:
    kinds = {layout.HEADER.unpack_from(build_blob(bpe_fields(p)))[2] for p in ("smollm", "tekken")}
    assert kinds == {layout.KIND_BPE, layout.KIND_LIBRARY}
