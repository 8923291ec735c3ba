"""A ready worker's service: conversations and plain prompts, answered in whatever form.

Owns: the order of things for every API - permits, preparing the prompt without blocking anybody,
generations, readers - up to the hand-over to `generate.py`. A new API is one module: its body, the
translation into a `Conversation`, and a `Renderer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.engine.api import EngineHandle, Generation, Grammar, now_ns
from ds4_worker.http.admission import Admission
from ds4_worker.http.answer import Facts, Renderer
from ds4_worker.http.constraints import (
    GrammarService,
    Wanted,
    bare_answer,
    check_combinations,
)
from ds4_worker.http.conversation import Conversation, Decoding, Observation
from ds4_worker.http.generate import Job, run
from ds4_worker.http.generation import (
    build_generations,
    choices_per_prompt,
)
from ds4_worker.http.messages import EventStream, Request, Response
from ds4_worker.http.model import ServedModel
from ds4_worker.http.prompt import Prompt, render_prompt
from ds4_worker.http.reading import ChoiceReader
from ds4_worker.http.replay import CallMemory, sampled_block
from ds4_worker.http.template import MAX_SECONDS, run_with_deadline
from ds4_worker.http.weight import check_weight

FRONTEND_WORKERS = 2
_CHARS_PER_TOKEN = 16  # of a prediction that is read to its end, whatever its text
INLINE_CHARS = 16 << 10  # prompts up to here are tokenized in the event loop (about 1 ms)
# Bodies up to here are read in the event loop. A greater one may hold millions of messages.
INLINE_BODY_BYTES = 256 << 10

_Read = TypeVar("_Read")
RendererOf = Callable[[Facts], Renderer]


class TextPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """A request to continue prompts as they stand. `model`: the name that the client used."""

    prompts: Sequence[str | list[int]]
    model: str | None = None
    decoding: Decoding = Decoding()
    observation: Observation = Observation()
    stream: bool = False
    least_tokens: int = 1
    score_prompt: bool = False
    path: str = "prompt"


class Weights(msgspec.Struct, frozen=True):
    """The owner's memory that this worker computes on, mapped read-only."""

    ranges: int = 0
    bytes: int = 0


