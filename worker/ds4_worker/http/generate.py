"""Running one request: the engine's events through parsers into a renderer.

Owns: the only place where a request meets the engine's stream. A failure is raised; `streaming.py`
decides whether a status can still be told, and keeps a silent connection from looking dead.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.engine.api import EngineHandle, Event, Generation, Stream
from ds4_worker.http.answer import Facts, Renderer, Used
from ds4_worker.http.messages import EventStream, Response, json_response
from ds4_worker.http.reading import ChoiceCollector, ChoiceReader


class Job(msgspec.Struct, kw_only=True):
    """One request on its way through the engine. `generations[i]` is read by `readers[i]`."""

    facts: Facts
    generations: Sequence[Generation]
    readers: Sequence[ChoiceReader]
    renderer: Renderer
    stream: bool

    def used(self) -> Used:
        """What all choices took; right once each of them has ended."""
        first = self.readers[:: self.facts.choices_per_prompt]  # the others reuse its prompt
        # How many drafts were offered depends on measured times, and the same request must have the
        # same answer: only who brings a prediction is told what became of it.
        predicted = [
            reader
            for generation, reader in zip(self.generations, self.readers, strict=True)
            if generation.prediction
        ]
        return Used(
            prompt_tokens=sum(map(len, self.facts.prompts)),
            completion_tokens=sum(reader.completion_tokens for reader in self.readers),
            cached_tokens=sum(reader.reused_prompt_tokens for reader in first),
            reasoning_tokens=sum(reader.reasoning_tokens for reader in self.readers),
            accepted_tokens=sum(reader.accepted_tokens for reader in predicted),
            rejected_tokens=sum(reader.rejected_tokens for reader in predicted),
        )


async def run(job: Job, engine: EngineHandle, held: ExitStack) -> Response | EventStream:
    """Submits the job and answers it. The answer takes over what `held` holds, and releases it when
    its reader is done."""
    stream = engine.submit(job.generations)
    held.callback(stream.close)
    if not job.stream:
        reply = json_response(await collect(job, stream))
        reply.release = held.pop_all().close
        return reply
    renderer = job.renderer
    return EventStream(
        _stream_answer(job, stream, held.pop_all()),
        failure=renderer.failure,
        keepalive=renderer.keepalive,
    )


async def collect(job: Job, stream: Stream) -> object:
    """The value of a whole answer."""
    parts = [ChoiceCollector(generation) for generation in job.generations]
    open_choices = len(parts)
    while open_choices:
        for index, event in await stream.take():
            reader = job.readers[index]
            piece = reader.read(event)
            if piece is not None:
                parts[index].add(piece)
            if reader.end is not None:
                open_choices -= 1
    ends = [reader.end for reader in job.readers]
    choices = [part.choice(end) for part, end in zip(parts, ends, strict=True) if end is not None]
    return job.renderer.whole(choices, job.used())


async def _stream_answer(
    job: Job, stream: Stream, resources: ExitStack
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of one answer. Raises RequestError when it fails. Closes `resources` at
    its end, however that comes."""
    with resources:
        chunks = _Chunks(job)
        while chunks.open:
            data, failure = chunks.of(await stream.take())
            if data:
                yield data
            if failure is not None:
                raise failure


class _Chunks:
    """Turns the events of a request into bytes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun = [False] * len(job.readers)
        self.open = len(job.readers)  # choices that have not ended

    def of(self, events: Sequence[tuple[int, Event]]) -> tuple[bytes, RequestError | None]:
        """(bytes, the first failure among the events). What came along with a failure, of any
        choice, was generated and belongs to the client; the stream ends after it."""
        data: list[bytes] = []
        failure: RequestError | None = None
        for index, event in events:
            try:
                data.append(self._of(index, event))
            except RequestError as error:
                failure = failure or error
        return b"".join(data), failure

    def _of(self, index: int, event: Event) -> bytes:
        """Raises RequestError for a failed sequence."""
        renderer, reader = self._job.renderer, self._job.readers[index]
        piece = reader.read(event)
        data = b""
        if not self._begun[index]:
            self._begun[index] = True
            data = renderer.begin(index, reader.reused_prompt_tokens)
        if piece is not None:
            data += renderer.piece(index, piece)
        if reader.end is not None:
            self.open -= 1
            data += renderer.end(index, reader.end, None if self.open else self._job.used())
        return data
