"""Opening a blob: what a hostile or foreign one gives, and how the buffer is held."""

from __future__ import annotations

import functools
import mmap
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.errors import TokenizerError
from ds4_common.tokenizer import layout
from ds4_common.tokenizer.build import build_blob
from ds4_common.tokenizer.encoder import StreamDetokenizer, Tokenizer
from helpers.vocabularies import bpe_fields, spm_fields

TEXT = "It's <|im_end|> 12 naïve ▁ \n\n日本語 words <think>"


@functools.cache
def blob_of(kind: str) -> bytes:
    return build_blob(spm_fields() if kind == "spm" else bpe_fields("llama-bpe"))


def use(blob: bytes | bytearray) -> None:
    """Opens a blob and calls everything; only TokenizerError may come out."""
    try:
        tokenizer = Tokenizer(blob)
    except TokenizerError:
        return
    for parse_special in (False, True):
        try:
            ids = tokenizer.encode(TEXT, add_special=True, parse_special=parse_special)
        except TokenizerError:
            continue
        assert all(0 <= i < tokenizer.n_vocab for i in ids)
        stream = StreamDetokenizer(tokenizer)
        assert isinstance("".join(map(stream.push, ids)) + stream.flush(), str)
        assert isinstance(tokenizer.decode(ids, skip_special=True), bytes)
    assert all(0 <= i < tokenizer.n_vocab for i in tokenizer.eog_ids)
    tokenizer.id_of("the")
    tokenizer.token_text(tokenizer.n_vocab - 1)
    tokenizer.close()


@given(
    kind=st.sampled_from(["bpe", "spm"]),
    places=st.lists(
        st.tuples(
            st.one_of(st.integers(0, layout.HEADER_BYTES - 1), st.integers(0, 1 << 17)),
            st.sampled_from(
                [b"\0", b"\1", b"\x7f", b"\xff", b"\0\0\0\0", b"\xff" * 4, b"\xff" * 8]
            ),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_a_mutated_blob_gives_ids_or_an_error(kind: str, places: list[tuple[int, bytes]]) -> None:
    blob = bytearray(blob_of(kind))
    for place, junk in places:
        place %= len(blob) - len(junk)
        blob[place : place + len(junk)] = junk
    use(blob)


@pytest.mark.parametrize("kind", ["bpe", "spm"])
@pytest.mark.parametrize("which", range(layout.SECTIONS))
@pytest.mark.parametrize("byte", [0x00, 0x55, 0xFF])
def test_a_section_of_junk_gives_ids_or_an_error(kind: str, which: int, byte: int) -> None:
    blob = bytearray(blob_of(kind))
    offset, n_bytes = layout.SECTION.unpack_from(blob, layout.HEADER.size + 16 * which)
    blob[offset : offset + n_bytes] = bytes([byte]) * n_bytes
    use(blob)


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_a_truncated_blob_is_refused(kind: str) -> None:
    blob = blob_of(kind)
    for n_bytes in (0, 1, 8, layout.HEADER_BYTES - 1, layout.HEADER_BYTES, len(blob) - 1):
        with pytest.raises(TokenizerError, match="shorter than its header says"):
            Tokenizer(blob[:n_bytes])


def test_a_foreign_blob_and_another_version_are_told_apart() -> None:
    blob = blob_of("bpe")
    with pytest.raises(TokenizerError, match="another kind of blob"):
        Tokenizer(b"GGUF" + blob[4:])
    with pytest.raises(TokenizerError, match="not of version 1"):
        Tokenizer(blob[:8] + b"\2" + blob[9:])
    with pytest.raises(TokenizerError, match="not mapped at a multiple of 8"):
        Tokenizer(memoryview(b"x" + blob)[1:])


def test_a_read_only_mapping_is_read_in_place_and_let_go() -> None:
    blob = blob_of("spm")
    with tempfile.TemporaryFile() as file:
        file.write(blob)
        file.flush()
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tokenizer = Tokenizer(mapping)
    expected = Tokenizer(blob).encode(TEXT, add_special=True, parse_special=True)
    assert tokenizer.encode(TEXT, add_special=True, parse_special=True) == expected
    with pytest.raises(BufferError):
        mapping.close()
    tokenizer.close()
    tokenizer.close()
    mapping.close()


def test_ids_outside_the_vocabulary_are_an_index_error() -> None:
    tokenizer = Tokenizer(blob_of("bpe"))
    for method in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_control):
        for token in (-1, tokenizer.n_vocab):
            with pytest.raises(IndexError, match=f"got {token}, expected 0 to"):
                method(token)
    assert tokenizer.id_of("no such token anywhere") is None


def test_threads_share_a_tokenizer() -> None:
    tokenizer = Tokenizer(blob_of("bpe"))
    texts = [TEXT * n for n in range(1, 60)]
    encode = functools.partial(tokenizer.encode, add_special=True, parse_special=True)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode, texts)) == [encode(text) for text in texts]


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_no_token_stands_for_more_than_max_token_bytes(kind: str) -> None:
    tokenizer = Tokenizer(blob_of(kind))
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab))
    assert 0 < longest <= tokenizer.max_token_bytes


def test_a_text_too_long_for_one_call_is_refused() -> None:
    with pytest.raises(TokenizerError, match="cannot encode more than 64 MiB"):
        Tokenizer(blob_of("bpe")).encode(
            "x" * ((1 << 26) + 1), add_special=False, parse_special=False
        )


def test_sections_are_aligned_and_inside() -> None:
    for kind in ("bpe", "spm"):
        blob, end = blob_of(kind), layout.HEADER_BYTES
        for which in range(layout.SECTIONS):
            offset, n_bytes = layout.SECTION.unpack_from(blob, layout.HEADER.size + 16 * which)
            assert offset % layout.ALIGNMENT == 0
            assert offset >= end
            end = offset + n_bytes
        assert end <= len(blob)


def test_opening_imports_nothing_heavy() -> None:
    code = (
        "import sys, ds4_common.tokenizer.encoder; "
        "print(sorted({'json', 'numpy', 'tokenizers', 'unicodedata', 'dataclasses', 'inspect'}"
        " & set(sys.modules)))"
    )
    path = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}; "
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", path + code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
