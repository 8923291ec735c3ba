"""Builds the tokenizer blob from GGUF metadata. Runs in the loader child.

Owns the assembly of the blob (docs/layouts.md, "Tokenizer blob"); the tables are made in C by
native/tokenizer_build.c, because a vocabulary has hundreds of thousands of entries. The blob holds
no addresses and is the same bytes for the same metadata.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Sequence
from typing import Final

from ds4_common.errors import TokenizerError
from ds4_common.native import lib
from ds4_common.tokenizer import layout
from ds4_common.tokenizer.vocabulary import Metadata, Vocabulary, read_vocabulary

_PROBLEMS: Final = {
    1: "has the same text as token {other}",
    2: "collides with too many others: the names were chosen to make look-ups slow",
    3: "is not two texts with a space between them (at most 1024 bytes)",
    4: "joins a left part that is no token",
    5: "joins a right part that is no token",
    6: "gives a text that is no token",
    7: "has type BYTE but is not of the form <0xAB>",
}


class _Problem(ctypes.Structure):
    _fields_ = (("problem", ctypes.c_int32), ("other", ctypes.c_uint32))


@functools.cache
def _native() -> ctypes.CDLL:
    library = lib.load()
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    library.ds4_tokenizer_index_vocab.restype = ctypes.c_int64
    library.ds4_tokenizer_index_vocab.argtypes = [
        pointer, pointer, u32, pointer, u32, pointer, pointer,
    ]  # fmt: skip
    library.ds4_tokenizer_index_merges.restype = ctypes.c_int64
    library.ds4_tokenizer_index_merges.argtypes = [
        pointer, pointer, pointer, pointer, u32, pointer, pointer, u32, pointer, u32, pointer,
        pointer,
    ]  # fmt: skip
    library.ds4_tokenizer_make_pieces.restype = ctypes.c_int64
    library.ds4_tokenizer_make_pieces.argtypes = [
        u32, pointer, pointer, pointer, u32, pointer, pointer, pointer,
    ]  # fmt: skip
    library.ds4_tokenizer_mark_whole.restype = ctypes.c_int
    library.ds4_tokenizer_mark_whole.argtypes = [pointer, ctypes.c_uint64]
    return library


def build_blob(metadata: Metadata) -> bytes:
    """Returns the blob that ds4_common.tokenizer.encoder.Tokenizer opens.

    Raises TokenizerError for a malformed vocabulary and UnsupportedModel for a tokenizer model or
    pre-tokenizer that nothing here runs.
    """
    vocabulary = read_vocabulary(metadata)
    blob = _Assembly(vocabulary).blob()
    if vocabulary.kind != layout.KIND_LIBRARY:
        address = (ctypes.c_char * len(blob)).from_buffer(blob)
        result = _native().ds4_tokenizer_mark_whole(ctypes.addressof(address), len(blob))
        if result < 0:
            raise TokenizerError(f"tokenizer blob: marking whole words failed with {result}")
        del address
    return bytes(blob)


def end_of_generation_ids(metadata: Metadata) -> list[int]:
    """Ids that end a generation, ascending: EOS, EOT, EOM and the texts known to mean the same."""
    return list(read_vocabulary(metadata).ends)


def _packed(texts: Sequence[bytes]) -> tuple[bytes, array[int]]:
    """All texts in one string, and the u32 offsets of their n + 1 borders."""
    return b"".join(texts), array("I", itertools.accumulate(map(len, texts), initial=0))


def _address(data: array[int] | array[float]) -> int:
    return data.buffer_info()[0]


def _table_mask(entries: int, slots_per_entry: float) -> int:
    """Slots minus one: a power of two."""
    return (1 << max(4, int(entries * slots_per_entry - 1).bit_length())) - 1


class _Assembly:
    """One vocabulary on its way to a blob."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.n = len(vocabulary.texts)
        self.text, self.text_offsets = _packed(vocabulary.texts)
        self.max_text_bytes = max(map(len, vocabulary.texts))
        self.vocab_probe_limit = self.merge_probe_limit = 0
        self.flags = self._flags()
        self.vocab_mask = _table_mask(self.n, 2)
        self.vocab_slots = array("I", bytes(8 * (self.vocab_mask + 1)))

    def blob(self) -> bytearray:
        self._index_vocabulary()
        v, sections = self.vocabulary, [b""] * layout.SECTIONS
        sections[layout.TEXT_OFFSETS] = self.text_offsets.tobytes()
        sections[layout.TEXT] = self.text
        sections[layout.PIECE_OFFSETS], sections[layout.PIECES] = self._pieces()
        sections[layout.TYPES] = (
            bytes(t | layout.STRIPS * (i in v.strips) for i, t in enumerate(v.types))
            if v.strips
            else v.types
        )
        sections[layout.SCORES] = v.scores.tobytes()
        sections[layout.VOCAB_TABLE] = self.vocab_slots.tobytes()
        sections[layout.MERGE_TABLE] = self._merge_table()
        sections[layout.BYTE_IDS] = array("i", self._byte_ids()).tobytes()
        sections[layout.SPECIALS] = array("I", self._specials()).tobytes()
        sections[layout.EOG] = array("I", v.ends).tobytes()
        if v.kind == layout.KIND_LIBRARY:
            from ds4_common.tokenizer.library import definition  # pulls in json

            sections[layout.JSON] = definition(v)
        return self._joined(sections)

    def _joined(self, sections: list[bytes]) -> bytearray:
        places, at = [], layout.HEADER_BYTES
        for section in sections:
            places.append((at, len(section)))
            at += -(-len(section) // layout.ALIGNMENT) * layout.ALIGNMENT
        blob = bytearray(at)
        blob[: layout.HEADER.size] = self._header(at)
        for i, ((offset, n_bytes), section) in enumerate(zip(places, sections, strict=True)):
            layout.SECTION.pack_into(
                blob, layout.HEADER.size + i * layout.SECTION.size, offset, n_bytes
            )
            blob[offset : offset + n_bytes] = section
        return blob

    def _header(self, n_bytes: int) -> bytes:
        v = self.vocabulary
        return layout.HEADER.pack(
            layout.MAGIC, layout.VERSION, v.kind, n_bytes, v.pre.scanner or 0, self.flags, self.n,
            self.max_text_bytes, v.bos, v.eos, v.unk, v.pad, self.vocab_probe_limit,
            self.merge_probe_limit,
        )  # fmt: skip

    def _flags(self) -> int:
        v = self.vocabulary
        return (
            layout.ADD_BOS * v.add_bos
            | layout.ADD_EOS * v.add_eos
            | layout.ADD_SPACE_PREFIX * v.add_space_prefix
            | layout.IGNORE_MERGES * v.pre.ignore_merges
            | layout.NFC * v.pre.nfc
            | layout.SPACE_SPLITS * self._space_splits()
        )

    def _index_vocabulary(self) -> None:
        limit, problem = array("I", [0]), _Problem()
        bad = _native().ds4_tokenizer_index_vocab(
            self.text, _address(self.text_offsets), self.n, _address(self.vocab_slots),
            self.vocab_mask, _address(limit), ctypes.byref(problem),
        )  # fmt: skip
        if bad >= 0:
            raise self._error("tokens", "token", bad, self.vocabulary.texts, problem)
        self.vocab_probe_limit = limit[0]

    def _merge_table(self) -> bytes:
        merges = self.vocabulary.merges
        text, offsets = _packed(merges)
        mask = _table_mask(len(merges), 4 / 3)
        slots = array("I", b"\xff" * (16 * (mask + 1)))
        limit, problem = array("I", [0]), _Problem()
        bad = _native().ds4_tokenizer_index_merges(
            self._header(0), self.text, _address(self.text_offsets), _address(self.vocab_slots),
            self.vocab_mask, text, _address(offsets), len(merges), _address(slots), mask,
            _address(limit), ctypes.byref(problem),
        )  # fmt: skip
        if bad >= 0:
            raise self._error("merges", "merge", bad, merges, problem)
        self.merge_probe_limit = limit[0]
        return slots.tobytes()

    def _pieces(self) -> tuple[bytes, bytes]:
        pieces, offsets = bytearray(len(self.text)), array("I", bytes(4 * (self.n + 1)))
        problem = _Problem()
        address = (ctypes.c_char * len(pieces)).from_buffer(pieces)
        bad = _native().ds4_tokenizer_make_pieces(
            self.vocabulary.kind, self.text, _address(self.text_offsets), self.vocabulary.types,
            self.n, ctypes.addressof(address), _address(offsets), ctypes.byref(problem),
        )  # fmt: skip
        if bad >= 0:
            raise self._error("token_type", "token", bad, self.vocabulary.texts, problem)
        return offsets.tobytes(), bytes(pieces[: offsets[-1]])

    def _byte_ids(self) -> list[int]:
        v = self.vocabulary
        ids = {text: i for i, text in enumerate(v.texts) if len(text) <= 6}
        if v.kind != layout.KIND_SPM:
            return [ids.get(gpt2_character(byte).encode(), -1) for byte in range(256)]
        found = [ids.get(b"<0x%02X>" % b, ids.get(bytes([b]), v.unk)) for b in range(256)]
        if -1 in found:
            raise TokenizerError(
                f"tokenizer.ggml.tokens: got neither a token <0x{found.index(-1):02X}> nor an "
                "unknown token, expected byte fallback for every byte"
            )
        return found

    def _specials(self) -> list[int]:
        v = self.vocabulary
        special = (layout.CONTROL, layout.USER_DEFINED, layout.UNKNOWN)
        return sorted((i for i in range(self.n) if v.types[i] in special), key=v.texts.__getitem__)

    def _space_splits(self) -> bool:
        """Whether U+2581 stands only at the start of token texts (runs of it count as one)."""
        if self.vocabulary.kind != layout.KIND_SPM:
            return False
        low_line = "▁".encode()
        return all(t.startswith(low_line * t.count(low_line)) for t in self.vocabulary.texts)

    @staticmethod
    def _error(
        key: str, what: str, index: int, texts: Sequence[bytes], problem: _Problem
    ) -> TokenizerError:
        sentence = _PROBLEMS[problem.problem].format(other=problem.other)
        return TokenizerError(f"tokenizer.ggml.{key}: {what} {index} {texts[index]!r} {sentence}")


def gpt2_character(byte: int) -> str:
    """The printable character that byte-level BPE writes for a byte."""
    if byte <= 0x20:
        return chr(0x100 + byte)
    if 0x7F <= byte <= 0xA0:
        return chr(0x121 + byte - 0x7F)
    return chr(0x143) if byte == 0xAD else chr(byte)
