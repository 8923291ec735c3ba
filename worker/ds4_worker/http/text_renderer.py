"""The answers of `POST /v1/completions`, whole and in chunks.

Owns: field names, order and presence, as the OpenAI clients expect them; where tokens begin in the
text; and which of several tries are the best.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from ds4_worker.engine.api import TokenLogprob
from ds4_worker.http.answer import Choice, End, Facts, Piece, Used
from ds4_worker.http.model import Tokenizer
from ds4_worker.http.shapes import MIN_LOGPROB, ChoiceBody, CompletionRenderer, event
from ds4_worker.parse.events import Text


class TextLogprobs(msgspec.Struct):
    """Parallel lists. A prompt's first token has no log-probability: nothing precedes it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(ChoiceBody, kw_only=True):
    text: str
    logprobs: TextLogprobs | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`echoes[i]` is what the answers to prompt i begin with: the prompt, for `echo`. `logprobs`:
    alternatives per token, None when they are not shown. `keep`: choices per prompt that are shown,
    the best of all that were generated."""

    echoes: Sequence[str] | None = None
    logprobs: int | None = None
    keep: int | None = None
    include_usage: bool = False

    @property
    def scored(self) -> bool:
        return self.echoes is not None and self.logprobs is not None


class TextRenderer(CompletionRenderer):
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, facts: Facts, tokenizer: Tokenizer, options: TextOptions) -> None:
        super().__init__(facts, include_usage=options.include_usage)
        self._tokenizer = tokenizer
        self._options = options
        self._places = self._new_places()
        # Log-probabilities of a prompt that is not shown yet.
        self._scores: list[list[TokenLogprob] | None] = [
            [] if options.scored else None for _ in range(facts.choices)
        ]

    def whole(self, choices: Sequence[Choice], used: Used) -> object:
        per_prompt, keep = self.facts.choices_per_prompt, self._options.keep
        if keep is None or keep == per_prompt:
            return super().whole(choices, used)
        kept: list[Choice] = []
        for begin in range(0, len(choices), per_prompt):
            tries = choices[begin : begin + per_prompt]
            kept += sorted(tries, key=likelihood, reverse=True)[:keep]
        self.facts = msgspec.structs.replace(self.facts, choices_per_prompt=keep)
        self._places = self._new_places()
        return super().whole(kept, used)

    def write_whole(self, index: int, choice: Choice) -> TextChoice:
        scores = choice.prompt_logprobs if self._options.scored else None
        return TextChoice(
            index=index,
            text=self._echo(index) + choice.text,
            logprobs=self._logprobs(index, choice.logprobs, scores),
            finish_reason=choice.end.reason,
        )

    def write_opening(self, index: int) -> TextChoice | None:
        if self._options.echoes is None or self._options.scored:
            return None
        return TextChoice(index=index, text=self._echo(index))

    def write_piece(self, index: int, piece: Piece) -> Sequence[TextChoice]:
        chunks = self._write_scores(index, piece.prompt_logprobs or (), piece.tokens)
        text = "".join([item.text for item in piece.events if isinstance(item, Text)])
        if text or piece.logprobs:
            logprobs = self._logprobs(index, piece.logprobs) if piece.logprobs else None
            chunks.append(TextChoice(index=index, text=text, logprobs=logprobs))
        return chunks

    def end(self, choice: int, end: End, used: Used | None) -> bytes:
        scores = self._write_scores(choice, (), (), last=True)
        before = b"".join([event(self._chunk(chunk)) for chunk in scores])
        return before + super().end(choice, end, used)

    def write_empty(self, index: int, reason: str | None) -> TextChoice:
        return TextChoice(index=index, text="", finish_reason=reason)

    def _write_scores(
        self,
        index: int,
        more: Sequence[TokenLogprob],
        tokens: Sequence[int],
        *,
        last: bool = False,
    ) -> list[TextChoice]:
        """The prompt with its log-probabilities, once all of them are there."""
        scores = self._scores[index]
        if scores is None:
            return []
        scores += more
        if not tokens and not last:
            return []
        self._scores[index] = None
        logprobs = self._logprobs(index, (), scores)
        return [TextChoice(index=index, text=self._echo(index), logprobs=logprobs)]

    def _new_places(self) -> list[_Places]:
        return [_Places(self._tokenizer, self._shift(i)) for i in range(self.facts.choices)]

    def _echo(self, index: int) -> str:
        if self._options.echoes is None:
            return ""
        return self._options.echoes[index // self.facts.choices_per_prompt]

    def _shift(self, index: int) -> int:
        """Characters of the prompt's tokens that its text lacks: a start token, a first space."""
        if not self._options.scored:
            return -len(self._echo(index))
        tokens = self.facts.prompt_of(index)
        spelled = b"".join(map(self._tokenizer.token_bytes, tokens)).decode(errors="replace")
        return max(len(spelled) - len(self._echo(index)), 0)

    def _logprobs(
        self,
        index: int,
        logprobs: Sequence[TokenLogprob] | None,
        scores: Sequence[TokenLogprob] | None = None,
    ) -> TextLogprobs | None:
        """`scores`: the prompt's from its second token on; None: without the prompt."""
        if self._options.logprobs is None or logprobs is None:
            return None
        top: list[dict[str, float] | None] = []
        written = TextLogprobs([], [], top if self._options.logprobs > 0 else None, [])
        if scores is not None:
            first = self.facts.prompt_of(index)[0]
            self._add(written, index, first, None)
        for item in (*(scores or ()), *logprobs):
            self._add(written, index, item.token, item)
        return written

    def _add(
        self, written: TextLogprobs, index: int, token: int, item: TokenLogprob | None
    ) -> None:
        written.tokens.append(self._text(token))
        written.text_offset.append(self._places[index].of(token))
        value = None if item is None else max(item.logprob, MIN_LOGPROB)
        written.token_logprobs.append(value)
        if written.top_logprobs is not None:
            top = None
            if item is not None:
                # The token itself is always among them.
                pairs = [*item.top, (item.token, item.logprob)]
                top = {self._text(t): max(v, MIN_LOGPROB) for t, v in reversed(pairs)}
                top = dict(reversed(top.items()))
            written.top_logprobs.append(top)

    def _text(self, token: int) -> str:
        """Half a character is shown by its bytes, as OpenAI does."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Places:
    """Where each token of a choice begins in its text."""

    def __init__(self, tokenizer: Tokenizer, shift: int) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = -shift

    def of(self, token: int) -> int:
        """The place of the next token."""
        place = max(self._characters, 0)
        self._characters += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return place


def likelihood(choice: Choice) -> float:
    """Mean log-probability per token."""
    logprobs = choice.logprobs or ()
    return sum(item.logprob for item in logprobs) / max(len(logprobs), 1)
