"""`GET /v1/models` and `/v1/models/{id}`: the served model under each of its names.

One object serves the clients of both APIs: each finds its own fields and ignores the others'.
"""

from __future__ import annotations

import time

import msgspec

from ds4_worker.http.model import ServedModel

_ALWAYS = (
    *("tools", "tool_choice"),
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream"),
    *("n", "logprobs", "top_logprobs", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "response_format", "structured_outputs"),
)


class TopProvider(msgspec.Struct):
    context_length: int
    max_completion_tokens: int
    is_moderated: bool = False


class ModelObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int  # Unix seconds
    owned_by: str = "ds4"
    name: str
    context_length: int
    top_provider: TopProvider
    supported_parameters: list[str]
    # The Messages API's words for the same.
    type: str = "model"
    display_name: str
    created_at: str


class ModelList(msgspec.Struct):
    """There is never another page."""

    data: list[ModelObject]
    first_id: str
    last_id: str
    object: str = "list"
    has_more: bool = False


def describe(model: ServedModel, name: str) -> ModelObject:
    context = model.context_tokens
    frontend = model.frontend
    reasoning = ("reasoning_effort",) if frontend.reasoning is not None else ()
    return ModelObject(
        id=name,
        created=model.created,
        name=frontend.served_id,
        context_length=context,
        top_provider=TopProvider(context, min(model.chat_max_tokens or context, context)),
        supported_parameters=[*_ALWAYS, *reasoning],
        display_name=frontend.served_id,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created)),
    )


def list_models(model: ServedModel) -> ModelList:
    objects = [describe(model, name) for name in model.names]
    return ModelList(objects, objects[0].id, objects[-1].id)
