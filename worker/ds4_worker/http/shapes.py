"""What the answers of OpenAI's chat and text completions share.

Owns: the frame of a whole answer and of a chunk, usage, observation, and which chunk carries what.
A `CompletionRenderer` is finished by the two endpoints, which write their choices. UNSET fields are
left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ds4_common.errors import RequestError
from ds4_worker.http.answer import Choice, End, Facts, Piece, Used
from ds4_worker.http.messages import KEEPALIVE, error_event

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks

_ENCODER = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class PromptDetails(msgspec.Struct):
    """`cache_write_tokens`: of the prompt, that had to be computed."""

    cached_tokens: int
    cache_write_tokens: int


class CompletionDetails(msgspec.Struct):
    """Predictions: drafts of a request that brought one; those that came true are part of the
    completion."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_of(used: Used) -> Usage:
    return Usage(
        used.prompt_tokens,
        used.completion_tokens,
        used.prompt_tokens + used.completion_tokens,
        PromptDetails(used.cached_tokens, used.prompt_tokens - used.cached_tokens),
        CompletionDetails(used.reasoning_tokens, used.accepted_tokens, used.rejected_tokens),
    )


class Performance(msgspec.Struct):
    """Nanoseconds since the process started, on the clock of `token_timestamps_ns`."""

    ingress_ns: int
    enqueue_ns: int
    reused_prompt_tokens: int


class ChoiceBody(msgspec.Struct, kw_only=True):
    """What a choice holds in every answer and chunk."""

    index: int
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    token_timestamps_ns: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """A whole answer or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChoiceBody]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    reused_prompt_tokens: int | UnsetType = UNSET
    performance: Performance | UnsetType = UNSET


def new_id(prefix: str) -> str:
    return prefix + os.urandom(12).hex()


class CompletionRenderer:
    """Everything but the choices' own form, which subclasses write."""

    keepalive = KEEPALIVE
    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, facts: Facts, *, include_usage: bool) -> None:
        self.facts = facts
        self._include_usage = include_usage
        self._id = new_id(self.id_prefix)
        self._created = int(time.time())
        self._prompt_shown = False

    # --- what an endpoint writes ---------------------------------------------------------------

    def write_whole(self, index: int, choice: Choice) -> ChoiceBody:
        raise NotImplementedError

    def write_opening(self, index: int) -> ChoiceBody | None:
        """The chunk before the first piece; None when the endpoint has none."""
        raise NotImplementedError

    def write_piece(self, index: int, piece: Piece) -> Sequence[ChoiceBody]:
        """Chunks of a piece, without what is observed."""
        raise NotImplementedError

    def write_empty(self, index: int, reason: str | None) -> ChoiceBody:
        """A chunk that says nothing: it carries an id or the end."""
        raise NotImplementedError

    # --- Renderer ------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Choice], used: Used) -> object:
        observation = self.facts.observation
        bodies = []
        for index, choice in enumerate(choices):
            body = self.write_whole(index, choice)
            if observation.token_ids:
                body.token_ids = choice.tokens
            if observation.timestamps:
                body.token_timestamps_ns = choice.stamps_ns
            bodies.append(body)
        answer = self._answer(bodies, self.whole_object)
        answer.usage = usage_of(used)
        self._show_prompts(answer)
        self._observe_end(answer, used)
        return answer

    def begin(self, choice: int, cached_tokens: int) -> bytes:
        body = self.write_opening(choice)
        if body is None:
            if not self.facts.observation.token_ids:
                return b""
            body = self.write_empty(choice, None)  # something has to carry the prompt's ids
        answer = self._chunk(body)
        if not self._prompt_shown or len(self.facts.prompts) > 1:
            self._show_prompts(answer)
        self._prompt_shown = True
        return event(answer)

    def piece(self, choice: int, piece: Piece) -> bytes:
        observation = self.facts.observation
        bodies: list[ChoiceBody] = []
        if observation.token_ids:
            for token in piece.tokens:
                body = self.write_empty(choice, None)
                body.token_ids = [token]
                if observation.timestamps:
                    body.token_timestamps_ns = [piece.stamp_ns]
                bodies.append(body)
        bodies += self.write_piece(choice, piece)
        return b"".join([event(self._chunk(body)) for body in bodies])

    def end(self, choice: int, end: End, used: Used | None) -> bytes:
        answer = self._chunk(self.write_empty(choice, end.reason))
        if used is None:
            return event(answer)
        self._observe_end(answer, used)
        if self._include_usage:
            total = self._answer([], self.chunk_object)
            total.usage = usage_of(used)
            return event(answer) + event(total) + DONE
        if self.facts.observation.token_ids:
            answer.usage = usage_of(used)
        return event(answer) + DONE

    def failure(self, error: RequestError) -> bytes:
        return error_event(error)

    # --- inside --------------------------------------------------------------------------------

    def _answer(self, choices: Sequence[ChoiceBody], kind: str) -> Answer:
        model = self.facts.model
        return Answer(id=self._id, object=kind, created=self._created, model=model, choices=choices)

    def _chunk(self, body: ChoiceBody) -> Answer:
        answer = self._answer([body], self.chunk_object)
        if self._include_usage:
            answer.usage = None
        return answer

    def _show_prompts(self, answer: Answer) -> None:
        """Prompt ids at the top level; per choice when there are several prompts."""
        if not self.facts.observation.token_ids:
            return
        if len(self.facts.prompts) == 1:
            answer.prompt_token_ids = self.facts.prompts[0]
            return
        for body in answer.choices:
            body.prompt_token_ids = self.facts.prompt_of(body.index)

    def _observe_end(self, answer: Answer, used: Used) -> None:
        """What an observed answer carries at its end besides usage."""
        facts = self.facts
        if facts.observation.token_ids:
            answer.reused_prompt_tokens = used.cached_tokens
        if facts.observation.timestamps:
            answer.performance = Performance(facts.ingress_ns, facts.enqueue_ns, used.cached_tokens)
