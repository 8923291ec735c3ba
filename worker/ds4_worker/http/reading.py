"""Reading one choice: from the engine's events to the pieces of an answer, and to the whole.

Owns: running the choice's parser, counting its tokens, and the reason with which it ended. Knows
no API. A choice without a parser is all text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds4_common.errors import RequestError
from ds4_worker.engine.api import Event, Failed, Finished, Generation, Output, TokenLogprob
from ds4_worker.http.answer import (
    Choice,
    End,
    Part,
    Piece,
    ReasoningPart,
    TextPart,
    ToolCall,
)
from ds4_worker.parse.events import (
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallClosed,
    CallOpened,
    Reasoning,
    Text,
)

# Told the ids of an answer's calls, the exact text in which the model wrote them, all tokens of the
# answer, and whether visible text came before the calls.
Remember = Callable[[Sequence[str], str, Sequence[int], bool], None]


class ChoiceReader:
    """One choice on its way. `end` is set when it has ended."""

    def __init__(
        self,
        generation: Generation,
        parser: AnswerParser | None,
        token_bytes: Callable[[int], bytes],
        *,
        one_call: bool = False,
        remember: Remember | None = None,
    ) -> None:
        """`one_call`: calls after the first are dropped. `remember` is told of complete calls."""
        self._generation = generation
        self._parser = parser
        self._token_bytes = token_bytes
        self._one_call = one_call
        self._remember = remember
        self._undecided = 0  # tokens since the last event
        self._unplaced: list[TokenLogprob] = []  # of those tokens
        self._opened: list[str] = []  # ids
        self._closed = 0
        self._dropped = False
        self._after_text = False
        self._written: list[int] = []  # kept while somebody wants to remember them
        self.completion_tokens = 0
        self.accepted_tokens = self.rejected_tokens = 0
        self.reasoning_tokens = 0
        self.reused_prompt_tokens = 0
        self.end: End | None = None

    def read(self, event: Event) -> Piece | None:
        """What an event adds; sets `end` with the last one. Raises RequestError for a failure."""
        if isinstance(event, Failed):
            raise RequestError(event.message, status=event.status, code=event.code)
        if isinstance(event, Finished):
            return self._finish(event)
        self.reused_prompt_tokens = event.reused_prompt_tokens
        self.completion_tokens += len(event.tokens)
        piece = Piece(
            self._parse(event), event.tokens, event.stamp_ns, event.logprobs, event.prompt_logprobs
        )
        if event.logprobs:
            self._unplaced += event.logprobs
        if self._unplaced:
            self._place_logprobs(piece)
        return piece

    def _parse(self, output: Output) -> list[AnswerEvent]:
        if self._parser is None:
            return [Text(output.text)] if output.text else []
        events: list[AnswerEvent] = []
        for token, text in output.pieces or ():
            found = self._parser.push(token, text)
            self._count_reasoning(found)
            if self._remember is not None and token >= 0:
                self._written.append(token)
            events += found
        return self._noted(events)

    def _finish(self, finished: Finished) -> Piece | None:
        self.reused_prompt_tokens = finished.reused_prompt_tokens
        self.accepted_tokens = finished.accepted_tokens
        self.rejected_tokens = finished.drafted_tokens - finished.accepted_tokens
        events: list[AnswerEvent] = []
        if self._parser is not None:
            events = self._noted(self._parser.finish())
            if self._closed and not self._dropped and self._remember is not None:
                ids, block = self._opened[: self._closed], self._parser.block
                self._remember(ids, block, self._written, self._after_text)
        self.end = self._ending(finished)
        if not events:
            return None
        piece = Piece(events, (), 0)
        self._place_logprobs(piece)
        return piece

    def _ending(self, finished: Finished) -> End:
        # Without any stop it is the grammar that had nothing more to allow.
        stop, natural = finished.stop, finished.stop is None
        if isinstance(stop, int) and stop in self._generation.eos_ids:
            stop, natural = None, True
        if finished.reason == "stop" and natural and self._closed:
            return End("tool_calls")
        return End(finished.reason, stop)

    def _count_reasoning(self, events: Sequence[AnswerEvent]) -> None:
        """Tokens that are held back count as what they turn out to be."""
        self._undecided += 1
        if events:
            if all(isinstance(event, Reasoning) for event in events):
                self.reasoning_tokens += self._undecided
            self._undecided = 0

    def _place_logprobs(self, piece: Piece) -> None:
        """Tokens that are held back belong to the text that they turn out to be, if to any. Those
        before it were delimiters or the end of reasoning."""
        if not piece.events:
            return
        text = "".join([event.text for event in piece.events if isinstance(event, Text)])
        missing, first = len(text.encode()), len(self._unplaced)
        while missing > 0 and first > 0:
            first -= 1
            missing -= len(self._token_bytes(self._unplaced[first].token))
        piece.text_logprobs = self._unplaced[first:]
        self._unplaced = []

    def _noted(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        kept = []
        for event in events:
            if isinstance(event, CallOpened | CallArguments | CallClosed):
                if self._one_call and event.index > 0:
                    self._dropped = True
                    continue
                if isinstance(event, CallOpened):
                    self._opened.append(event.id)
                elif isinstance(event, CallClosed):
                    self._closed += 1
            elif isinstance(event, Text) and not self._opened and not event.text.isspace():
                self._after_text = True
            kept.append(event)
        return kept


class ChoiceCollector:
    """Everything one choice gave."""

    def __init__(self, generation: Generation) -> None:
        self._parts: list[Part] = []
        self._texts: list[list[str]] = []  # of each part, joined once at the end
        self._calls: list[int] = []  # positions of the calls among the parts
        self._tokens: list[int] = []
        self._stamps: list[int] = []
        self._logprobs: list[TokenLogprob] | None = [] if generation.logprobs >= 0 else None
        scored = generation.prompt_logprobs >= 0
        self._prompt_logprobs: list[TokenLogprob] | None = [] if scored else None

    def add(self, piece: Piece) -> None:
        self._tokens += piece.tokens
        self._stamps += [piece.stamp_ns] * len(piece.tokens)
        if self._logprobs is not None:
            self._logprobs += piece.logprobs or ()
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += piece.prompt_logprobs or ()
        for event in piece.events:
            self._note(event)
        if piece.text_logprobs:
            text = next(part for part in reversed(self._parts) if isinstance(part, TextPart))
            text.logprobs += piece.text_logprobs

    def _note(self, event: AnswerEvent) -> None:
        if isinstance(event, Text | Reasoning):
            kind = TextPart if isinstance(event, Text) else ReasoningPart
            if not self._parts or not isinstance(self._parts[-1], kind):
                self._append(kind(""))
            self._texts[-1].append(event.text)
        elif isinstance(event, CallOpened):
            self._calls.append(len(self._parts))
            self._append(ToolCall(event.id, event.name, ""))
        else:
            position = self._calls[event.index]
            if isinstance(event, CallArguments):
                self._texts[position].append(event.fragment)
            else:
                part = self._parts[position]
                assert isinstance(part, ToolCall)
                part.closed = True

    def _append(self, part: Part) -> None:
        self._parts.append(part)
        self._texts.append([])

    def choice(self, end: End) -> Choice:
        for part, texts in zip(self._parts, self._texts, strict=True):
            if isinstance(part, ToolCall):
                part.arguments = "".join(texts)
            else:
                part.text = "".join(texts)
        return Choice(
            self._parts, self._tokens, self._stamps, self._logprobs, self._prompt_logprobs, end
        )
