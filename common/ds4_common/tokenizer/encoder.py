"""Encodes and decodes text with a mapped tokenizer blob.

Owns: the Python face of native/tokenizer*.c and the streaming detokenizer. Opening a blob checks
its header in C and copies nothing, so a worker is ready in microseconds. Imports ctypes and little
else; `unicodedata` and `tokenizers` load on the first text that needs them.
"""

from __future__ import annotations

import codecs
import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from ds4_common.errors import TokenizerError
from ds4_common.native import lib
from ds4_common.native.buffers import pinned
from ds4_common.tokenizer import layout

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_WITH_BOS_EOS: Final = 1
_PARSE_SPECIAL: Final = 2
_RAW: Final = 4
_FAILURES: Final = {
    -1: "is shorter than its header says; attach again or let the owner load the model again",
    -2: "does not start with DS4TOKEN; this is another kind of blob",
    -3: f"is not of version {layout.VERSION}; owner and worker must be of the same release",
    -4: "has a section that does not fit; let the owner load the model again",
    -5: "has an id or offset out of range; let the owner load the model again",
    -6: "could not be used: out of memory",
    -7: "cannot encode more than 64 MiB of text at once",
    -8: "has no native encoder",
    -9: "is not mapped at a multiple of 8 bytes",
}


@functools.cache
def _native() -> ctypes.CDLL:
    library = lib.load()
    pointer, u64, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    library.ds4_tokenizer_check.restype = ctypes.c_int
    library.ds4_tokenizer_check.argtypes = [pointer, u64]
    library.ds4_tokenizer_id_of.restype = ctypes.c_int32
    library.ds4_tokenizer_id_of.argtypes = [pointer, u64, ctypes.c_char_p, u64]
    for name in ("ds4_tokenizer_encode", "ds4_tokenizer_fragments"):
        function = getattr(library, name)
        function.restype = ctypes.c_int64
        function.argtypes = [pointer, u64, ctypes.c_char_p, u64, u32, pointer, u64]
    return library


