"""Grammars compiled for one vocabulary, and their places in sequences.

Owns: the library's tokenizer (built with the first grammar, once per process), and what the library
does not do by itself: it never raises, but in its error state allows nothing but the end, so that
every failure would look like a clean stop. Here each call is checked. Imported with the first
constrained request.

Forced tokens of the library (`compute_ff_tokens`) are not used: the model draws every token, so a
grammar changes which tokens can be drawn and nothing else.
"""

from __future__ import annotations

import ctypes
import math
import re
import threading
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import cached_property, partial
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ds4_common.errors import GrammarError, GrammarFailure
from ds4_worker.grammar.kept import GrammarStats, Kept
from ds4_worker.grammar.source import check_size

MAX_SYMBOLS = 32_000
# Divisibility is an automaton with a state per remainder, which no limit of the library bounds:
# by six digits it takes 15 s. Several of them may hold for one number, so together they count.
MAX_MULTIPLE = 20_000
_MULTIPLE = re.compile(r'multipleOf\\*"\s*:\s*([0-9][0-9.eE+-]{0,63})')
_MESSAGE_CHARS = 1000  # of the library, which repeats lines of the grammar however long they are


class Vocabulary(Protocol):
    """What the library has to know of a tokenizer; see `ds4_common.tokenizer.Tokenizer`."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def is_control(self, token: int) -> bool: ...

    def is_special(self, token: int) -> bool: ...


class Compiler:
    """Compiles grammars for one model. Slow at first (up to seconds for a large vocabulary): call
    it in a thread."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        n_vocab: int,
        eos_ids: Sequence[int],
        delimiters: Iterable[int] = (),
    ) -> None:
        """`delimiters`: tokens that grammars name by id, besides control tokens."""
        self._vocabulary = vocabulary
        self._n_vocab = n_vocab
        self._eos_ids = list(eos_ids)
        self._delimiters = frozenset(delimiters)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self.stats = GrammarStats()
        self._kept: Kept[CompiledGrammar] | None = None  # none before the tokenizer

    def knows(self, source: str) -> bool:
        """Whether a grammar is compiled already."""
        return self._kept is not None and source in self._kept

    @cached_property
    def special_tokens(self) -> dict[int, bytes]:
        """The tokens that a grammar can name, with their texts."""
        named = self._delimiters.union(
            self._eos_ids, filter(self._is_special, range(self._n_vocab))
        )
        return {token: self._vocabulary.token_bytes(token) for token in sorted(named)}

    def compile(self, source: str) -> CompiledGrammar:
        """A grammar from the library's text. Raises GrammarError with the library's message."""
        check_size(source)
        _check_multiples(source)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build_tokenizer()
            if self._kept is None:
                self._kept = Kept(self.stats)
            return self._kept.get(source, partial(self._compile, self._tokenizer))

    def _compile(self, tokenizer: LLTokenizer, source: str) -> CompiledGrammar:
        limits = LLParserLimits(
            max_grammar_size=MAX_SYMBOLS,
            verbose_errors=False,  # no states and no grammars in messages
        )
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the costly first one; copies inherit what it has built
        if matcher.is_error():
            raise GrammarError(_told(matcher.get_error()))
        return CompiledGrammar(matcher, self._n_vocab)

    def _build_tokenizer(self) -> LLTokenizer:
        if not self._eos_ids:
            raise GrammarError("the model has no token that ends an answer")
        wrapped = _Wrapped(self._vocabulary, self._n_vocab, self._eos_ids[0], self.special_tokens)
        return LLTokenizer(
            TokenizerWrapper(wrapped), n_vocab=self._n_vocab, eos_token=self._eos_ids
        )

    def _is_special(self, token: int) -> bool:
        """Control tokens, and user-defined ones that look like them: `<think>` is no text, but a
        run of blanks is, whoever defined it. llguidance's own rule for llama.cpp."""
        if self._vocabulary.is_control(token):
            return True
        text = self._vocabulary.token_bytes(token) if self._vocabulary.is_special(token) else b""
        return text.startswith(b"<") and text.endswith(b">")


