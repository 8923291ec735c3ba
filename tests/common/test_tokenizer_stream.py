"""The streaming detokenizer: whole characters only, the same text as decoding at once."""

from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st

from ds4_common.tokenizer.build import build_blob
from ds4_common.tokenizer.encoder import StreamDetokenizer, Tokenizer
from helpers.texts import texts
from helpers.vocabularies import SPECIALS, USER_DEFINED, bpe_fields, spm_fields


@functools.cache
def bpe() -> Tokenizer:
    return Tokenizer(build_blob(bpe_fields("smollm")))


@functools.cache
def spm() -> Tokenizer:
    return Tokenizer(build_blob(spm_fields()))


def streamed(stream: StreamDetokenizer, ids: list[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.flush()]


@given(data=st.data())
def test_any_ids_give_what_decoding_at_once_gives(data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([bpe(), spm()]))
    # Mostly the single bytes, so that characters break in every way.
    ids = data.draw(st.lists(st.integers(0, 270) | st.integers(0, tokenizer.n_vocab - 1)))
    for show in (False, True):
        expected = tokenizer.decode(ids, skip_special=not show).decode("utf-8", "replace")
        stream = StreamDetokenizer(tokenizer, show_special=show)
        assert "".join(streamed(stream, ids)) == expected


@given(text=texts)
def test_text_never_shows_half_a_character(text: str) -> None:
    # U+2581 comes back as a space from SPM, which also puts one after each special token.
    for unwanted in ("\ufffd", "▁", USER_DEFINED):
        text = text.replace(unwanted, "")
    for tokenizer in (bpe(), spm()):
        ids = tokenizer.encode(text, add_special=True, parse_special=False)
        pieces = streamed(StreamDetokenizer(tokenizer), ids)
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == text


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = bpe()
    ids = [tokenizer.id_of(c) for c in ("ð", "Ł", "ĺ", "Ģ")]  # 😀, byte by byte
    assert None not in ids
    stream = StreamDetokenizer(tokenizer)
    assert streamed(stream, [i for i in ids if i is not None]) == ["", "", "", "😀", ""]


def test_flush_ends_an_unfinished_character() -> None:
    tokenizer = bpe()
    first = tokenizer.id_of("ð")
    assert first is not None
    assert streamed(StreamDetokenizer(tokenizer), [first]) == ["", "\ufffd"]


def test_control_tokens_show_only_when_asked() -> None:
    tokenizer = bpe()
    ids = tokenizer.encode(f"a{SPECIALS[1]}b", add_special=True, parse_special=True)
    assert "".join(streamed(StreamDetokenizer(tokenizer), ids)) == "ab"
    shown = streamed(StreamDetokenizer(tokenizer, show_special=True), ids)
    assert "".join(shown) == f"{SPECIALS[0]}a{SPECIALS[1]}b"


def test_the_first_space_is_dropped_at_the_start_of_a_text_only() -> None:
    tokenizer = spm()
    ids = tokenizer.encode(" over the", add_special=True, parse_special=False)
    assert "".join(streamed(StreamDetokenizer(tokenizer), ids)) == " over the"
    continued = tokenizer.encode("over the", add_special=False, parse_special=False)
    stream = StreamDetokenizer(tokenizer, text_start=False)
    assert "".join(streamed(stream, continued)) == " over the"
