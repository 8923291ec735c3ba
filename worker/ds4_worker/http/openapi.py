"""`GET /openapi.json`: every route in OpenAPI 3.1, from the structs that read requests and write
answers, so that it cannot say anything else than they do.

Owns: what the structs do not know: which route takes and gives what, and which errors it has.
Imported by the first request for it; made once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from ds4_worker.http import completions, tokens
from ds4_worker.http.anthropic.body import CountBody, MessagesBody
from ds4_worker.http.anthropic.endpoint import TokenCount
from ds4_worker.http.anthropic.errors import AnthropicError
from ds4_worker.http.anthropic.events import AnthropicMessage, MessageEvent
from ds4_worker.http.chat import ChatBody
from ds4_worker.http.chat_renderer import ChunkChoice, WholeChoice
from ds4_worker.http.health import Health
from ds4_worker.http.messages import ErrorBody
from ds4_worker.http.models import ModelList, ModelObject
from ds4_worker.http.responses.body import ResponsesBody
from ds4_worker.http.responses.objects import ResponseEvent, ResponseObject
from ds4_worker.http.shapes import Answer
from ds4_worker.http.stats import Stats
from ds4_worker.http.text_renderer import TextChoice

_REFERENCE = "#/components/schemas/{name}"
_ERRORS = {
    400: "a field that does not fit, by its path; or a prompt that the context cannot hold",
    401: "wrong or missing API key, where the server has one",
    404: "no such model or path",
    405: "another method is needed",
    408: "the request did not arrive in time",
    413: "the body is larger than the server reads",
    429: "all places are taken; try again",
    500: "the engine failed",
    503: "the model is still loading, or too many clients are connected",
}
_GET_ERRORS = (401, 404, 405, 503)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One route. `choice` is what `Answer.choices` hold; `events` and `chunk`, what a stream of it
    is made of: named events, or further answers with these choices."""

    path: str
    summary: str
    body: Any = None
    answer: Any = None
    choice: Any = None
    chunk: Any = None
    events: Any = None
    error: Any = ErrorBody
    statuses: tuple[int, ...] = (200,)
    content_type: str = "application/json"

    @property
    def method(self) -> str:
        return "get" if self.body is None else "post"


OPERATIONS = (
    Operation(
        path="/v1/chat/completions",
        summary="Chat completions",
        body=ChatBody,
        answer=Answer,
        choice=WholeChoice,
        chunk=ChunkChoice,
    ),
    Operation(
        path="/v1/completions",
        summary="Text completions",
        body=completions.CompletionBody,
        answer=Answer,
        choice=TextChoice,
        chunk=TextChoice,
    ),
    Operation(
        path="/v1/responses",
        summary="Responses",
        body=ResponsesBody,
        answer=ResponseObject,
        events=ResponseEvent,
    ),
    Operation(
        path="/v1/messages",
        summary="Messages",
        body=MessagesBody,
        answer=AnthropicMessage,
        events=MessageEvent,
        error=AnthropicError,
    ),
    Operation(
        path="/v1/messages/count_tokens",
        summary="Tokens that a message would send",
        body=CountBody,
        answer=TokenCount,
        error=AnthropicError,
    ),
    Operation(
        path="/v1/embeddings",
        summary="Refused: models served here generate",
        body=tokens.EmbeddingsBody,
        statuses=(),
    ),
    Operation(
        path="/tokenize",
        summary="Text or messages to token ids",
        body=tokens.TokenizeBody,
        answer=tokens.Tokens,
    ),
    Operation(
        path="/detokenize",
        summary="Token ids to text",
        body=tokens.DetokenizeBody,
        answer=tokens.Detokenized,
    ),
    Operation(path="/v1/models", summary="The served model by its names", answer=ModelList),
    Operation(path="/v1/models/{id}", summary="One of its names", answer=ModelObject),
    Operation(path="/v1/stats", summary="What the worker does at this moment", answer=Stats),
    Operation(
        path="/metrics",
        summary="Prometheus metrics",
        answer=str,
        content_type="text/plain; version=0.0.4; charset=utf-8",
    ),
    Operation(path="/health", summary="Whether it can answer", answer=Health, statuses=(200, 503)),
    Operation(path="/openapi.json", summary="This document", answer=dict[str, Any]),
)


@cache
def document() -> bytes:
    """The document's JSON."""
    types = _types()
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths[operation.path] = {operation.method: _operation(operation, schema_of)}
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "ds4-server", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }
    text = msgspec.json.encode(whole).decode()
    for name in components:
        if "." in name:  # two structs of one name: named after their API instead of their module
            text = text.replace(f'"{name}"', f'"{_short(name)}"')
            text = text.replace(f'/{name}"', f'/{_short(name)}"')
    return text.encode()


def _types() -> list[Any]:
    found: dict[str, Any] = {}
    for operation in OPERATIONS:
        parts = (operation.body, operation.answer, operation.choice, operation.chunk)
        for kind in (*parts, operation.events, operation.error):
            if kind is not None:
                found[str(kind)] = kind
    return list(found.values())


def _short(name: str) -> str:
    *_, package, module, struct = name.split(".")
    api = module if package == "http" else package
    return api.capitalize() + struct


def _operation(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status in operation.statuses:
        content = {operation.content_type: {"schema": _answer(operation, schema_of)}}
        stream = _stream(operation, schema_of)
        if stream is not None and status == 200:
            content["text/event-stream"] = stream
        responses[str(status)] = {"description": "the answer", "content": content}
    for status in _ERRORS if operation.body is not None else _GET_ERRORS:
        content = {"application/json": {"schema": schema_of[str(operation.error)]}}
        refusal = {"description": _ERRORS[status], "content": content}
        responses.setdefault(str(status), refusal)
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        body = {"application/json": {"schema": schema_of[str(operation.body)]}}
        described["requestBody"] = {"required": True, "content": body}
    if "{id}" in operation.path:
        described["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return described


def _answer(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = schema_of[str(operation.answer)]
    if operation.choice is None:
        return schema
    return _with_choices(schema, schema_of[str(operation.choice)])


def _stream(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any] | None:
    """Server-sent events: the schema is that of each one."""
    if operation.events is not None:
        return {"schema": _event(schema_of[str(operation.events)])}
    if operation.chunk is None:
        return None
    chunk = _event(_with_choices(schema_of[str(Answer)], schema_of[str(operation.chunk)]))
    error = _event(schema_of[str(operation.error)])
    done = {"type": "object", "properties": {"data": {"const": "[DONE]"}}}
    return {"schema": {"anyOf": [chunk, done, error]}}


def _event(data: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": text},
        "required": ["data"],
    }


def _with_choices(answer: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    return {"allOf": [answer, {"properties": {"choices": {"items": choice}}}]}
