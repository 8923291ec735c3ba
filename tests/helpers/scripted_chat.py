"""A chat endpoint that answers from a script, inside the real server: for tests of the page."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ds4_common.errors import RequestError
from ds4_worker.http.counters import HttpCounters
from ds4_worker.http.messages import EventStream, Request, Response, error_event
from helpers.fake_server import FakeServer, fake_server

Delta = dict[str, Any]


def said(*pieces: str) -> list[Delta]:
    return [{"content": piece} for piece in pieces]


def thought(*pieces: str) -> list[Delta]:
    return [{"reasoning_content": piece} for piece in pieces]


def called(name: str, *fragments: str, index: int = 0) -> list[Delta]:
    """A tool call, its arguments in fragments."""
    head = {"index": index, "id": f"call_{index}", "type": "function"}
    parts: list[Any] = [{**head, "function": {"name": name, "arguments": ""}}]
    parts += [{"index": index, "function": {"arguments": fragment}} for fragment in fragments]
    return [{"tool_calls": [part]} for part in parts]


@dataclass
class Answer:
    """`held`: the stream waits at its end until `release`. `broken`: it ends without [DONE]."""

    deltas: list[Delta]
    finish_reason: str = "stop"
    refusal: RequestError | None = None
    failure: str | None = None  # an error event in place of the end
    held: bool = False
    broken: bool = False


@dataclass
class Script:
    """An application over the server's own: the answers to come, and the requests that came."""

    server: FakeServer
    counters: HttpCounters
    answers: list[Answer]
    requests: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)  # a reader went away
    _go: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Lets held answers end."""
        self.server.loop.call_soon_threadsafe(self._go.set)

    def refuse(self, error: RequestError, path: str) -> Response:
        return self.server.app.refuse(error, path)

    async def handle(self, request: Request) -> Response | EventStream:
        if request.path != "/v1/chat/completions":
            return await self.server.app.handle(request)
        self.requests.append(json.loads(request.body))
        answer = self.answers.pop(0)
        if answer.refusal is not None:
            return self.refuse(answer.refusal, request.path)
        return EventStream(self._events(answer), error_event)

    async def _events(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        try:
            yield _chunk({"role": "assistant", "content": ""}) + b": waiting\n\n"
            for delta in answer.deltas:
                yield _chunk(delta)
            if answer.held:
                await self._go.wait()
        except (GeneratorExit, asyncio.CancelledError):
            self.left.set()
            raise
        if answer.failure is not None:
            raise RequestError(answer.failure, status=500)
        if not answer.broken:
            n = len(answer.deltas)
            details = {"cached_tokens": 6}
            usage = {"prompt_tokens": 9, "completion_tokens": n, "total_tokens": 9 + n}
            yield _chunk({}, answer.finish_reason)
            last = {"choices": [], "usage": {**usage, "prompt_tokens_details": details}}
            yield b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n"


def _chunk(delta: Delta, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


@contextmanager
def scripted_chat(*answers: Answer, **options: Any) -> Iterator[Script]:
    """`options` go to the server."""
    with fake_server(**options) as server:
        script = Script(server, server.app.counters, list(answers))
        server.server.app = script
        yield script