class Tokenizer:
    """A tokenizer over a blob that stays mapped until `close`.

    Safe to use from several threads. Long texts encode without the interpreter lock. Lone
    surrogates in a text encode as U+FFFD.
    """

    def __init__(self, buffer: ReadableBuffer) -> None:
        """Opens a blob without copying it. Raises TokenizerError for anything but a sound blob."""
        view = memoryview(buffer).cast("B")  # pins the buffer where it is
        with pinned(view) as address:
            self._address: int | None = address
        self._n_bytes = len(view)
        self._library = _native()
        self._checked(self._library.ds4_tokenizer_check(self._address, self._n_bytes))
        header = layout.HEADER.unpack_from(view)
        _, _, self._kind, _, _, self._flags, self.n_vocab, self.max_token_bytes, bos, eos = header[
            :10
        ]
        self.bos_id: int | None = bos if bos >= 0 else None
        self.eos_id: int | None = eos if eos >= 0 else None
        self._text_offsets = self._section(view, layout.TEXT_OFFSETS).cast("I")
        self._texts = self._section(view, layout.TEXT)
        self._piece_offsets = self._section(view, layout.PIECE_OFFSETS).cast("I")
        self._pieces = self._section(view, layout.PIECES)
        self._types = self._section(view, layout.TYPES)
        self._json = self._section(view, layout.JSON)
        self._views = (
            view, self._text_offsets, self._texts, self._piece_offsets, self._pieces, self._types,
            self._json,
        )  # fmt: skip
        self.eog_ids: tuple[int, ...] = tuple(self._section(view, layout.EOG).cast("I"))
        self._library_encoder: Callable[[str], list[int]] | None = None

    def close(self) -> None:
        """Lets the buffer go; the tokenizer cannot be used afterwards."""
        self._address = None
        for view in self._views:
            view.release()

    # --- text to ids ---

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of a text.

        `add_special` adds BOS and EOS as the model's metadata say. `parse_special` recognises
        control tokens written out in the text: only for text that a template made, never for text
        that a user typed. User-defined tokens are always recognised.
        """
        flags = _WITH_BOS_EOS * add_special | _PARSE_SPECIAL * parse_special
        if self._kind == layout.KIND_LIBRARY or (self._flags & layout.NFC and not _is_nfc(text)):
            return self._encode_by_fragments(text, flags)
        return self._encode(_utf8(text), flags)

    def _encode(self, data: bytes, flags: int) -> list[int]:
        capacity = len(data) + 8
        while True:
            ids = array("i", bytes(4 * capacity))
            n = self._checked(
                self._library.ds4_tokenizer_encode(
                    self._address, self._n_bytes, data, len(data), flags,
                    ids.buffer_info()[0], capacity,
                )
            )  # fmt: skip
            if n <= capacity:
                return ids[:n].tolist()
            capacity = n  # SPM may give a byte, written as U+2581, three ids

    def _encode_by_fragments(self, text: str, flags: int) -> list[int]:
        """Cuts specials out in C, then prepares each text between them here."""
        data = _utf8(text)
        ids: list[int] = []
        if flags & _WITH_BOS_EOS and self._flags & layout.ADD_BOS and self.bos_id is not None:
            ids.append(self.bos_id)
        for begin, end, special in self._fragments(data, flags):
            if special >= 0:
                ids.append(special)
                continue
            fragment = data[begin:end].decode()
            if self._flags & layout.NFC and not _is_nfc(fragment):
                import unicodedata

                fragment = unicodedata.normalize("NFC", fragment)
            if self._kind == layout.KIND_LIBRARY:
                ids += self._library_encode(fragment)
            else:
                ids += self._encode(fragment.encode(), _RAW)
        if flags & _WITH_BOS_EOS and self._flags & layout.ADD_EOS and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _fragments(self, data: bytes, flags: int) -> Iterable[tuple[int, int, int]]:
        capacity = 64
        while True:
            triples = array("q", bytes(24 * capacity))
            n = self._checked(
                self._library.ds4_tokenizer_fragments(
                    self._address, self._n_bytes, data, len(data), flags,
                    triples.buffer_info()[0], capacity,
                )
            )  # fmt: skip
            if n <= capacity:
                numbers = iter(triples[: 3 * n])
                return zip(numbers, numbers, numbers, strict=True)
            capacity = n

    def _library_encode(self, text: str) -> list[int]:
        if self._library_encoder is None:
            from ds4_common.tokenizer.library import encoder

            self._library_encoder = encoder(bytes(self._json))
        return self._library_encoder(text)

    # --- ids to text ---

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; its text for control tokens, nothing for unused ones."""
        self._check_id(token)
        return self._pieces[self._piece_offsets[token] : self._piece_offsets[token + 1]].tobytes()

    def token_text(self, token: int) -> str:
        """The token as the vocabulary writes it (`Ġthe`, `▁the`, `<0x0A>`)."""
        self._check_id(token)
        text = self._texts[self._text_offsets[token] : self._text_offsets[token + 1]]
        return str(text, "utf-8", "replace")

    def is_control(self, token: int) -> bool:
        """Whether the token is never part of a text: control tokens, and the unknown token."""
        self._check_id(token)
        return self._types[token] & layout.TYPE_MASK in (layout.CONTROL, layout.UNKNOWN)

    def is_special(self, token: int) -> bool:
        """Whether the token stands for itself: text never merges into it."""
        self._check_id(token)
        kind = self._types[token] & layout.TYPE_MASK
        return kind in (layout.CONTROL, layout.UNKNOWN, layout.USER_DEFINED)

    def id_of(self, text: str) -> int | None:
        """Id of the token that the vocabulary writes so, None when there is none."""
        data = _utf8(text)
        found: int = self._library.ds4_tokenizer_id_of(
            self._address, self._n_bytes, data, len(data)
        )
        return found if found >= 0 else None

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """The bytes of a whole text, without the space that SPM puts before its first word.

        `skip_special` leaves control tokens out. Bytes, because a token may end inside a character.
        """
        shown = [i for i in ids if not (skip_special and self.is_control(i))]
        data = b"".join(map(self.token_bytes, shown))
        if self.adds_space_prefix and data.startswith(b" "):
            first = next((i for i in shown if not self.is_control(i)), None)
            return data[1:] if first == shown[0] else data
        return data

    @property
    def adds_space_prefix(self) -> bool:
        return bool(self._flags & layout.ADD_SPACE_PREFIX)

    # --- inside ---

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token id: got {token}, expected 0 to {self.n_vocab - 1}")

    def _checked(self, result: int) -> int:
        if result < 0:
            raise TokenizerError(f"tokenizer blob of {self._n_bytes} bytes {_FAILURES[result]}")
        return result

    @staticmethod
    def _section(view: memoryview, which: int) -> memoryview:
        place = layout.HEADER.size + which * layout.SECTION.size
        offset, n_bytes = layout.SECTION.unpack_from(view, place)
        return view[offset : offset + n_bytes]


class StreamDetokenizer:
    """Turns ids into text as they come: only whole characters, the rest is kept for the next id.

    All that `push` and `flush` return, joined, is what decoding all bytes at once with
    errors="replace" gives. Control tokens are left out unless `show_special`. With `text_start` the
    ids begin a text, so the space that SPM puts before a first word is dropped; pass False when
    they continue one.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, text_start: bool = True, show_special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._show_special = show_special
        self._drop_space = text_start and tokenizer.adds_space_prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        tokenizer = self._tokenizer
        if not self._show_special and tokenizer.is_control(token):
            return ""
        piece = tokenizer.token_bytes(token)
        if self._drop_space and piece:
            self._drop_space = False
            piece = piece[1:] if piece.startswith(b" ") else piece
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """The end of the text: a character that never got its last byte becomes U+FFFD."""
        return self._decoder.decode(b"", True)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Surrogate pairs join to their character, lone ones become U+FFFD.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _is_nfc(text: str) -> bool:
    if text.isascii():
        return True
    import unicodedata  # a megabyte of tables: only when a text needs it

    return unicodedata.is_normalized("NFC", text)
