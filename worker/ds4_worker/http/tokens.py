"""`POST /tokenize`, `POST /detokenize` and `POST /v1/embeddings`.

The two ways in which servers spell tokenizing are both understood. `content` is a bare text, to
which nothing is added unless `add_special` says so. `prompt` is what a completion would be given,
`messages` what a chat would: the special tokens of a prompt belong to it. Embeddings are refused
with a reason: the models served here generate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ds4_common.errors import RequestError
from ds4_worker.http.bodies import decode_body
from ds4_worker.http.chat import read_chat
from ds4_worker.http.messages import Request, Response, json_response
from ds4_worker.http.model import ServedModel
from ds4_worker.http.service import Service
from ds4_worker.http.template import MAX_SECONDS, run_with_deadline


class TokenizeBody(msgspec.Struct, kw_only=True):
    """One of `content`, `prompt` and `messages` (the other fields of a chat belong to the last)."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None  # the same
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class TokenPiece(msgspec.Struct):
    """A token and its bytes: as text, or as numbers where they are no whole characters."""

    id: int
    piece: str | list[int]


class Tokens(msgspec.Struct, kw_only=True):
    tokens: Sequence[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Detokenized(msgspec.Struct):
    """The text under both of its names."""

    content: str
    prompt: str


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None


async def tokenize(service: Service, request: Request) -> Response:
    body = await service.read(request, lambda data: decode_body(data, TokenizeBody))
    model = service.model
    model.resolve(body.model)
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"expected one of content, prompt and messages, got {', '.join(given) or 'none'}",
            param=given[1] if given else "content",
        )
    if body.messages is not None:
        _, conversation = await service.read(request, read_chat)
        ids = (await service.prepare(conversation)).ids
    else:
        ids = await _encode(service, body, given[0])
    return await _in_a_thread(service, lambda: _listed(ids, model, body))


async def _in_a_thread(service: Service, work: Callable[[], Response]) -> Response:
    """Millions of tokens take seconds: others are answered meanwhile, and there is an end to it."""
    late = RequestError(f"the tokens took more than {MAX_SECONDS:g} s to spell; send fewer")
    async with service.preparing:
        return await run_with_deadline(work, late=late)


def _listed(ids: Sequence[int], model: ServedModel, body: TokenizeBody) -> Response:
    spelled = model.tokenizer.token_bytes
    answer = Tokens(tokens=ids, count=len(ids), max_model_len=model.context_tokens)
    if body.with_pieces:
        answer.tokens = [TokenPiece(token, _piece(spelled(token))) for token in ids]
    if body.return_token_strs:
        answer.token_strs = [spelled(token).decode(errors="replace") for token in ids]
    return json_response(answer)


async def _encode(service: Service, body: TokenizeBody, field: str) -> list[int]:
    text = body.content if body.prompt is None else body.prompt
    assert text is not None
    special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    if special is None:
        special = field == "prompt"
    parse = body.parse_special is not False
    encode = service.model.tokenizer.encode
    late = RequestError(f"{field}: took more than {MAX_SECONDS:g} s to tokenize; send less")
    async with service.preparing:
        return await run_with_deadline(
            lambda: encode(text, add_special=special, parse_special=parse), late=late
        )


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(service: Service, request: Request) -> Response:
    body = await service.read(request, lambda data: decode_body(data, DetokenizeBody))
    model = service.model
    model.resolve(body.model)
    return await _in_a_thread(service, lambda: _spelled(body.tokens, model))


def _spelled(tokens: Sequence[int], model: ServedModel) -> Response:
    vocabulary = model.frontend.vocabulary
    for index, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"tokens[{index}]: got {token}, expected a token id below {vocabulary}",
                param=f"tokens[{index}]",
            )
    text = model.tokenizer.decode(tokens).decode(errors="replace")
    return json_response(Detokenized(text, text))


async def embed(service: Service, request: Request) -> Response:
    """Raises RequestError, always."""
    body = await service.read(request, lambda data: decode_body(data, EmbeddingsBody))
    name = service.model.resolve(body.model)
    raise RequestError(
        f"{name} generates text and makes no embeddings; serve an embedding model for this",
        param="model",
        code="embeddings_not_supported",
    )
