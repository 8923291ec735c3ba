"""The real model's tokenizer agrees with an independent engine and with `tokenizers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given

from ds4_common.gguf import LogicalModel, Metadata
from ds4_common.tokenizer.build import build_blob, end_of_generation_ids, gpt2_character
from ds4_common.tokenizer.encoder import Tokenizer
from helpers.models import smollm2_path
from helpers.oracles import oracle
from helpers.texts import texts
from helpers.vocabularies import library_bpe, plain_bpe, stdlib_texts


@pytest.fixture(scope="module")
def metadata() -> Iterator[Metadata]:
    with LogicalModel.open(smollm2_path()) as model:
        yield model.metadata


@pytest.fixture(scope="module")
def tokenizer(metadata: Metadata) -> Tokenizer:
    return Tokenizer(build_blob(metadata))


@pytest.fixture(scope="module")
def library(metadata: Metadata) -> Callable[[str], list[int]]:
    return library_bpe(metadata)


@pytest.fixture(scope="module")
def missing_bytes(metadata: Metadata) -> set[int]:
    tokens = set(metadata.get_strings("tokenizer.ggml.tokens"))
    return {byte for byte in range(256) if gpt2_character(byte).encode() not in tokens}


@pytest.mark.parametrize("add_special", [False, True])
@pytest.mark.parametrize("parse_special", [False, True])
def test_ids_equal_the_oracle(tokenizer: Tokenizer, add_special: bool, parse_special: bool) -> None:
    key = f"special{add_special:d}_parse{parse_special:d}"
    for case in oracle("tokenize")["cases"]:
        ids = tokenizer.encode(case["text"], add_special=add_special, parse_special=parse_special)
        assert ids == case[key], case["text"]


def test_pieces_equal_the_oracle(tokenizer: Tokenizer) -> None:
    for case in oracle("tokenize")["cases"]:
        ids = case["special0_parse1"]
        assert [tokenizer.token_bytes(i).hex() for i in ids] == case["pieces_hex_special0_parse1"]


def test_text_comes_back_where_the_oracle_says_so(tokenizer: Tokenizer) -> None:
    for case in oracle("tokenize")["cases"]:
        data = tokenizer.decode(case["special0_parse1"])
        assert (data == case["text"].encode()) == case["roundtrip_ok"], case["text"]


def test_rendered_conversations_encode_as_the_oracle_says(tokenizer: Tokenizer) -> None:
    chats = [(c["name"], c["prompt"], c["tokens"]) for c in oracle("chat")["cases"]]
    built_in = oracle("tokenize")["chat_llama_builtin_template"]["cases"]
    chats += [("built in", c["text"], c["ids_parse_special"]) for c in built_in]
    for name, prompt, ids in chats:
        assert tokenizer.encode(prompt, add_special=True, parse_special=True) == ids, name


def test_special_ids_equal_the_oracle(tokenizer: Tokenizer, metadata: Metadata) -> None:
    vocab = oracle("tokenize")["vocab"]
    assert tokenizer.n_vocab == vocab["n_vocab"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (vocab["bos"], vocab["eos"])
    assert list(tokenizer.eog_ids) == vocab["eog_ids"] == end_of_generation_ids(metadata)
    assert tokenizer.id_of("<|im_end|>") == vocab["eos"]
    assert tokenizer.is_control(vocab["eos"])
    assert not tokenizer.is_control(vocab["nl"])


def test_standard_library_encodes_as_in_tokenizers(
    tokenizer: Tokenizer, library: Callable[[str], list[int]]
) -> None:
    for text in stdlib_texts(40):
        assert tokenizer.encode(text, add_special=False, parse_special=False) == library(text)


@given(text=texts)
def test_random_text_encodes_as_in_tokenizers(
    tokenizer: Tokenizer,
    library: Callable[[str], list[int]],
    missing_bytes: set[int],
    text: str,
) -> None:
    # This vocabulary lacks some bytes. The library lets the neighbours of such a byte merge,
    # llama.cpp does not: the next test is about those.
    text = "".join(c for c in text if missing_bytes.isdisjoint(c.encode("utf-8", "replace")))
    assert tokenizer.encode(text, add_special=False, parse_special=False) == library(text)


def test_a_byte_without_a_token_is_dropped_and_keeps_its_neighbours_apart(
    tokenizer: Tokenizer, metadata: Metadata, missing_bytes: set[int]
) -> None:
    assert {0x04, 0xF1} <= missing_bytes
    for word in ("\x04", ".\x04.", "\U00040000", "\U00040000\U00040001"):
        ids = tokenizer.encode(word, add_special=False, parse_special=False)
        assert ids == plain_bpe(metadata, word.encode())
    assert tokenizer.encode(".\x04.", add_special=False, parse_special=False) == [30, 30]
    assert tokenizer.encode("..", add_special=False, parse_special=False) != [30, 30]
