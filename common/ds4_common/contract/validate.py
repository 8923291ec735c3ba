"""Refuses a prepared contract that is not consistent in itself.

Owns: names, versions, storage, programs and their operands. Run by the loader on what a recipe
wrote, and by whoever lowers a contract that came from elsewhere. Every refusal is a ContractError
that names the object, what was got and what was expected. `serving_rules` holds the serving and
syntax half, `op_rules` the ops, `strict` the wire format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Protocol, TypeVar

from ds4_common.allocation import Layout
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.op_rules import MAX_EXTENT, check_op, describe
from ds4_common.contract.serving_rules import (
    BUNDLE_FORMAT,
    MODEL_VERSION,
    check_frontend,
    check_program,
    check_serving,
)
from ds4_common.contract.strict import check_known, fail, parse_bundle
from ds4_common.errors import UnsupportedModel
from ds4_common.gguf.types import GgmlType, block_bytes, block_weights
from ds4_common.quants import ALIGNED_LAYOUTS, layout_bytes

__all__ = ["BUNDLE_FORMAT", "MODEL_VERSION", "parse_bundle", "validate"]

_RESOURCE_KINDS = ("allocation", "tokenizer", "chat_template")
_INDEXED = {pb.I32: 4, pb.I64: 8, pb.U32: 4, pb.U64: 8, pb.F32: 4, pb.F16: 2, pb.BF16: 2, pb.U8: 1}
_GGML_TYPES = frozenset(int(ggml_type) for ggml_type in GgmlType)
_LAYOUTS = frozenset(int(layout) for layout in Layout)
_OTHER_SIZES = {Layout.IQ2_PLANES, *ALIGNED_LAYOUTS.values()}


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


def validate(bundle: pb.Bundle) -> None:
    """Raises ContractError unless an executor may run `bundle` as it is."""
    check_known(bundle, "bundle")
    for what, got, version in (
        ("format", bundle.format, BUNDLE_FORMAT),
        ("model version", bundle.serving.model.version, MODEL_VERSION),
    ):
        if got != version:
            raise fail(what, got, version)
    resources = _resources(bundle)
    buffers = _by_name("buffer", bundle.execution.buffers)
    for buffer in buffers.values():
        _check_buffer(buffer, resources)
    check_serving(bundle.serving)
    check_frontend(bundle.serving.model.frontend, resources)
    _check_cache(bundle, buffers)
    states = _by_name("state", bundle.serving.model.states)
    for state in states.values():
        _check_state(state, buffers)
    _check_programs(bundle, buffers, states)


def _by_name(what: str, items: Iterable[N]) -> dict[str, N]:
    found: dict[str, N] = {}
    for item in items:
        if not item.name:
            raise fail(what, "an empty name", "a name")
        if item.name in found:
            raise fail(f"{what} {item.name!r}", "two of that name", "one")
        found[item.name] = item
    return found


def _resources(bundle: pb.Bundle) -> dict[str, pb.Resource]:
    found: dict[str, pb.Resource] = {}
    for resource in bundle.resources:
        where = f"resource {resource.id!r}"
        if not resource.id or resource.id in found:
            raise fail(where, "an empty or repeated id", "a unique id")
        if resource.kind not in _RESOURCE_KINDS:
            raise fail(where, f"kind {resource.kind!r}", f"one of {', '.join(_RESOURCE_KINDS)}")
        number = resource.id.removeprefix("alloc:")
        if resource.kind == "allocation" and not (
            resource.id.startswith("alloc:") and number.isascii() and number.isdecimal()
        ):
            raise fail(where, "an id of another form", "alloc:<number>")
        if len(resource.sha256) not in (0, 32):
            raise fail(f"{where}, sha256", f"{len(resource.sha256)} bytes", "32 or none")
        found[resource.id] = resource
    return found


def _check_buffer(buffer: pb.Buffer, resources: Mapping[str, pb.Resource]) -> None:
    where = f"buffer {buffer.name!r}"
    blocks, weight = buffer.dtype == pb.GGML_BLOCKS, buffer.space == pb.WEIGHT
    if blocks != weight:
        raise fail(where, describe(buffer), "GGML_BLOCKS in WEIGHT and nowhere else")
    if not 1 <= len(buffer.shape) <= 4:
        raise fail(f"{where}, shape", list(buffer.shape), "one to four extents")
    fixed = buffer.shape if weight or buffer.space == pb.PERSISTENT else buffer.shape[1:]
    if any(not 1 <= extent <= MAX_EXTENT for extent in fixed):
        raise fail(f"{where}, shape", list(buffer.shape), f"extents from 1 to {MAX_EXTENT}")
    if buffer.shape[0] > MAX_EXTENT:
        raise fail(f"{where}, shape", list(buffer.shape), f"extents up to {MAX_EXTENT}")
    if weight:
        _check_weight(buffer, resources)
    elif buffer.resource or buffer.offset or buffer.ggml_type or buffer.layout or buffer.bytes:
        raise fail(where, f"weight fields in {describe(buffer)}", "them in WEIGHT only")


def _check_weight(buffer: pb.Buffer, resources: Mapping[str, pb.Resource]) -> None:
    where = f"weight {buffer.name!r}"
    if buffer.ggml_type not in _GGML_TYPES:
        raise fail(f"{where}, ggml_type", buffer.ggml_type, "a ggml type")
    if buffer.layout not in _LAYOUTS:
        raise fail(f"{where}, layout", buffer.layout, "a known layout")
    per_block = block_weights(buffer.ggml_type)
    if buffer.shape[-1] % per_block:
        raise fail(f"{where}, row width", buffer.shape[-1], f"a multiple of {per_block}")
    blocks = buffer.shape[-1] // per_block
    for extent in buffer.shape[:-1]:
        blocks *= extent
    size = blocks * block_bytes(buffer.ggml_type)
    if buffer.layout in (Layout.RAW, Layout.X8) and buffer.bytes != size:
        raise fail(f"{where}, bytes", buffer.bytes, size)
    if not buffer.bytes:
        raise fail(f"{where}, bytes", 0, "at least 1")
    if buffer.layout in _OTHER_SIZES:
        rows = prod(buffer.shape[:-1])
        try:
            size = layout_bytes(buffer.ggml_type, Layout(buffer.layout), rows, buffer.shape[-1])
        except (ValueError, UnsupportedModel) as error:
            raise fail(f"{where}, layout", error, "one of its type and shape") from error
        if buffer.bytes != size:
            raise fail(f"{where}, bytes", buffer.bytes, size)
    held = resources.get(buffer.resource)
    if held is None or held.kind != "allocation":
        raise fail(f"{where}, resource", repr(buffer.resource), "the id of an allocation")
    if buffer.offset + buffer.bytes > held.bytes:
        end = buffer.offset + buffer.bytes
        raise fail(f"{where}, end", f"byte {end}", f"at most {held.bytes} in {held.id}")


def _check_cache(bundle: pb.Bundle, buffers: Mapping[str, pb.Buffer]) -> None:
    cache = bundle.serving.model.cache
    if not 1 <= cache.page_tokens <= 1 << 16:
        raise fail("cache, page_tokens", cache.page_tokens, "1 to 65536")
    claimed: set[str] = set()
    for i, history in enumerate(cache.histories):
        where = f"cache history {i}"
        if history.kind in (pb.PAGED_KV, pb.PAGED_LATENT, pb.SLIDING_WINDOW, pb.RECURRENT):
            if not history.planes:
                raise fail(f"{where}, planes", "none", "at least one")
            per_record = history.tokens_per_record
            if not per_record or cache.page_tokens % per_record:
                wanted = f"a divisor of the page of {cache.page_tokens} tokens"
                raise fail(f"{where}, tokens_per_record", per_record, wanted)
        sliding = history.kind == pb.SLIDING_WINDOW
        if sliding != bool(history.window_tokens) or history.window_tokens > MAX_EXTENT:
            wanted = f"1 to {MAX_EXTENT} in a SLIDING_WINDOW, 0 elsewhere"
            raise fail(f"{where}, window_tokens", history.window_tokens, wanted)
        for name in history.planes:
            plane = buffers.get(name)
            if plane is None or plane.space != pb.CACHE:
                raise fail(f"{where}, plane", repr(name), "the name of a CACHE buffer")
            if name in claimed:
                raise fail(f"{where}, plane", f"{name!r} twice", "each plane once")
            records = cache.page_tokens // max(1, history.tokens_per_record)
            if len(plane.shape) != 4 or plane.shape[0] != 0 or plane.shape[1] != records:
                raise fail(f"{where}, plane", describe(plane), f"[0, {records}, heads, dim]")
            if plane.dtype not in (pb.F16, pb.F32):
                raise fail(f"{where}, plane", describe(plane), "F16 or F32")
            claimed.add(name)
    for buffer in buffers.values():
        if buffer.space == pb.CACHE and buffer.name not in claimed:
            raise fail(f"buffer {buffer.name!r}", "no history", "a history that names it")
    pages = -(-bundle.serving.context_tokens // cache.page_tokens)
    for table in cache.page_tables:
        buffer = buffers.get(table.buffer, pb.Buffer())
        if list(buffer.shape) != [0, pages] or buffer.dtype != pb.I32:
            raise fail(f"page table {table.buffer!r}", describe_or(buffer), f"I32 [0, {pages}]")


def describe_or(buffer: pb.Buffer) -> str:
    """Like `describe`, for a name that found no buffer."""
    return describe(buffer) if buffer.name else "no such buffer"


def _check_state(state: pb.StateView, buffers: Mapping[str, pb.Buffer]) -> None:
    where = f"state {state.name!r}"
    buffer = buffers.get(state.buffer)
    if buffer is None or buffer.space != pb.PERSISTENT:
        raise fail(f"{where}, buffer", repr(state.buffer), "the name of a PERSISTENT buffer")
    size = _INDEXED[buffer.dtype]
    for extent in buffer.shape:
        size *= extent
    rows = buffer.shape[0]
    end = state.offset + (rows - 1) * state.row_stride + state.row_bytes
    if not state.row_bytes or state.row_stride < state.row_bytes or end > size:
        got = f"offset {state.offset}, stride {state.row_stride}, row {state.row_bytes}"
        raise fail(where, got, f"{rows} disjoint rows within {size} bytes")


def _check_programs(
    bundle: pb.Bundle,
    buffers: Mapping[str, pb.Buffer],
    states: Mapping[str, pb.StateView],
) -> None:
    execution = bundle.execution
    if not 1 <= execution.frames <= 2:
        raise fail("execution, frames", execution.frames, "1 or 2")
    programs = _by_name("program", bundle.serving.model.programs)
    executables = _by_name("executable", execution.programs)
    tuning = _by_name("tuning executable", execution.tuning)
    if programs.keys() != executables.keys():
        raise fail("executables", sorted(executables), f"those of the programs: {sorted(programs)}")
    offered = {program.operation for program in programs.values()}
    if pb.MIXED not in offered and not {pb.PREFILL, pb.DECODE} <= offered:
        names = sorted(pb.Operation.Name(operation) for operation in offered)
        raise fail("programs", names, "MIXED, or PREFILL and DECODE")
    for program in programs.values():
        check_program(program, buffers, states, tuning.keys())
    for name, executable in executables.items():
        sources: dict[str, set[int]] = {}
        for binding in programs[name].bindings:
            sources.setdefault(binding.buffer, set()).add(binding.source)
        _check_executable(executable, bundle, buffers, sources)


def _check_executable(
    executable: pb.Executable,
    bundle: pb.Bundle,
    buffers: Mapping[str, pb.Buffer],
    sources: Mapping[str, set[int]],
) -> None:
    where = f"program {executable.name!r}"
    if executable.WhichOneof("body") != "ops":
        body = executable.WhichOneof("body") or "no body"
        raise fail(where, body, "a list of ops")
    completion = bundle.execution.completion
    vocabulary = bundle.serving.model.vocabulary
    row_kinds: dict[str, str] = {}
    for i, op in enumerate(executable.ops.ops):
        check_op(f"{where}, op {i}", op, buffers, sources, row_kinds)
        for name in op.out:
            if name in sources:
                raise fail(f"{where}, op {i}, output", repr(name), "a buffer no host value feeds")
    if row_kinds.get(completion.buffer) != "wanted":
        raise fail(
            f"{where}, completion buffer", repr(completion.buffer), "written for the wanted rows"
        )
    width = buffers[completion.buffer].shape[1]
    if not width == completion.row_words == vocabulary or completion.max_tokens < 1:
        got = f"{width} columns, {completion.row_words} row words, {completion.max_tokens} tokens"
        raise fail(f"{where}, completion", got, f"{vocabulary}, {vocabulary}, at least 1")
