"""Vocabularies for tokenizer tests, and independent answers to compare with.

Owns: metadata as a dict, small BPE and SPM vocabularies trained on a fixed text, the `tokenizers`
tokenizer equal to a vocabulary, and plain Python versions of llama.cpp's BPE and SPM.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ds4_common.tokenizer.build import gpt2_character
from ds4_common.tokenizer.pre_tokenizers import PRE_TOKENIZERS

PREFIX = "tokenizer.ggml."
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|tool|>")
USER_DEFINED = "<think>"
TRAINING_TEXT = [
    Path(functools.__file__).read_text(),
    "The quick brown fox jumps over the lazy dog. It's 1234567 o'clock, isn't it? WE'LL SEE'S.\n"
    * 9,
    "Größe, naïveté, Žluťoučký kůň; Съешь же ещё этих мягких французских булок\r\n" * 9,
    "日本語のテキスト、한국어 문장 그리고 中文字符。مرحبا بالعالم हिन्दी पाठ ๑๒๓ ١٢٣ Ⅷ ½\t\t x\n"
    * 9,
]


class Fields(dict[str, Any]):
    """GGUF metadata as a dict: what ds4_common.tokenizer.vocabulary.Metadata asks for."""

    def get_str(self, key: str, default: Any = None) -> Any:
        return self.get(key, default)

    get_int = get_bool = get_strings = get_ints = get_floats = get_str

    def changed(self, **changes: Any) -> Fields:
        """A copy with `tokenizer.ggml.<name>` set, or removed where the value is None."""
        copy = Fields(self)
        for name, value in changes.items():
            copy.pop(PREFIX + name, None)
            if value is not None:
                copy[PREFIX + name] = value
        return copy


def fields(**values: Any) -> Fields:
    return Fields().changed(**values)


# --- byte-level BPE ---


def pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """The library's pre-tokenizer for a name: its expressions, then GPT-2's byte characters."""
    splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in PRE_TOKENIZERS[pre].expressions]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


@functools.cache
def bpe_fields(pre: str) -> Fields:
    """1,500 tokens trained through that pre-tokenizer, three control tokens, one user-defined."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizer(pre)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(TRAINING_TEXT, trainer)
    model = json.loads(trained.to_str())["model"]
    texts = [*SPECIALS, USER_DEFINED, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    n_special = len(SPECIALS)
    return fields(
        model="gpt2",
        pre=pre,
        tokens=[text.encode() for text in texts],
        token_type=[3] * n_special + [4] + [1] * (len(texts) - n_special - 1),
        merges=[" ".join(merge).encode() for merge in model["merges"]],
        bos_token_id=0,
        eos_token_id=1,
        add_bos_token=True,
    )


def unmapped(text: bytes) -> bytes:
    """The bytes that a text of GPT-2's byte characters stands for."""
    back = {gpt2_character(byte): byte for byte in range(256)}
    return bytes(back[character] for character in text.decode())


def library_bpe(metadata: Any) -> Callable[[str], list[int]]:
    """The `tokenizers` library on the same vocabulary, for text without special tokens."""
    texts = [text.decode() for text in metadata.get_strings(PREFIX + "tokens")]
    merges = [merge.decode() for merge in metadata.get_strings(PREFIX + "merges")]
    pre = metadata.get_str(PREFIX + "pre")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(texts)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
            ignore_merges=PRE_TOKENIZERS[pre].ignore_merges,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    if PRE_TOKENIZERS[pre].nfc:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def plain_bpe(metadata: Any, word: bytes) -> list[int]:
    """One word by the definition: merge the lowest rank, leftmost first, until nothing merges.

    A byte that the vocabulary lacks stays in the way of merges and gives no id.
    """
    ids = {text: i for i, text in enumerate(metadata.get_strings(PREFIX + "tokens"))}
    ranks: dict[tuple[bytes, bytes], int] = {}
    for rank, merge in enumerate(metadata.get_strings(PREFIX + "merges")):
        left, _, right = merge.partition(b" ")
        ranks.setdefault((left, right), rank)
    parts = [gpt2_character(byte).encode() for byte in word]
    while True:
        pairs = [
            (ranks[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in ranks
        ]
        if not pairs:
            return [ids[part] for part in parts if part in ids]
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


# --- SPM ---


@functools.cache
def spm_fields() -> Fields:
    """900 pieces trained as SentencePiece BPE, with scores that fall with their rank."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁")
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False)
    trained.train_from_iterator(TRAINING_TEXT, trainer)
    vocabulary = trained.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = ["<unk>", "<s>", "</s>", *bytes_, *pieces, USER_DEFINED, "[INST]"]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4, 3]
    return fields(
        model="llama",
        tokens=[text.encode() for text in texts],
        token_type=types,
        scores=[0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0, 0.0],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )


def plain_spm(metadata: Any, text: str) -> list[int]:
    """Text whose spaces are U+2581 already, by llama.cpp's rule: join the neighbours whose joint
    text is the best-scored token, leftmost first; what is no token in the end goes as bytes."""
    ids = {t.decode(): i for i, t in enumerate(metadata.get_strings(PREFIX + "tokens"))}
    scores = metadata.get_floats(PREFIX + "scores")
    parts = list(text)
    while True:
        joint = [a + b for a, b in itertools.pairwise(parts)]
        pairs = [(-scores[ids[j]], i) for i, j in enumerate(joint) if j in ids]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [joint[at]]
    return [token for part in parts for token in _piece_ids(ids, part)]


def _piece_ids(ids: Mapping[str, int], part: str) -> Iterator[int]:
    if part in ids:
        yield ids[part]
    else:
        yield from (ids[f"<0x{byte:02X}>"] for byte in part.encode())


def library_spm(metadata: Any) -> Callable[[str], list[int]]:
    """The `tokenizers` library on the same pieces: every split of a token into two tokens becomes a
    merge, best score first. Equal where no token is reached by two splits at once."""
    texts = [text.decode() for text in metadata.get_strings(PREFIX + "tokens")]
    scores = metadata.get_floats(PREFIX + "scores")
    ids = {text: i for i, text in enumerate(texts)}
    merges = [
        (text[:cut], text[cut:])
        for text in sorted(texts, key=lambda t: -scores[ids[t]])
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


# --- texts ---


def stdlib_texts(most: int) -> Sequence[str]:
    """The standard library's own modules: real text of many shapes, on every machine."""
    folder = Path(functools.__file__).parent
    return [path.read_text("utf-8") for path in sorted(folder.glob("*.py"))[:most]]
