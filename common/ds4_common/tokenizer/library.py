"""The `tokenizers` library as the runner of pre-tokenizers that have no scanner in C.

Owns: writing a blob's JSON definition (loader side) and running it (worker side, on first use).
Special tokens, BOS and EOS never reach the library: the native code cuts them out before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ds4_common.errors import TokenizerError
from ds4_common.tokenizer.vocabulary import Vocabulary


def definition(vocabulary: Vocabulary) -> bytes:
    """The library's tokenizer.json for this vocabulary. Raises TokenizerError: a text not UTF-8."""
    try:
        texts = [text.decode() for text in vocabulary.texts]
        merges = [merge.decode() for merge in vocabulary.merges]
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"tokenizer.ggml.tokens: got a text that is not UTF-8 ({error.object!r}), expected "
            "UTF-8: this pre-tokenizer runs in the tokenizers library"
        ) from error
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": e}, "behavior": "Isolated", "invert": False}
        for e in vocabulary.pre.expressions
    ]
    bytes_step = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False,
    }  # fmt: skip
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_step]},
        "model": {
            "type": "BPE",
            "vocab": {text: i for i, text in enumerate(texts)},
            "merges": [_pair(merge) for merge in merges],
            "ignore_merges": vocabulary.pre.ignore_merges,
        },
    }
    return json.dumps(document, ensure_ascii=False).encode()


def _pair(merge: str) -> list[str]:
    """The two texts of a merge; the left one may itself start with a space."""
    left, _, right = merge[1:].partition(" ")
    return [merge[:1] + left, right]


def encoder(definition: bytes) -> Callable[[str], list[int]]:
    """A function from text without special tokens to ids."""
    from tokenizers import Tokenizer  # 40 ms to import: only for models that need it

    tokenizer = Tokenizer.from_str(definition.decode())

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode
