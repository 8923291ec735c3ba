"""What a handler gets and gives: requests, responses and event streams as plain data.

Owns: the vocabulary between `server.py` (bytes) and the handlers (meaning), and the one shape of
error body. Knows no socket and no endpoint.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.http.counters import HttpCounters

JSON = "application/json"
KEEPALIVE = b": keepalive\n\n"  # a comment: every reader of server-sent events skips it

# OpenAI clients read `type`; statuses without an own word are the client's fault or ours.
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Request(msgspec.Struct):
    """One complete request. Header names are lower case; repeated headers are joined by ", "."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    chunked: bool  # the client understands chunked responses (HTTP/1.1)
    keep_alive: bool


class Response(msgspec.Struct):
    """A whole answer. `release` is called once, when its reader is done with it or gone."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    release: Callable[[], None] | None = None


class EventStream(msgspec.Struct):
    """A response whose body is produced piece by piece; the iterator is closed when the reader goes
    away, which is how a handler learns of it.

    A RequestError that the iterator raises before its first piece is answered with its own status,
    unless silence had to be broken before; afterwards `failure` makes the last event of it.
    `keepalive` is sent whenever nothing else was for a while: also before the first piece."""

    chunks: AsyncGenerator[bytes, None]
    failure: Callable[[RequestError], bytes]
    keepalive: bytes = KEEPALIVE
    content_type: str = "text/event-stream; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = (("Cache-Control", "no-cache"),)


class Application(Protocol):
    """What a server serves."""

    counters: HttpCounters

    async def handle(self, request: Request) -> Response | EventStream:
        """Answers one request. Raises nothing that a client could cause."""

    def refuse(self, error: RequestError, path: str) -> Response:
        """The answer to a request that was refused; `path` is "" when it got none."""


class ErrorDetail(msgspec.Struct, omit_defaults=True):
    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ContextLengthExceeded(RequestError):
    """A prompt that leaves no room for a single token. Carries the two numbers (tokens)."""

    def __init__(
        self, prompt_tokens: int, context_tokens: int, param: str, *, at_least: bool = False
    ) -> None:
        self.prompt_tokens, self.context_tokens = prompt_tokens, context_tokens
        super().__init__(
            f"the prompt has {'at least ' if at_least else ''}{prompt_tokens} tokens, the context "
            f"holds {context_tokens} with at least one to generate; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


def error_detail(error: RequestError) -> ErrorDetail:
    """The OpenAI form of an error."""
    kind = _ERROR_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    detail = ErrorDetail(str(error), kind, error.param, error.code)
    if isinstance(error, ContextLengthExceeded):
        detail.n_prompt_tokens, detail.n_ctx = error.prompt_tokens, error.context_tokens
    return detail


def error_response(error: RequestError, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    body = msgspec.json.encode(ErrorBody(error_detail(error)))
    return Response(error.status, body, headers=headers)


def error_event(error: RequestError) -> bytes:
    """The last event of an OpenAI stream that failed after its headers."""
    return b"event: error\ndata: " + msgspec.json.encode(ErrorBody(error_detail(error))) + b"\n\n"


def json_response(value: object, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(value))
