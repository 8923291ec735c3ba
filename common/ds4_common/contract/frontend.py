"""The `frontend` blob: everything the HTTP side of a worker needs, as JSON.

Owns: the record, its bounds, its bytes. The owner derives it from the prepared contract once, so
that a worker's start-up decodes one small JSON document and imports no protobuf.
Refuses: unknown fields, other versions and values out of range, as `ContractError`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from ds4_common.errors import ContractError

if TYPE_CHECKING:
    from ds4_common.contract import prepared_model_pb2 as pb

BLOB_NAME = "frontend"
FORMAT = 1

_Count = Annotated[int, Meta(ge=1)]
_Size = Annotated[int, Meta(ge=0)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request that says nothing gets. `max_tokens` 0: up to the context's end."""

    temperature: Annotated[float, Meta(ge=0)]
    top_k: _Size
    top_p: Annotated[float, Meta(gt=0, le=1)]
    min_p: Annotated[float, Meta(ge=0, le=1)]
    repeat_penalty: Annotated[float, Meta(gt=0)]
    max_tokens: _Size


class ToolSyntax(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How tool calls are written. `syntax` is the enum's name in the contract schema."""

    syntax: str
    open: str
    close: str
    separator: str
    wrap_newlines: bool


class ReasoningSyntax(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How reasoning is delimited. `syntax` is the enum's name in the contract schema."""

    syntax: str
    open: str
    close: str
    wrap_newlines: bool
    terminal_marker: str
    assistant_open: str
    message_end: str


class Frontend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model as its HTTP side sees it. Token texts are "" where the model has no such token."""

    format: int = FORMAT
    served_id: Annotated[str, Meta(min_length=1)]
    aliases: tuple[str, ...]
    fingerprint: str
    context_tokens: _Count
    vocabulary: _Count
    eos_ids: tuple[_TokenId, ...]  # every id that ends a generation, ascending
    bos_id: _TokenId | None
    eos_id: _TokenId | None  # the one that `add_eos` appends
    add_bos: bool
    add_eos: bool
    bos_token: str
    eos_token: str
    chat_template: str | None
    defaults: SamplingDefaults
    page_tokens: _Count
    cache_bytes_per_token_f16: _Size
    cache_bytes_per_token_f32: _Size
    weights_bytes: _Size
    tools: ToolSyntax | None = None
    reasoning: ReasoningSyntax | None = None


def encode_frontend(frontend: Frontend) -> bytes:
    """JSON bytes of the blob."""
    return msgspec.json.encode(frontend)


def parse_frontend(data: bytes | bytearray | memoryview) -> Frontend:
    """Reads a frontend blob. Raises ContractError naming the field that is wrong."""
    try:
        frontend = msgspec.json.decode(data, type=Frontend)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ContractError(
            f"frontend blob ({len(data)} bytes): {error}; "
            "start the owner and the worker from the same version"
        ) from error
    if frontend.format != FORMAT:
        raise ContractError(f"frontend blob: format: got {frontend.format}, expected {FORMAT}")
    for token in (*frontend.eos_ids, frontend.bos_id, frontend.eos_id):
        if token is not None and token >= frontend.vocabulary:
            raise ContractError(
                f"frontend blob: special token: got id {token}, "
                f"expected one below the vocabulary of {frontend.vocabulary}"
            )
    return frontend


def frontend_from_bundle(
    bundle: pb.Bundle, *, chat_template: str | None, bos_token: str, eos_token: str
) -> bytes:
    """Derives the blob from a validated bundle and the texts that the bundle only names."""
    from ds4_common.contract import prepared_model_pb2 as pb

    serving = bundle.serving
    model = serving.model
    defaults = serving.defaults
    elements = _cache_elements_per_token(bundle)
    source = model.frontend
    frontend = Frontend(
        served_id=serving.served_id,
        aliases=tuple(serving.aliases),
        fingerprint=serving.cache_identity.decode("ascii"),
        context_tokens=serving.context_tokens,
        vocabulary=model.vocabulary,
        eos_ids=tuple(sorted(set(serving.eos_ids))),
        bos_id=source.bos_id if source.HasField("bos_id") else None,
        eos_id=source.eos_id if source.HasField("eos_id") else None,
        add_bos=source.add_bos,
        add_eos=source.add_eos,
        bos_token=bos_token,
        eos_token=eos_token,
        chat_template=chat_template,
        defaults=SamplingDefaults(
            temperature=round(defaults.temperature, 6),  # the schema holds float32
            top_k=defaults.top_k,
            top_p=round(defaults.top_p, 6),
            min_p=round(defaults.min_p, 6),
            repeat_penalty=round(defaults.repeat_penalty, 6),
            max_tokens=defaults.max_tokens,
        ),
        page_tokens=model.cache.page_tokens,
        cache_bytes_per_token_f16=2 * elements,
        cache_bytes_per_token_f32=4 * elements,
        weights_bytes=sum(b.bytes for b in bundle.execution.buffers if b.space == pb.WEIGHT),
        tools=_tools(source),
        reasoning=_reasoning(source),
    )
    return encode_frontend(frontend)


def _tools(frontend: pb.Frontend) -> ToolSyntax | None:
    from ds4_common.contract import prepared_model_pb2 as pb

    if not frontend.HasField("tools"):
        return None
    tools = frontend.tools
    return ToolSyntax(
        syntax=pb.ToolSyntax.Name(tools.syntax),
        open=tools.open,
        close=tools.close,
        separator=tools.separator,
        wrap_newlines=tools.wrap_newlines,
    )


def _reasoning(frontend: pb.Frontend) -> ReasoningSyntax | None:
    from ds4_common.contract import prepared_model_pb2 as pb

    if not frontend.HasField("reasoning"):
        return None
    reasoning = frontend.reasoning
    return ReasoningSyntax(
        syntax=pb.ReasoningSyntax.Name(reasoning.syntax),
        open=reasoning.open,
        close=reasoning.close,
        wrap_newlines=reasoning.wrap_newlines,
        terminal_marker=reasoning.terminal_marker,
        assistant_open=reasoning.assistant_open,
        message_end=reasoning.message_end,
    )


def _cache_elements_per_token(bundle: pb.Bundle) -> int:
    """Numbers kept per token of context: every extent of each cache plane but [pages, tokens]."""
    from ds4_common.contract import prepared_model_pb2 as pb

    planes = (b for b in bundle.execution.buffers if b.space == pb.CACHE)
    return sum(math.prod(plane.shape[2:]) for plane in planes)
