# ruff: noqa: RUF001 - the texts below are written in many scripts on purpose
"""Reads and checks the vocabulary of a GGUF: everything the tokenizer blob is made of.

Owns: which metadata keys count, their defaults by tokenizer model, and the corrections llama.cpp
makes to token types that converters got wrong. The metadata come from an untrusted file: every
length, id and number is checked here and named in the error.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from ds4_common.errors import TokenizerError, UnsupportedModel
from ds4_common.tokenizer import layout
from ds4_common.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from ds4_common.tokenizer.ranks import merges_of_ranks

D = TypeVar("D")
_MAX_TOKENS = 1 << 24
_MAX_TEXT_BYTES = 1 << 30
_PREFIX = "tokenizer.ggml."

# Texts that end a generation, whatever type the converter gave them.
_END_TEXTS = (
    b"<|eot_id|>", b"<|im_end|>", b"<|end|>", b"<|return|>", b"<|call|>", b"<|flush|>",
    b"<|calls|>", b"<end_of_turn>", b"<|endoftext|>", b"</s>", b"<|eom_id|>", b"<EOT>", b"_<EOT>",
    b"[EOT]", b"[EOS]", b"<|end_of_text|>", b"<end_of_utterance>", b"<eos>", b"<turn|>",
    b"<|tool_response>", "<｜end▁of▁sentence｜>".encode(), b"[e~[",
)  # fmt: skip
# Fill-in-the-middle texts: control tokens; the last three also end a generation.
_FIM_TEXTS: dict[str, tuple[bytes, ...]] = {
    "fim_pre": (
        b"<|fim_prefix|>", b"<fim-prefix>", b"<fim_prefix>", "<｜fim▁begin｜>".encode(), b"<PRE>",
        "▁<PRE>".encode(), b"<|code_prefix|>", b"<|prefix|>",
    ),
    "fim_suf": (
        b"<|fim_suffix|>", b"<fim-suffix>", b"<fim_suffix>", "<｜fim▁hole｜>".encode(), b"<SUF>",
        "▁<SUF>".encode(), b"<|code_suffix|>", b"<|suffix|>",
    ),
    "fim_mid": (
        b"<|fim_middle|>", b"<fim-middle>", b"<fim_middle>", "<｜fim▁end｜>".encode(), b"<MID>",
        "▁<MID>".encode(), b"<|code_middle|>", b"<|middle|>",
    ),
    "fim_pad": (b"<|fim_pad|>", b"<fim-pad>", b"<fim_pad>", b"<PAD>", b"[PAD]"),
    "fim_rep": (b"<|fim_repo|>", b"<|repo_name|>", b"<fim-repo>", b"<REPO>", b"<reponame>"),
    "fim_sep": (b"<|file_sep|>",),
}  # fmt: skip
_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Phi-3's special tokens take the white space after them along; files do not say so.
_STRIPPING = ("phi-3", "phi3")
_NOT_STRIPPING = (b"<unk>", b"<s>", b"<|endoftext|>")
_ALWAYS_TEXT = (b"<|channel|>", b"<|message|>", b"<|start|>", b"<|constrain|>")


class Metadata(Protocol):
    """What is read of a GGUF's metadata; ds4_common.gguf.Metadata is one."""

    def get_str(self, key: str, default: D) -> str | D: ...
    def get_int(self, key: str, default: D) -> int | D: ...
    def get_bool(self, key: str, default: D) -> bool | D: ...
    def get_strings(self, key: str, default: D) -> Sequence[bytes] | D: ...
    def get_ints(self, key: str, default: D) -> Sequence[int] | D: ...
    def get_floats(self, key: str, default: D) -> Sequence[float] | D: ...


@dataclass(frozen=True)
class Vocabulary:
    """A checked vocabulary. Ids index `texts`, `types` and `scores`; -1 is "no such token"."""

    kind: int  # layout.KIND_*
    pre: PreTokenizer
    texts: Sequence[bytes]
    types: bytes
    scores: array[float]  # SPM only, else empty
    merges: Sequence[bytes]  # BPE only, else empty
    ends: tuple[int, ...]
    bos: int
    eos: int
    unk: int
    pad: int
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strips: frozenset[int] = frozenset()  # special tokens that white space after them goes with


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Raises TokenizerError for what is malformed, UnsupportedModel for what nothing here runs."""
    model = metadata.get_str(_PREFIX + "model", "")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{_PREFIX}model is {model!r}; supported are 'gpt2' (byte-level BPE) and 'llama' (SPM)"
        )
    spm = model == "llama"
    texts = _texts(metadata)
    pre = PreTokenizer(()) if spm else _pre_tokenizer(metadata)
    kind = layout.KIND_SPM if spm else layout.KIND_BPE
    if not spm and pre.scanner is None:
        kind = layout.KIND_LIBRARY
    roles = {
        "bos": _id(metadata, "bos", len(texts), 1 if spm else -1),
        "eos": _id(metadata, "eos", len(texts), 2 if spm else -1),
        "unk": _id(metadata, "unknown", len(texts), 0 if spm else -1),
        "pad": _id(metadata, "padding", len(texts), -1),
        **{r: _id(metadata, r, len(texts), -1) for r in ("eot", "eom", *_FIM_TEXTS)},
    }
    types, ends = _correct_types(texts, _types(metadata, len(texts)), roles)
    merges = () if spm else metadata.get_strings(_PREFIX + "merges", None)
    if merges is None:
        merges = merges_of_ranks(texts, types)
        pre = replace(pre, ignore_merges=True)  # such tokenizers look a word up before they merge
    return Vocabulary(
        kind=kind,
        pre=pre,
        texts=texts,
        types=types,
        scores=_scores(metadata, len(texts)) if spm else array("f"),
        merges=merges,
        ends=ends,
        bos=roles["bos"],
        eos=roles["eos"],
        unk=roles["unk"],
        pad=roles["pad"],
        add_bos=_add(metadata, "bos", roles["bos"], default=spm or pre.add_bos),
        add_eos=_add(metadata, "eos", roles["eos"], default=False),
        add_space_prefix=spm and metadata.get_bool(_PREFIX + "add_space_prefix", True),
        strips=_strips(metadata, texts, types) if spm else frozenset(),
    )


def _strips(metadata: Metadata, texts: Sequence[bytes], types: bytes) -> frozenset[int]:
    """By the model's name, as llama.cpp does, and by the architecture: names are often changed."""
    names = (metadata.get_str(f"general.{key}", "").lower() for key in ("name", "architecture"))
    if not any(phi in name for name in names for phi in _STRIPPING):
        return frozenset()
    special = (layout.CONTROL, layout.USER_DEFINED, layout.UNKNOWN)
    return frozenset(
        i for i, t in enumerate(types) if t in special and texts[i] not in _NOT_STRIPPING
    )