def _check_multiples(source: str) -> None:
    """Refuses schemas whose `multipleOf` together make too large an automaton."""
    together = 1
    for text in _MULTIPLE.findall(source):
        try:
            digits = Decimal(text).normalize().as_tuple().digits
        except ArithmeticError:  # no number, as the library will say
            continue
        together = math.lcm(together, int("".join(map(str, digits))) or 1)
        if together > MAX_MULTIPLE:
            raise GrammarError(
                f"multipleOf: {text} makes too large a grammar; expected values whose least "
                f"common multiple, without zeros at its end, is at most {MAX_MULTIPLE}"
            )


def _told(message: str) -> str:
    """The library's message for a client."""
    message = message.removesuffix("<non-verbose/>").rstrip()
    if message == "NoExtensionBias":
        return (
            "no text fits the grammar (library: NoExtensionBias); a rule or a $ref may lead to "
            "nothing but itself"
        )
    return _shortened(message)


def _shortened(message: str) -> str:
    if len(message) <= _MESSAGE_CHARS:
        return message
    half = _MESSAGE_CHARS // 2
    return f"{message[:half]} ... {message[-half:]}"


class _Wrapped:
    """A tokenizer in the form that the library asks for."""

    bos_token_id = None

    def __init__(
        self, vocabulary: Vocabulary, n_vocab: int, eos_id: int, special: Iterable[int]
    ) -> None:
        self._encode = vocabulary.encode
        self.eos_token_id = eos_id
        # A special token's bytes are its name; grammars cannot produce it as text.
        self.tokens = [vocabulary.token_bytes(token) for token in range(n_vocab)]
        self.special_token_ids = sorted(special)

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode(errors="replace"), add_special=False, parse_special=False)


class CompiledGrammar:
    """See `engine.api.Grammar`."""

    def __init__(self, start: LLMatcher, n_vocab: int) -> None:
        self._start = start
        self._words = -(-n_vocab // 32)

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._start.deep_copy(), self._words)


class GrammarMatcher:
    """See `engine.api.Matcher`."""

    __slots__ = ("_address", "_ahead", "_bytes", "_mask", "_matcher")

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._ahead = ctypes.create_string_buffer(0)  # masks of the places after drafts
        self._mask = (ctypes.c_uint32 * words)()  # bit t % 32 of word t // 32: token t
        self._address = ctypes.addressof(self._mask)
        self._bytes = 4 * words

    def mask(self) -> int:
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
        if matcher.is_error():
            raise GrammarFailure(f"the grammar broke down: {matcher.get_error()}")
        return self._address

    def allows(self, tokens: Sequence[int]) -> int:
        scout = self._matcher.deep_copy()  # a microsecond; what breaks down in it, harms nobody
        allowed: int = scout.validate_tokens(list(tokens))
        return 0 if scout.is_error() else allowed

    def ahead(self, tokens: Sequence[int]) -> list[int]:
        scout = self._matcher.deep_copy()
        if len(self._ahead) < len(tokens) * self._bytes:
            self._ahead = ctypes.create_string_buffer(len(tokens) * self._bytes)
        address = ctypes.addressof(self._ahead)
        masks: list[int] = []
        for token in tokens:
            if not scout.consume_token(token) or scout.is_stopped():
                break
            scout.unsafe_compute_mask_ptr(address, self._bytes)
            if scout.is_error():
                break
            masks.append(address)
            address += self._bytes
        return masks

    def accept(self, token: int) -> bool:
        matcher = self._matcher
        if not matcher.consume_token(token) or matcher.is_error():
            raise GrammarFailure(f"the grammar broke down at token {token}: {matcher.get_error()}")
        return matcher.is_stopped()
