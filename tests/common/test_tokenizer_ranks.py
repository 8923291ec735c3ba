"""Vocabularies without merges give the ids of `tiktoken`, whose ranks their ids are."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.errors import TokenizerError
from ds4_common.tokenizer.build import build_blob
from ds4_common.tokenizer.encoder import Tokenizer
from ds4_common.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from ds4_common.tokenizer.ranks import MAX_TOKEN_CHARACTERS, merges_of_ranks
from helpers.texts import TRICKY, texts
from helpers.vocabularies import PREFIX, Fields, bpe_fields, stdlib_texts, unmapped

ONE_EXPRESSION = ["kimi-k2", "gpt-4o", "llama-bpe", "stablelm2", "gpt-2"]  # tiktoken takes one
EACH = pytest.mark.parametrize("pre", ONE_EXPRESSION)


@functools.cache
def vocabulary(pre: str) -> Fields:
    """Without merges, and nothing but control tokens beside the trained ones."""
    metadata = bpe_fields(pre)
    types = [1 if kind == 1 else 3 for kind in metadata[PREFIX + "token_type"]]
    return metadata.changed(merges=None, token_type=types)


@functools.cache
def ours(pre: str) -> Tokenizer:
    return Tokenizer(build_blob(vocabulary(pre)))


@functools.cache
def theirs(pre: str) -> tiktoken.Encoding:
    metadata = vocabulary(pre)
    (expression,) = PRE_TOKENIZERS[pre].expressions
    kinds = metadata[PREFIX + "token_type"]
    normal = [t for t, kind in zip(metadata[PREFIX + "tokens"], kinds, strict=True) if kind == 1]
    ranks = {unmapped(text): rank for rank, text in enumerate(normal)}
    return tiktoken.Encoding(pre, pat_str=expression, mergeable_ranks=ranks, special_tokens={})


def first_normal(pre: str) -> int:
    return list(bpe_fields(pre)[PREFIX + "token_type"]).index(1)


def agree(pre: str, text: str) -> None:
    ids = ours(pre).encode(text, add_special=False, parse_special=False)
    shift = first_normal(pre)
    assert [token - shift for token in ids] == theirs(pre).encode(text, disallowed_special=())


@EACH
@given(texts)
def test_random_text_encodes_as_in_tiktoken(pre: str, text: str) -> None:
    agree(pre, text)


@EACH
def test_tricky_characters_and_sources_encode_as_in_tiktoken(pre: str) -> None:
    for text in (*stdlib_texts(20), *(a + b for a in TRICKY for b in TRICKY[:9])):
        agree(pre, text)


@EACH
def test_the_merges_are_those_of_the_training(pre: str) -> None:
    """Where the ids are in order of training; a merge of another pair of equal text is not asked
    for."""
    metadata = bpe_fields(pre)
    found = merges_of_ranks(metadata[PREFIX + "tokens"], metadata[PREFIX + "token_type"])
    assert set(found) <= set(metadata[PREFIX + "merges"])
    assert len(found) > 1000


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=30, unique=True), st.text("ab"))
def test_any_order_of_ranks_merges_as_in_tiktoken(words: list[str], text: str) -> None:
    """Also tokens that no pair of lower ones makes: they are found as whole words only."""
    order = ["a", "b", *(word for word in words if len(word) > 1)]
    ranks = {bytes([byte]): 300 + byte for byte in range(256)} | {
        word.encode(): rank for rank, word in enumerate(order)
    }
    encoding = tiktoken.Encoding("t", pat_str=r"(?s).+", mergeable_ranks=ranks, special_tokens={})
    merges = {
        tuple(merge.decode().split(" ")): rank
        for rank, merge in enumerate(merges_of_ranks([w.encode() for w in order], [1] * len(order)))
    }
    parts = [text] if text in order else list(text)
    while pairs := [
        (merges[pair], i)
        for i in range(len(parts) - 1)
        if (pair := (parts[i], parts[i + 1])) in merges
    ]:
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    assert [order.index(part) for part in parts] == encoding.encode(text)


def test_a_token_that_takes_too_long_is_refused() -> None:
    long = b"a" * (MAX_TOKEN_CHARACTERS + 1)
    with pytest.raises(TokenizerError, match="token 1: got 513 characters, expected at most 512"):
        merges_of_ranks([b"a", long], [1, 1])
    assert merges_of_ranks([b"a", long], [1, 3]) == []


FAMILIES = {  # tokenizer.ggml.pre of the families' files, and whether the C encoder runs it
    "llama-bpe": True, "llama3": True, "llama-v3": True, "default": True, "smaug-bpe": True,
    "qwen2": True, "deepseek-r1-qwen": True, "dbrx": True, "glm4": True, "chatglm-bpe": True,
    "deepseek-v3": True, "joyai-llm": True, "smollm": True,
    "gpt-4o": False, "tekken": False, "llama4": False, "deepseek-llm": False,
    "deepseek-coder": False, "kimi-k2": False, "youtu": False, "glm5": True, "kanana2": False,
    "gigachat": True, "solar-open": True,
}  # fmt: skip


def test_every_pre_tokenizer_of_the_families_is_known_and_the_fallbacks_are_these() -> None:
    assert {p: PRE_TOKENIZERS[p].scanner is not None for p in FAMILIES} == FAMILIES
    documented = (Path(__file__).parents[2] / "docs" / "adding-a-family.md").read_text()
    for pre, native in FAMILIES.items():
        assert native or f"`{pre}`" in documented