def _texts(metadata: Metadata) -> Sequence[bytes]:
    texts = metadata.get_strings(_PREFIX + "tokens", ())
    if not texts or len(texts) > _MAX_TOKENS:
        raise TokenizerError(
            f"{_PREFIX}tokens: got {len(texts)} tokens, expected 1 to {_MAX_TOKENS}"
        )
    if sum(map(len, texts)) > _MAX_TEXT_BYTES:
        raise TokenizerError(
            f"{_PREFIX}tokens: got {sum(map(len, texts))} bytes of text, "
            f"expected at most {_MAX_TEXT_BYTES}"
        )
    return [text or b"[EMPTY_%d]" % i for i, text in enumerate(texts)] if b"" in texts else texts


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.get_str(_PREFIX + "pre", "") or "default"
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModel(
            f"{_PREFIX}pre is {name!r}: unknown pre-tokenizer; "
            f"known are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return pre


def _types(metadata: Metadata, n: int) -> bytearray:
    key = _PREFIX + "token_type"
    types = metadata.get_ints(key, None)
    if types is None:
        return bytearray([layout.NORMAL]) * n
    if len(types) != n:
        raise TokenizerError(f"{key}: got {len(types)} entries, expected one per token ({n})")
    known = range(layout.NORMAL, layout.BYTE + 1)
    # 0 is "undefined": such tokens stand for nothing, like unused ones.
    bad = next((i for i, t in enumerate(types) if t not in known and t != 0), None)
    if bad is not None:
        raise TokenizerError(f"{key}: token {bad}: got type {types[bad]}, expected 0 to 6")
    return bytearray(t or layout.UNUSED for t in types)


def _scores(metadata: Metadata, n: int) -> array[float]:
    key = _PREFIX + "scores"
    scores = array("f", metadata.get_floats(key, ()))
    if len(scores) != n:
        raise TokenizerError(f"{key}: got {len(scores)} entries, expected one per token ({n})")
    bad = next((i for i, s in enumerate(scores) if math.isnan(s)), None)
    if bad is not None:
        raise TokenizerError(f"{key}: token {bad}: got {scores[bad]}, expected a number")
    return scores


def _id(metadata: Metadata, role: str, n: int, default: int) -> int:
    key = f"{_PREFIX}{role}_token_id"
    token = metadata.get_int(key, None)
    if token is None:
        return default if default < n else -1
    if not 0 <= token < n:
        raise TokenizerError(f"{key}: got {token}, expected a token id below {n}")
    return token


def _add(metadata: Metadata, role: str, token: int, *, default: bool) -> bool:
    key = f"{_PREFIX}add_{role}_token"
    add = metadata.get_bool(key, default)
    if add and token < 0:
        raise TokenizerError(
            f"{key} is true but {_PREFIX}{role}_token_id is missing; "
            "set the id, or the flag to false, in the GGUF's metadata"
        )
    return add


def _correct_types(
    texts: Sequence[bytes], types: bytearray, roles: dict[str, int]
) -> tuple[bytes, tuple[int, ...]]:
    """llama.cpp's corrections by text. Returns the types and the ids that end a generation."""
    ids = {text: i for i, text in enumerate(texts)}
    ends = {roles[role] for role in _ENDING_ROLES} - {-1}
    for role, names in _FIM_TEXTS.items():
        found = [ids[name] for name in names if name in ids] if roles[role] < 0 else []
        for token in found:
            types[token] = layout.CONTROL
        if role in _ENDING_ROLES:
            ends.update(found)
    for token in (ids[name] for name in _END_TEXTS if name in ids):
        types[token] = layout.CONTROL
        ends.add(token)
    for token in (ids[name] for name in _ALWAYS_TEXT if name in ids):
        types[token] = layout.USER_DEFINED
    # Harmony and Solar end with <|return|>, <|call|>, <|flush|>; there <|end|> closes a message.
    if b"<|end|>" in ids and (
        (b"<|return|>" in ids and (b"<|call|>" in ids or b"<|calls|>" in ids))
        or (b"<|flush|>" in ids and (b"<|call|>" in ids or b"<|calls|>" in ids))
    ):
        ends.discard(ids[b"<|end|>"])
        types[ids[b"<|end|>"]] = layout.USER_DEFINED
    return bytes(types), tuple(sorted(ends))
