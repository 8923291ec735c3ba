"""The tokenizer blob's header: what native/tokenizer.h defines, for Python.

Owns the numbers that builder and encoder share. Byte-level description: docs/layouts.md, "Tokenizer
blob". Imported by the worker at start-up, so it imports nothing but `struct`.
"""

from __future__ import annotations

import struct
from typing import Final

MAGIC: Final = b"DS4TOKEN"
VERSION: Final = 1
# magic, version, kind, n_bytes, pre, flags, n_vocab, max_text_bytes, bos, eos, unk, pad,
# vocab_probe_limit, merge_probe_limit
HEADER: Final = struct.Struct("<8sIIQIIIIiiiiII")
SECTION: Final = struct.Struct("<QQ")  # offset, n_bytes
ALIGNMENT: Final = 64  # of every section

KIND_BPE: Final = 1
KIND_SPM: Final = 2
KIND_LIBRARY: Final = 3

ADD_BOS: Final = 1
ADD_EOS: Final = 2
ADD_SPACE_PREFIX: Final = 4
IGNORE_MERGES: Final = 8
NFC: Final = 16
SPACE_SPLITS: Final = 32

TEXT_OFFSETS: Final = 0
TEXT: Final = 1
PIECE_OFFSETS: Final = 2
PIECES: Final = 3
TYPES: Final = 4
SCORES: Final = 5
VOCAB_TABLE: Final = 6
MERGE_TABLE: Final = 7
BYTE_IDS: Final = 8
SPECIALS: Final = 9
EOG: Final = 10
JSON: Final = 11
SECTIONS: Final = 12
HEADER_BYTES: Final = HEADER.size + SECTIONS * SECTION.size

# Token types, as in GGUF's tokenizer.ggml.token_type.
NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6
TYPE_MASK: Final = 0x3F  # the type without the flags below
STRIPS: Final = 0x40  # flag in the blob's types: white space after the special token goes with it
WHOLE: Final = 0x80  # flag in the blob's types: merging the token's own bytes gives the token
