"""SPM: score-ordered merges with byte fallback, as llama.cpp does them."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given

from ds4_common.tokenizer import layout
from ds4_common.tokenizer.build import build_blob
from ds4_common.tokenizer.encoder import Tokenizer
from helpers.texts import texts
from helpers.vocabularies import (
    USER_DEFINED,
    Fields,
    library_spm,
    plain_spm,
    spm_fields,
    stdlib_texts,
)


@functools.cache
def tokenizer_with(**changes: bool) -> Tokenizer:
    return Tokenizer(build_blob(spm_fields().changed(**changes)))


def ids_of(text: str, **changes: bool) -> list[int]:
    return tokenizer_with(**changes).encode(text, add_special=False, parse_special=False)


@given(text=texts)
def test_random_text_encodes_as_the_definition_says(text: str) -> None:
    text = text.replace(USER_DEFINED, "")
    assert ids_of(text, add_space_prefix=False) == plain_spm(spm_fields(), text.replace(" ", "▁"))


@given(text=texts)
def test_a_space_goes_before_the_first_word(text: str) -> None:
    text = text.replace(USER_DEFINED, "")
    prefixed = " " + text if text else ""
    assert ids_of(text) == ids_of(prefixed, add_space_prefix=False)


def test_standard_library_encodes_as_in_tokenizers() -> None:
    expected = library_spm(spm_fields())
    for text in stdlib_texts(6):
        escaped = text.replace(" ", "▁")
        assert ids_of(text, add_space_prefix=False) == expected(escaped)


@given(text=texts)
def test_text_comes_back(text: str) -> None:
    text = text.replace(USER_DEFINED, "")  # after it, as after any special token, goes a space
    tokenizer = tokenizer_with()
    ids = tokenizer.encode(text, add_special=True, parse_special=False)
    # U+2581 stands for a space in the vocabulary, so it comes back as one.
    assert tokenizer.decode(ids, skip_special=True) == text.replace("▁", " ").encode(
        "utf-8", "replace"
    )


def test_characters_without_a_token_go_as_bytes() -> None:
    tokenizer = tokenizer_with()
    ids = ids_of("𓀀", add_space_prefix=False)
    assert [tokenizer.token_text(i) for i in ids] == ["<0xF0>", "<0x93>", "<0x80>", "<0x80>"]
    assert tokenizer.decode(ids) == "𓀀".encode()


def test_bos_is_added_by_default_and_a_space_follows_each_special_token() -> None:
    tokenizer = tokenizer_with()
    inst = tokenizer.id_of("[INST]")
    hi = ids_of("hi")
    assert tokenizer.encode("", add_special=True, parse_special=True) == [1]
    assert tokenizer.encode("hi[INST]hi", add_special=True, parse_special=True) == [
        1, *hi, inst, *hi,
    ]  # fmt: skip
    without = tokenizer_with(add_space_prefix=False)
    assert without.encode("hi[INST]hi", add_special=False, parse_special=True) == [
        *ids_of("hi", add_space_prefix=False), inst, *ids_of("hi", add_space_prefix=False),
    ]  # fmt: skip


@pytest.mark.parametrize("named", [{"general.architecture": "phi3"}, {"general.name": "My Phi-3"}])
def test_white_space_after_the_special_tokens_of_phi3_goes_with_them(
    named: dict[str, str],
) -> None:
    tokenizer = Tokenizer(build_blob(Fields(spm_fields() | named)))
    plain = tokenizer_with()
    inst, think = tokenizer.id_of("[INST]"), tokenizer.id_of(USER_DEFINED)
    hi = ids_of("hi")
    for text in ("[INST]hi", "[INST]\nhi", "[INST] \t\r\nhi"):
        assert tokenizer.encode(text, add_special=False, parse_special=True) == [inst, *hi]
    assert plain.encode("[INST]\nhi", add_special=False, parse_special=True) != [inst, *hi]
    assert tokenizer.encode(" \n[INST]\n[INST] ", add_special=False, parse_special=True) == [
        *ids_of(" \n"), inst, inst,
    ]  # fmt: skip
    # User-defined tokens are special in any text; <s> keeps what follows it.
    assert tokenizer.encode(f"{USER_DEFINED}\nhi", add_special=False, parse_special=False) == [
        think, *hi,
    ]  # fmt: skip
    assert tokenizer.encode("<s>\nhi", add_special=False, parse_special=True) == [
        1, *ids_of("\nhi"),
    ]  # fmt: skip
    assert tokenizer.is_control(inst or 0)
    assert tokenizer.is_special(think or 0)
    assert tokenizer.decode([inst or 0, *hi]) == b"[INST] hi"


def test_leftmost_of_equal_scores_merges_first() -> None:
    metadata = spm_fields()
    tokens = [*metadata["tokenizer.ggml.tokens"], b"qqx", b"qq", b"xqq"]
    n = len(tokens)
    metadata = metadata.changed(
        tokens=tokens,
        token_type=[*metadata["tokenizer.ggml.token_type"], 1, 1, 1],
        scores=[*metadata["tokenizer.ggml.scores"], 7.0, 7.0, 7.0],
        add_space_prefix=False,
    )
    tokenizer = Tokenizer(build_blob(metadata))
    assert tokenizer.encode("qqq", add_special=False, parse_special=False)[0] == n - 2
    assert tokenizer.encode("qqq", add_special=False, parse_special=False) == plain_spm(
        metadata, "qqq"
    )


def test_negative_zero_is_the_same_score_as_zero() -> None:
    metadata = spm_fields()
    n = len(metadata["tokenizer.ggml.tokens"])
    metadata = metadata.changed(
        tokens=[*metadata["tokenizer.ggml.tokens"], b"QX", b"XQ"],
        token_type=[*metadata["tokenizer.ggml.token_type"], 1, 1],
        scores=[*metadata["tokenizer.ggml.scores"], -0.0, 0.0],
        add_space_prefix=False,
    )
    assert (
        Tokenizer(build_blob(metadata)).encode("QXQ", add_special=False, parse_special=False)[0]
        == n
    )


@pytest.mark.parametrize("inner", [b"a\xe2\x96\x81b", "▖▁".encode()])
def test_tokens_with_an_inner_space_forbid_cutting_at_spaces(inner: bytes) -> None:
    def flags(metadata: Fields) -> int:
        header = layout.HEADER.unpack_from(build_blob(metadata))
        return int(header[5])

    metadata = spm_fields()
    changed = metadata.changed(
        tokens=[*metadata["tokenizer.ggml.tokens"], inner],
        token_type=[*metadata["tokenizer.ggml.token_type"], 1],
        scores=[*metadata["tokenizer.ggml.scores"], 9.0],
    )
    assert flags(metadata) & layout.SPACE_SPLITS
    assert not flags(changed) & layout.SPACE_SPLITS


def test_a_token_over_a_space_is_found() -> None:
    metadata = spm_fields()
    tokens = [*metadata["tokenizer.ggml.tokens"], "Z▁".encode(), "Z▁Q".encode()]
    metadata = metadata.changed(
        tokens=tokens,
        token_type=[*metadata["tokenizer.ggml.token_type"], 1, 1],
        scores=[*metadata["tokenizer.ggml.scores"], 9.0, 9.0],
        add_space_prefix=False,
    )
    tokenizer = Tokenizer(build_blob(metadata))
    assert tokenizer.encode("Z Q", add_special=False, parse_special=False) == [len(tokens) - 1]


def test_a_megabyte_without_a_space_encodes() -> None:
    text = "thequickbrownfox" * 65_536
    assert tokenizer_with().decode(ids_of(text)) == text.encode()
