"""`ds4 --dump-tokens` and `--dump-logprobs`: what the model sees and how sure it is, as text.

Owns: both formats. Byte strings that are no text are shown with replacement characters, and given
as numbers beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

import msgspec

from ds4_common.errors import RequestError, UsageError
from ds4_worker.engine.api import Failed, Output, TokenLogprob
from ds4_worker.http.model import Tokenizer
from ds4_worker.http.prompt import Prompt
from ds4_worker.http.shapes import MIN_LOGPROB
from ds4_worker.session import Session


class Alternative(msgspec.Struct):
    id: int
    text: str
    bytes: list[int]
    logprob: float


class Position(msgspec.Struct):
    """One generated token, and the best ones in its place, best first."""

    id: int
    text: str
    bytes: list[int]
    logprob: float
    top: list[Alternative]


class LogprobDump(msgspec.Struct):
    """Natural logarithms under the model's own distribution (temperature 1)."""

    model: str
    prompt_tokens: list[int]
    finish_reason: str | None  # None: it was interrupted
    tokens: list[Position]


def tokens(tokenizer: Tokenizer, ids: Sequence[int], out: TextIO) -> None:
    """One line per token: id, tab, text as JSON."""
    for token in ids:
        text = msgspec.json.encode(text_of(tokenizer, token)).decode()
        out.write(f"{token}\t{text}\n")
    out.flush()


def logprobs(session: Session, prompt: Prompt, top: int, path: str) -> None:
    """Generates, and writes a `LogprobDump` to a file ("-": standard output). Raises RequestError
    and UsageError."""
    found: list[TokenLogprob] = []
    # Opened first: nobody waits for an answer that cannot be written.
    with _writable(path) as out:
        for event in session.run(session.generation(prompt, logprobs=top)):
            if isinstance(event, Failed):
                raise RequestError(event.message, status=event.status)
            if isinstance(event, Output):
                found += event.logprobs or ()
        tokenizer = session.model.tokenizer
        dump = LogprobDump(
            model=session.name,
            prompt_tokens=list(prompt.ids),
            finish_reason=session.finished.reason if session.finished else None,
            tokens=[_position(tokenizer, item) for item in found],
        )
        out.write(msgspec.json.format(msgspec.json.encode(dump), indent=1).decode() + "\n")


def _writable(path: str) -> TextIO:
    if path == "-":
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--dump-logprobs {path}: {error.strerror}") from error


def _position(tokenizer: Tokenizer, item: TokenLogprob) -> Position:
    top = [Alternative(*_fields(tokenizer, token, value)) for token, value in item.top]
    return Position(*_fields(tokenizer, item.token, item.logprob), top)


def _fields(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[int, str, list[int], float]:
    data = tokenizer.token_bytes(token)
    return token, text_of(tokenizer, token), list(data), max(logprob, MIN_LOGPROB)


def text_of(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode(errors="replace")
