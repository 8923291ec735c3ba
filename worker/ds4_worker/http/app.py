"""Routes: which function answers which path, who may ask, and what happens while loading.

Owns: authorization, CORS, the error form of every `RequestError`, and the small endpoints. A worker
listens before its owner has finished loading; until `service` is set every endpoint that needs a
model answers 503, and `/health` also tells how far loading is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Protocol

from ds4_common.errors import RequestError
from ds4_worker.http import chat, completions
from ds4_worker.http.counters import HttpCounters
from ds4_worker.http.health import Health
from ds4_worker.http.messages import EventStream, Request, Response, error_response, json_response
from ds4_worker.http.models import describe, list_models
from ds4_worker.http.origin import refuse_foreign_page
from ds4_worker.http.service import Service

_CORS = (
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Allow-Methods", "GET, POST, OPTIONS"),
    # The asterisk stands for every header but this one (Fetch, section 3.3.3).
    ("Access-Control-Allow-Headers", "Authorization, *"),
)
_MODELS = "/v1/models/"
_PAGE = "/page/"
_KEYLESS = ("/", "/health")  # and the files of the page, which asks for a key when the API does
_MESSAGES = "/v1/messages"  # with its own form of errors

# Endpoints whose modules are imported by the first request for them: module and function.
_LATER = {
    "/v1/responses": ("responses.endpoint", "create"),
    "/v1/messages": ("anthropic.endpoint", "create"),
    "/v1/messages/count_tokens": ("anthropic.endpoint", "count_tokens"),
    "/v1/embeddings": ("tokens", "embed"),
    "/tokenize": ("tokens", "tokenize"),
    "/detokenize": ("tokens", "detokenize"),
}

Route = Callable[[Request], Awaitable[Response | EventStream]]
Api = Callable[[Service, Request], Awaitable[Response | EventStream]]


class OwnerView(Protocol):
    """What /health says of the owner of the weights: alive, gone or replaced, and why."""

    state: str
    detail: str


class App:
    """The handler of a server. `service` appears when the model is ready to answer."""

    def __init__(
        self,
        *,
        api_key: str | None = None,
        cors: bool = False,
        pid: int = 0,
        owner: OwnerView | None = None,
    ) -> None:
        self.service: Service | None = None
        self.loading_detail = ""
        self.counters = HttpCounters()
        self._api_key = None if api_key is None else api_key.encode()
        self._cors = _CORS if cors else ()
        self._open = api_key is None and not cors  # to every program, not to every web page
        self._pid = pid
        self._owner = owner
        self._routes: dict[str, dict[str, Route]] = {
            "/": {"GET": self._page},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/openapi.json": {"GET": self._openapi},
            "/v1/models": {"GET": self._models},
            "/v1/stats": {"GET": self._stats},
            "/v1/chat/completions": {"POST": self._api(chat.answer)},
            "/v1/completions": {"POST": self._api(completions.answer)},
            **{path: {"POST": self._later(*place)} for path, place in _LATER.items()},
        }

    async def handle(self, request: Request) -> Response | EventStream:
        """Answers one request. Every `RequestError` becomes an error body here."""
        try:
            reply = await self._dispatch(request)
        except RequestError as error:
            return self.refuse(error, request.path)
        reply.headers = (*reply.headers, *self._cors)
        return reply

    def refuse(self, error: RequestError, path: str) -> Response:
        """The error body of a refused request, whoever refused it."""
        retry = (("Retry-After", "1"),) if error.status in (429, 503) else ()
        self.counters.refused(error.status)
        reply = _error_response(error, path)
        reply.headers = (*retry, *self._cors)
        return reply

    async def _dispatch(self, request: Request) -> Response | EventStream:
        if request.method == "OPTIONS":
            return Response(204, b"")
        path = request.path
        methods = self._routes.get(path)
        if methods is None and path.startswith(_MODELS):
            methods = {"GET": self._model}
        if methods is None and path.startswith(_PAGE):
            methods = {"GET": self._page}
        if methods is None:
            raise RequestError(f"no such endpoint: {path}", status=404, code="unknown_endpoint")
        if self._open and request.method == "POST":
            refuse_foreign_page(request.headers)
        if not (path in _KEYLESS or path.startswith(_PAGE)):
            self._authorize(request)
        method = "GET" if request.method == "HEAD" else request.method
        route = methods.get(method)
        if route is None:
            allowed = ", ".join(methods)
            refusal = RequestError(
                f"{path}: method {request.method} is not allowed, use {allowed}",
                status=405,
                code="method_not_allowed",
            )
            reply = _error_response(refusal, path)
            reply.headers = (("Allow", allowed),)
            self.counters.refused(refusal.status)
            return reply
        return await route(request)

    def _authorize(self, request: Request) -> None:
        if self._api_key is None:
            return
        from hmac import compare_digest  # constant time; loads OpenSSL, so only where it is used

        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")
        # Header text is latin-1, so this gives back the bytes that were sent.
        if given is None or not compare_digest(given.encode("latin-1"), self._api_key):
            raise RequestError(
                "wrong or missing API key; send it as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )

    def _ready(self) -> Service:
        if self.service is None:
            raise RequestError(
                f"the model is still loading{self.loading_detail and ': '}{self.loading_detail}",
                status=503,
                code="loading",
            )
        return self.service

    async def _health(self, request: Request) -> Response:
        service = self.service
        if service is None:
            body = Health("loading", detail=self.loading_detail, pid=self._pid)
            return json_response(body, 503)
        stats = service.engine.stats
        body = Health(
            service.engine.state,
            model=service.model.names[0],
            pid=self._pid,
            banks=service.model.banks,
            context_tokens=service.model.context_tokens,
            running=stats.running,
            waiting=stats.waiting,
        )
        if self._owner is not None:
            body.owner, body.detail = self._owner.state, self._owner.detail
        return json_response(body, 200 if service.engine.state == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        service = self.service

        def render() -> bytes:
            from ds4_worker.http import metrics

            if service is None:
                return metrics.render(metrics.Sources(self.counters))
            sources = metrics.Sources(
                self.counters, service.engine.stats, service.admission, service.grammars.stats,
                service.model.context_tokens,
            )  # fmt: skip
            return metrics.render(sources)

        body = await asyncio.to_thread(render)
        return Response(200, body, "text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, request: Request) -> Response:
        def render() -> bytes:
            from ds4_worker.http import openapi

            return openapi.document()

        return Response(200, await asyncio.to_thread(render))

    async def _page(self, request: Request) -> Response:
        from ds4_worker.http import page

        return page.answer(request)

    async def _stats(self, request: Request) -> Response:
        from ds4_worker.http import stats

        watched = self._owner
        owner = stats.Owner(watched.state, watched.detail) if watched else stats.Owner()
        return json_response(stats.collect(self._ready(), owner, self._pid))

    async def _models(self, request: Request) -> Response:
        model = self._ready().model
        return json_response(list_models(model))

    async def _model(self, request: Request) -> Response:
        from urllib.parse import unquote

        model = self._ready().model
        return json_response(describe(model, model.resolve(unquote(request.path[len(_MODELS) :]))))

    def _api(self, answer: Api) -> Route:
        """A route that needs a model."""

        async def route(request: Request) -> Response | EventStream:
            return await answer(self._ready(), request)

        return route

    def _later(self, module: str, function: str) -> Route:
        """The same, of a module that is imported when it is first asked for."""

        async def answer(service: Service, request: Request) -> Response | EventStream:
            api: Api = getattr(import_module(f"ds4_worker.http.{module}"), function)
            return await api(service, request)

        return self._api(answer)


def _error_response(error: RequestError, path: str) -> Response:
    """In the form of the API that the path belongs to."""
    if not path.startswith(_MESSAGES):
        return error_response(error)
    from ds4_worker.http.anthropic.errors import anthropic_error

    return json_response(anthropic_error(error), error.status)
