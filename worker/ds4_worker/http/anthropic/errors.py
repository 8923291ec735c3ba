"""Errors as the Messages API words them: every status of ours has one of its types."""

from __future__ import annotations

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.http.messages import ContextLengthExceeded

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorDetail(msgspec.Struct, omit_defaults=True):
    type: str
    message: str
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """`{"type": "error", "error": {...}}`: a body, or the data of an `error` event."""

    error: AnthropicErrorDetail


def anthropic_error(error: RequestError) -> AnthropicError:
    kind = _TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    detail = AnthropicErrorDetail(kind, str(error))
    if isinstance(error, ContextLengthExceeded):
        detail.n_prompt_tokens, detail.n_ctx = error.prompt_tokens, error.context_tokens
    return AnthropicError(detail)
