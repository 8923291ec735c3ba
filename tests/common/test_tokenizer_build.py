"""What the vocabulary reader refuses, and the corrections it makes."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from ds4_common.errors import TokenizerError, UnsupportedModel
from ds4_common.tokenizer.build import build_blob, end_of_generation_ids
from ds4_common.tokenizer.encoder import Tokenizer
from helpers.vocabularies import Fields, bpe_fields, fields, spm_fields

TINY = fields(
    model="gpt2", pre="smollm", tokens=[b"a", b"b", b"ab", b"<e>"], token_type=[1, 1, 1, 3],
    merges=[b"a b"], eos_token_id=3,
)  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no tokens", {"tokens": None}, "got 0 tokens"),
    ("a duplicate", {"tokens": [b"a", b"b", b"ab", b"a"]}, "token 3 b'a' has the same text"),
    ("too few types", {"token_type": [1, 1, 1]}, "got 3 entries, expected one per token"),
    ("an unknown type", {"token_type": [1, 1, 1, 7]}, "token 3: got type 7"),
    ("a negative type", {"token_type": [1, -1, 1, 3]}, "token 1: got type -1"),
    ("a merge without a space", {"merges": [b"ab"]}, "merge 0 b'ab' is not two texts"),
    ("an empty merge", {"merges": [b""]}, "merge 0 b'' is not two texts"),
    ("a merge of only a space", {"merges": [b" "]}, "merge 0 b' ' is not two texts"),
    ("an overlong merge", {"merges": [b"a " + b"b" * 2000]}, "is not two texts"),
    ("an unknown left part", {"merges": [b"x b"]}, "joins a left part that is no token"),
    ("an unknown right part", {"merges": [b"a x"]}, "joins a right part that is no token"),
    ("an unknown result", {"merges": [b"b a"]}, "gives a text that is no token"),
    ("an id out of range", {"eos_token_id": 4}, "eos_token_id: got 4, expected a token id below 4"),
    ("a negative id", {"bos_token_id": -1}, "bos_token_id: got -1"),
    ("a BOS to add without its id", {"add_bos_token": True}, "bos_token_id is missing"),
    ("an EOS to add without its id", {"add_eos_token": True, "eos_token_id": None}, "eos_token"),
    ("a byte token that is none", {"token_type": [1, 1, 6, 3]}, "token 2 b'ab' has type BYTE"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_malformed_vocabulary_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message.replace("(", r"\(")):
        build_blob(TINY.changed(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores: got 0 entries"),
        ({"scores": [0.0]}, "scores: got 1 entries"),
        ({"scores": [float("nan")] * 3}, "token 0: got nan"),
    ],
)
def test_malformed_spm_vocabulary_is_refused(changes: dict[str, Any], message: str) -> None:
    metadata = fields(model="llama", tokens=[b"<unk>", b"<s>", b"</s>"], scores=[0.0] * 3)
    with pytest.raises(TokenizerError, match=message):
        build_blob(metadata.changed(**changes))


@pytest.mark.parametrize("model", ["t5", "bert", "rwkv", "no_vocab", ""])
def test_other_tokenizer_models_are_named_and_refused(model: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"model is '{model}'"):
        build_blob(TINY.changed(model=model))


def test_an_unknown_pre_tokenizer_is_named_and_refused() -> None:
    with pytest.raises(UnsupportedModel, match="pre is 'qwen9000': unknown pre-tokenizer"):
        build_blob(TINY.changed(pre="qwen9000"))


def test_library_pre_tokenizers_need_utf8_tokens() -> None:
    with pytest.raises(TokenizerError, match="expected UTF-8"):
        build_blob(TINY.changed(pre="gpt-4o", tokens=[b"a", b"b", b"ab", b"\xff"]))
    assert build_blob(TINY.changed(tokens=[b"a", b"b", b"ab", b"\xff"]))


def names_of_one_slot(n: int, slots: int) -> list[bytes]:
    """Four-byte names whose look-ups all start at slot 0 of a table, as an attacker picks them."""
    names = np.arange(1, 2 * n * slots, dtype=np.uint32)
    state = np.full(len(names), 0xCBF29CE484222325, np.uint64)
    for column in names.view(np.uint8).reshape(-1, 4).T:
        state = (state ^ column) * np.uint64(0x100000001B3)
    folded = state ^ state >> np.uint64(32)
    chosen = names[folded % np.uint64(slots) == 0][:n]
    assert len(chosen) == n
    return [int(name).to_bytes(4, "little") for name in chosen]


def test_names_made_to_collide_are_refused() -> None:
    metadata = TINY.changed(token_type=None, eos_token_id=None, merges=[])
    build_blob(metadata.changed(tokens=names_of_one_slot(1000, 2048)))
    with pytest.raises(TokenizerError, match="collides with too many others"):
        build_blob(metadata.changed(tokens=names_of_one_slot(1100, 4096)))


def test_the_blob_is_the_same_for_the_same_metadata() -> None:
    assert build_blob(bpe_fields("smollm")) == build_blob(Fields(bpe_fields("smollm")))
    assert build_blob(spm_fields()) == build_blob(Fields(spm_fields()))


def test_empty_token_texts_get_a_name_of_their_own() -> None:
    tokenizer = Tokenizer(build_blob(TINY.changed(tokens=[b"a", b"b", b"ab", b""])))
    assert tokenizer.id_of("[EMPTY_3]") == 3


def test_a_merge_named_twice_keeps_its_first_rank() -> None:
    tokens = [b"a", b"b", b"c", b"ab", b"bc"]
    once = TINY.changed(tokens=tokens, token_type=None, merges=[b"a b", b"b c"])
    twice = once.changed(merges=[b"a b", b"b c", b"a b"])
    for metadata in (once, twice):
        tokenizer = Tokenizer(build_blob(metadata))
        assert tokenizer.encode("abc", add_special=False, parse_special=False) == [3, 2]


def test_tokens_known_to_end_a_generation_become_control_tokens() -> None:
    metadata = TINY.changed(
        tokens=[b"a", b"b", b"ab", b"<e>", b"<|eot_id|>", b"<|fim_pad|>", b"<|channel|>"],
        token_type=[1, 1, 1, 3, 1, 1, 3],
    )
    tokenizer = Tokenizer(build_blob(metadata))
    assert tokenizer.eog_ids == (3, 4, 5)
    assert end_of_generation_ids(metadata) == [3, 4, 5]
    assert [tokenizer.is_control(i) for i in range(7)] == [False] * 3 + [True] * 3 + [False]


def test_end_is_a_message_end_where_return_and_call_end_a_generation() -> None:
    metadata = TINY.changed(
        tokens=[b"a", b"b", b"ab", b"<|return|>", b"<|call|>", b"<|end|>"], token_type=None
    )
    tokenizer = Tokenizer(build_blob(metadata))
    assert tokenizer.eog_ids == (3, 4)
    assert not tokenizer.is_control(5)


def test_pieces_are_the_bytes_that_tokens_stand_for() -> None:
    texts = ["Ġthe", "Ċ", "Ã©", "<0x41>", "[UNUSED]", "<x>", "plain space", "日"]
    metadata = TINY.changed(
        tokens=[t.encode() for t in texts], token_type=[1, 1, 1, 6, 5, 4, 1, 1], merges=[],
        eos_token_id=None,
    )  # fmt: skip
    tokenizer = Tokenizer(build_blob(metadata))
    assert [tokenizer.token_bytes(i) for i in range(len(texts))] == [
        b" the", b"\n", "é".encode(), b"A", b"", b"<x>", b"plain space", "日".encode(),
    ]  # fmt: skip
    assert [tokenizer.token_text(i) for i in range(len(texts))] == texts


def test_every_refusal_is_one_of_ours() -> None:
    """Mutilated metadata of every kind: an error of the project, or a blob that opens."""
    for key in TINY:
        name = key.removeprefix("tokenizer.ggml.")
        for value in (None, [], [b"\xff"], [b"", b""], "x", 0, -1, 1 << 40, True):
            if not isinstance(value, type(TINY[key])) and value is not None:
                continue  # the metadata getters refuse other types
            with contextlib.suppress(TokenizerError, UnsupportedModel):
                Tokenizer(build_blob(TINY.changed(**{name: value})))
