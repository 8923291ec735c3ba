"""A loaded model to talk to from one thread: the terminal's counterpart of the HTTP service.

Owns: attaching, preparing prompts as the HTTP side does, and stepping the engine until an answer
ends or is interrupted. Knows no terminal: it yields events and keeps counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ds4_worker.config import EngineConfig
from ds4_worker.engine.api import Failed, Finished, Generation, Output
from ds4_worker.http.conversation import Conversation, Decoding, Thinking, Turn
from ds4_worker.http.generation import build_generations
from ds4_worker.http.prompt import Prompt, render_prompt
from ds4_worker.http.reading import ChoiceReader
from ds4_worker.http.replay import CallMemory
from ds4_worker.loading import LoadedModel, Phases, load, served_model
from ds4_worker.parse.events import AnswerEvent

if TYPE_CHECKING:
    from ds4_common.client import OwnerConnection
    from ds4_worker.http.model import ServedModel


class Pace(msgspec.Struct):
    """Of one answer: tokens and seconds. `first_seconds`: from asking to the first token."""

    tokens: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0  # from the first token to the last

    @property
    def per_second(self) -> float:
        """0 while two tokens have not come."""
        return (self.tokens - 1) / self.seconds if self.seconds > 0 else 0.0

    def clear(self) -> None:
        self.tokens, self.first_seconds, self.seconds = 0, 0.0, 0.0

    def count(self, tokens: int, elapsed_seconds: float) -> None:
        if not self.tokens:
            self.first_seconds = elapsed_seconds
        self.tokens += tokens
        self.seconds = elapsed_seconds - self.first_seconds


class Session:
    """One conversation partner. `interrupt` may be called from a signal handler."""

    def __init__(
        self, connection: OwnerConnection, config: EngineConfig, decoding: Decoding
    ) -> None:
        # The connection is the lease: it stays open until the process ends.
        self._connection = connection
        self._config = config
        self._decoding = decoding
        self._calls = CallMemory()
        self._loaded: LoadedModel = load(connection, config, Phases())
        self.model: ServedModel = served_model(self._loaded)
        self.used_tokens = 0  # of the context, by the last exchange
        self.pace = Pace()  # of the last answer, the same object for all
        self.finished: Finished | None = None  # how it ended; None: it was interrupted
        self.interrupted = False  # until somebody asks again

    @property
    def name(self) -> str:
        return self.model.names[0]

    @property
    def context_tokens(self) -> int:
        return self.model.context_tokens

    @property
    def reasons(self) -> bool:
        """Whether it is known how this model marks its reasoning."""
        return self.model.frontend.reasoning is not None

    def resize(self, context_tokens: int) -> None:
        """Gives the context another size. Raises UsageError for more than the model was made for;
        then everything stays as it was."""
        config = msgspec.structs.replace(self._config, context_tokens=context_tokens)
        loaded = load(self._connection, config, Phases())
        old, self._loaded, self._config = self._loaded, loaded, config
        self.model = served_model(loaded)
        old.core.close()
        for mapping in (*old.weights, *old.blobs):
            mapping.close()

    def prompt(self, turns: Sequence[Turn], thinking: Thinking) -> Prompt:
        """A conversation as the model sees it. Raises RequestError."""
        return render_prompt(Conversation(turns=turns, thinking=thinking), self.model, self._calls)

    def raw_prompt(self, text: str) -> Prompt:
        """A text to be continued as it stands. Raises RequestError when it cannot fit."""
        self.model.check_text(text, "prompt")
        ids = self.model.tokenizer.encode(text, add_special=True, parse_special=True)
        return Prompt(text=text, ids=ids, in_reasoning=False, reasoning=None, parser=None)

    def generation(self, prompt: Prompt, logprobs: int | None = None) -> Generation:
        """What the engine is asked for. Raises RequestError for a prompt that does not fit."""
        (generation,) = build_generations(
            msgspec.structs.replace(self._decoding, logprobs=logprobs),
            [prompt.ids],
            self.model,
            prompt_path="prompt",
            reasoning=prompt.reasoning,
            parsed=prompt.parser is not None,
        )
        return generation

    def answer(self, prompt: Prompt) -> Iterator[AnswerEvent]:
        """The pieces of the answer as they come. Raises RequestError."""
        generation = self.generation(prompt)
        parser = prompt.parser() if prompt.parser is not None else None
        reader = ChoiceReader(generation, parser, self.model.tokenizer.token_bytes)
        for event in self.run(generation):
            piece = reader.read(event)
            if piece is not None:
                yield from piece.events

    def run(self, generation: Generation) -> Iterator[Output | Finished | Failed]:
        """Steps the engine until the sequence ends or is interrupted, keeping count."""
        core = self._loaded.core
        sequence = core.sequence(generation)
        began = time.monotonic()
        self.used_tokens, self.finished = len(generation.prompt), None
        self.pace.clear()
        core.submit(sequence)
        try:
            while (events := core.step()) is not None:
                for _, event in events:
                    if isinstance(event, Output) and event.tokens:
                        self.used_tokens += len(event.tokens)
                        self.pace.count(len(event.tokens), time.monotonic() - began)
                    elif isinstance(event, Finished):
                        self.finished = event
                    yield event
                if self.interrupted:
                    return
        finally:
            core.cancel(sequence)  # nothing to do when it has ended

    def interrupt(self, *_: object) -> None:
        self.interrupted = True