class Service(msgspec.Struct, kw_only=True):
    """What a ready worker answers with."""

    model: ServedModel
    engine: EngineHandle
    admission: Admission
    weights: Weights = Weights()
    grammars: GrammarService = msgspec.field(default_factory=GrammarService)
    calls: CallMemory = msgspec.field(default_factory=CallMemory)
    # How many prompts are rendered or tokenized at once; others wait without blocking anybody.
    preparing: asyncio.Semaphore = msgspec.field(
        default_factory=lambda: asyncio.Semaphore(FRONTEND_WORKERS)
    )

    async def read(self, request: Request, translate: Callable[[bytes], _Read]) -> _Read:
        """What a request's body means, without blocking anybody. Raises RequestError."""
        if len(request.body) <= INLINE_BODY_BYTES:
            return translate(request.body)
        late = RequestError(
            f"the body took more than {MAX_SECONDS:g} s to read; send fewer or shorter items",
            code="body_too_complex",
        )

        def work() -> _Read:
            check_weight(request.body)
            return translate(request.body)

        async with self.preparing:
            return await run_with_deadline(work, late=late)

    async def converse(
        self, conversation: Conversation, renderer_of: RendererOf
    ) -> Response | EventStream:
        """Answers a chat request. Raises RequestError."""
        ingress_ns = now_ns()
        decoding = conversation.decoding
        name = self.model.resolve(conversation.model)
        check_observation(conversation.observation)
        check_combinations(decoding)
        n = choices_per_prompt(decoding, self.model)
        with ExitStack() as held:
            self._admit(n, held)
            prompt = await self.prepare(conversation)
            if decoding.max_tokens is None:
                limit = self.model.chat_max_tokens
                decoding = msgspec.structs.replace(decoding, max_tokens=limit)
            generations = build_generations(
                decoding,
                [prompt.ids],
                self.model,
                prompt_path=conversation.path,
                grammar=await self._grammar(prompt.wanted),
                reasoning=prompt.reasoning,
                parsed=prompt.parser is not None,
                prediction=await self._expected(decoding),
            )
            remember = self._remember if conversation.tools else None
            readers = [
                ChoiceReader(
                    generation,
                    prompt.parser() if prompt.parser is not None else None,
                    self.model.tokenizer.token_bytes,
                    one_call=not conversation.parallel_tool_calls,
                    remember=remember,
                )
                for generation in generations
            ]
            facts = Facts(
                model=name,
                prompts=[prompt.ids],
                choices_per_prompt=n,
                observation=conversation.observation,
                ingress_ns=ingress_ns,
                enqueue_ns=now_ns(),
            )
            return await self._run(
                facts, generations, readers, renderer_of, conversation.stream, held
            )

    async def complete(
        self, request: TextPrompts, renderer_of: RendererOf
    ) -> Response | EventStream:
        """Continues prompts as they stand. Raises RequestError."""
        ingress_ns = now_ns()
        name = self.model.resolve(request.model)
        check_observation(request.observation)
        check_combinations(request.decoding)
        n = choices_per_prompt(request.decoding, self.model)
        with ExitStack() as held:
            self._admit(len(request.prompts) * n, held)
            prompts = await self._encode_prompts(request)
            generations = build_generations(
                request.decoding,
                prompts,
                self.model,
                prompt_path=request.path,
                grammar=await self._grammar(bare_answer(request.decoding.constraint)),
                least_tokens=request.least_tokens,
                score_prompt=request.score_prompt,
            )
            token_bytes = self.model.tokenizer.token_bytes
            readers = [ChoiceReader(generation, None, token_bytes) for generation in generations]
            facts = Facts(
                model=name,
                prompts=prompts,
                choices_per_prompt=n,
                observation=request.observation,
                ingress_ns=ingress_ns,
                enqueue_ns=now_ns(),
            )
            return await self._run(facts, generations, readers, renderer_of, request.stream, held)

    async def prepare(self, conversation: Conversation) -> Prompt:
        """Renders and tokenizes a conversation, in a thread and within a deadline."""
        async with self.preparing:
            return await run_with_deadline(
                lambda: render_prompt(conversation, self.model, self.calls)
            )

    async def _grammar(self, wanted: Wanted | None) -> Grammar | None:
        return None if wanted is None else await self.grammars.compile(wanted, self.model)

    async def _run(
        self,
        facts: Facts,
        generations: Sequence[Generation],
        readers: Sequence[ChoiceReader],
        renderer_of: RendererOf,
        stream: bool,
        held: ExitStack,
    ) -> Response | EventStream:
        job = Job(
            facts=facts,
            generations=generations,
            readers=readers,
            renderer=renderer_of(facts),
            stream=stream,
        )
        return await run(job, self.engine, held)

    def _remember(
        self, ids: Sequence[str], calls: str, tokens: Sequence[int], after_text: bool
    ) -> None:
        spelled = b"".join(map(self.model.tokenizer.token_bytes, tokens)).decode(errors="replace")
        self.calls.remember(ids, sampled_block(spelled, calls, after_text=after_text))

    def _admit(self, count: int, held: ExitStack) -> None:
        self.admission.take(count)
        held.callback(self.admission.give_back, count)

    async def _expected(self, decoding: Decoding) -> Sequence[int]:
        """Tokens of the text that the client predicts, as many as the context could hold."""
        most, path = self.model.context_tokens, decoding.path("prediction")
        text = decoding.prediction[: _CHARS_PER_TOKEN * most]

        def encode() -> list[int]:
            return self.model.tokenizer.encode(text, add_special=False, parse_special=False)[:most]

        if len(text) <= INLINE_CHARS:
            return encode()
        late = RequestError(f"{path}: took more than {MAX_SECONDS:g} s to tokenize", param=path)
        async with self.preparing:
            return await run_with_deadline(encode, late=late)

    async def _encode_prompts(self, request: TextPrompts) -> list[list[int]]:
        texts = [item for item in request.prompts if isinstance(item, str)]
        for text in texts:
            self.model.check_text(text, request.path)
        size = sum(map(len, texts))
        if size <= INLINE_CHARS:
            return self._encode(request.prompts)
        late = RequestError(
            f"{request.path}: took more than {MAX_SECONDS:g} s to tokenize; send less",
            param=request.path,
        )
        async with self.preparing:
            return await run_with_deadline(lambda: self._encode(request.prompts), late=late)

    def _encode(self, inputs: Sequence[str | list[int]]) -> list[list[int]]:
        encode = self.model.tokenizer.encode
        return [
            encode(item, add_special=True, parse_special=True) if isinstance(item, str) else item
            for item in inputs
        ]


def check_observation(observation: Observation) -> None:
    if observation.timestamps and not observation.token_ids:
        raise RequestError(
            "return_token_timestamps: needs return_token_ids", param="return_token_timestamps"
        )
