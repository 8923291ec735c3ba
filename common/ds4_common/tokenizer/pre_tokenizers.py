# ruff: noqa: RUF001 - the texts below are written in many scripts on purpose
"""Which pre-tokenizer each `tokenizer.ggml.pre` value names.

Owns the names and the regular expressions of llama.cpp's table, so that a GGUF gives here the words
it gives there. The expressions are the ones the models were trained with where llama.cpp adapts
them to its own engine. A pre-tokenizer with a `scanner` runs in native/tokenizer_pre.c, which holds
the same order; one without runs in the `tokenizers` library from its expressions.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}"
)


def _words(digits: str, contractions: str = _CONTRACTIONS + "|") -> str:
    other = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{other}|{_REST}"


def _cased_words(digits: str, contractions: str) -> str:
    before, other = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    words = rf"{before}{_UPPER}*{_LOWER}+{contractions}|{before}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{digits}|{other}|{_REST}"


def _without_han(words: str) -> str:
    """Han characters make words of their own; the letters of the others exclude them."""
    for letters in (_UPPER, _LOWER):
        words = words.replace(letters, letters[:-1] + r"&&[^\p{Han}]]")
    return r"\p{Han}+|" + words.replace("[\\r\\n/]*", "[\\r\\n]*")


@dataclass(frozen=True)
class PreTokenizer:
    """`expressions` cut text one after the other, each inside the pieces of the one before.

    `scanner` is the header's `pre`, None where only the library can run it. `add_bos` is what the
    name implies when the metadata does not say.
    """

    expressions: tuple[str, ...]
    scanner: int | None = None
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2_FAMILY = PreTokenizer((_GPT2,), 0)
_DIGITS_FAMILY = PreTokenizer((r"\p{N}", _GPT2), 1)
# Qwen's own tokenizer normalises to NFC first; models that borrowed its expression do not.
_QWEN2_WORDS = _words(r"\p{N}")
_QWEN2_FAMILY = PreTokenizer((_QWEN2_WORDS,), 2)
_LLAMA3_WORDS = _words(r"\p{N}{1,3}")
_LLAMA3_FAMILY = PreTokenizer((_LLAMA3_WORDS,), 3, ignore_merges=True, add_bos=True)
_LLAMA3_PLAIN = PreTokenizer((_LLAMA3_WORDS,), 3)
_DEEPSEEK3_FAMILY = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3), 7)
_GPT4O_FAMILY = PreTokenizer((_cased_words(r"\p{N}{1,3}", _CONTRACTIONS + "?"),))
# Letters with case as one family of tokenizers lists them: Latin, Greek, Cyrillic and more.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-"
    "ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-"
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BLOOM_WORDS = " ?[^(\\s|.,!?…。，、।۔،)]+"

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        (
            "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat",
            "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion",
            "granite-docling", "exaone4",
        ),
        _GPT2_FAMILY,
    ),
    **dict.fromkeys(
        (
            "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b",
            "mellum2",
        ),
        _DIGITS_FAMILY,
    ),
    "qwen2": PreTokenizer((_QWEN2_WORDS,), 2, nfc=True),
    **dict.fromkeys(
        (
            "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open",
            "grok-2",
        ),
        _QWEN2_FAMILY,
    ),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}",
        ),
        6,
        nfc=True,
    ),
    **dict.fromkeys(
        (
            "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
            "lfm2", "jina-v5-nano",
        ),
        _LLAMA3_FAMILY,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3_PLAIN),
    # Its vocabulary has words that no merge reaches.
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3_WORDS,), 3, ignore_merges=True)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), 4),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"), 5),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3_FAMILY),
    # Known expressions without a scanner: the library runs them.
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O_FAMILY),
    "tekken": PreTokenizer(
        (_cased_words(r"\p{N}", contractions=""),), ignore_merges=True, add_bos=True
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
            "[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
        )
    ),
    "kimi-k2": PreTokenizer((_without_han(_cased_words(r"\p{N}{1,3}", _CONTRACTIONS + "?")),)),
    "youtu": PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _cased_words(r"\p{N}", _CONTRACTIONS + "?"),
        ),
        ignore_merges=True,
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_BLOOM_WORDS,))),
    "viking": PreTokenizer((_BLOOM_WORDS, r"\p{N}")),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        PreTokenizer(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    "seed-coder": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}",
        )
    ),
    "ufakzeka": PreTokenizer((_words(r"\p{N}", contractions=""),)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
}  # fmt: skip
