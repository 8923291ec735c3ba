"""From sampled tokens to what a reader may see: stops, text and log-probabilities of one sequence.

Order of things for each token: raw id out (observation), end-of-sequence, stop sequences of token
ids, decoding to text, stop strings, the grammar's end, the limit. Nothing after the token that ends
a sequence is seen: stops of the request are decided before another one is asked for, and behind an
end-of-sequence token the scheduler drops what a step that was under way has drawn.
"""

from __future__ import annotations

from collections import deque

from ds4_worker.engine.api import (
    Detokenizer,
    Finished,
    FinishReason,
    Generation,
    Output,
    TokenLogprob,
)
from ds4_worker.engine.stops import StopState, TextStop, compile_sequences, compile_strings
from ds4_worker.executor.api import Sampled

NO_TOKEN = -1  # of a piece of text that belongs to no single token


class Presenter:
    """Turns the tokens of one sequence into `Output` events; sets `finished` at its end."""

    def __init__(self, generation: Generation, detokenizer: Detokenizer) -> None:
        self._generation = generation
        self._detokenizer = detokenizer
        self._held: deque[Sampled] = deque()
        sequences, strings = generation.stop_token_sequences, generation.stop_strings
        self._tokens = StopState(compile_sequences(sequences)) if sequences else None
        self._text = TextStop(compile_strings(strings)) if strings else None
        self._pieces = _Pieces() if generation.pieces else None
        self._logprobs: list[TokenLogprob] | None = None
        self.count = 0  # tokens sampled so far
        self.finished: FinishReason | None = None
        self.stop: str | int | None = None
        self.cut = False  # ended by a stop of the request, not by the model or a limit
        self.reused = 0  # prompt tokens from the prefix cache
        self.drafted = self.accepted = 0  # guesses computed along, and those that came true

    def push(self, sampled: Sampled, stamp_ns: int, complete: bool = False) -> Output:
        """Takes the next sampled token. `complete`: the grammar allows nothing after it."""
        self.count += 1
        self._logprobs = [] if self._generation.logprobs >= 0 else None
        text = self._settle(sampled)
        stop = self._text
        if self.finished is None and (complete or self.count >= self._generation.max_tokens):
            if stop is None or stop.matched is None:
                self.finished = "stop" if complete else "length"
                text += self._show_all()
        if stop is not None and stop.matched is not None:
            self.finished, self.stop, self.cut = "stop", stop.matched, True
        elif stop is not None and self.finished is not None:
            text += stop.flush()
        pieces = None
        if self._pieces is not None:
            pieces = self._pieces.settle(len(text), last=self.finished is not None)
        return Output([sampled.token], text, self._logprobs, stamp_ns, self.reused, pieces)

    def end(self) -> Finished:
        """The last event of a sequence that has finished."""
        if self.finished is None:
            raise ValueError("the sequence has not finished")
        return Finished(
            self.finished, self.count, self.stop, self.reused, self.drafted, self.accepted
        )

    def _settle(self, sampled: Sampled) -> str:
        """Applies end-of-sequence and token stops; text of the tokens that are settled now."""
        if sampled.token in self._generation.eos_ids:
            self.finished, self.stop = "stop", sampled.token
            return self._show_all()
        self._held.append(sampled)
        if self._tokens is None:
            return self._show(1)
        matched = self._tokens.push(sampled.token)
        if matched:
            self.finished, self.stop, self.cut = "stop", sampled.token, True
            for _ in range(matched):
                self._held.pop()
            return self._show_all()
        return self._show(len(self._held) - self._tokens.held)

    def _show(self, count: int) -> str:
        text = ""
        for _ in range(count):
            sampled = self._held.popleft()
            if self._logprobs is not None and sampled.logprob is not None:
                self._logprobs.append(
                    TokenLogprob(sampled.token, sampled.logprob, sampled.top or [])
                )
            piece = self._detokenizer.push(sampled.token)
            if self._pieces is not None:
                self._pieces.add(sampled.token, piece)
            text += piece
        return text if self._text is None else self._text.push(text)

    def _show_all(self) -> str:
        """The sequence ends here: nothing held back can become a stop or a character any more."""
        text = self._show(len(self._held))
        rest = self._detokenizer.flush()
        if rest and self._pieces is not None:
            self._pieces.add(NO_TOKEN, rest)
        return text + (rest if self._text is None else self._text.push(rest))


class _Pieces:
    """Which token completed which text, released as the text is settled."""

    __slots__ = ("_settled", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str]] = deque()
        self._settled = 0  # characters of the pieces that wait

    def add(self, token: int, text: str) -> None:
        self._waiting.append((token, text))

    def settle(self, characters: int, *, last: bool) -> list[tuple[int, str]]:
        """The pieces whose text is settled when `characters` more of it are. At the end (`last`) a
        piece that a stop string cuts is shortened; what follows it is dropped."""
        self._settled += characters
        pieces = []
        while self._waiting and len(self._waiting[0][1]) <= self._settled:
            piece = self._waiting.popleft()
            self._settled -= len(piece[1])
            pieces.append(piece)
        if last and self._settled:
            token, text = self._waiting[0]
            pieces.append((token, text[: self._settled]))
        return pieces
