"""The serving half of validation: limits, frontend syntax, bindings and extents of programs.

Owns: what the engine and the HTTP side rely on. Same errors as `validate`, which calls this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.op_rules import MAX_EXTENT
from ds4_common.contract.strict import fail

BUNDLE_FORMAT = 1
MODEL_VERSION = 1

# Operations that produce the pending token, and so must declare that they write a device-held one.
_CONSUMERS = {pb.RESUME, pb.DECODE, pb.SPECULATIVE, pb.MIXED}
_PRODUCERS = _CONSUMERS | {pb.INITIALIZE, pb.RESTORE, pb.PREFILL, pb.SCORED_PREFILL}
_COPIED = {
    pb.COPIED_IDS,
    pb.COPIED_COUNT,
    pb.COPIED_MASKS,
    pb.COPIED_GENERATION,
    pb.COPIED_CONSUMED,
}
_MIXED_TOKENS = {pb.PROMPT_TOKENS, pb.PENDING_TOKEN}


def check_serving(serving: pb.ServingContract) -> None:
    """Names, limits, ends of generation and sampling defaults."""
    if not serving.served_id:
        raise fail("serving, served_id", "an empty name", "a name")
    if not serving.cache_identity.isascii():
        raise fail("serving, cache_identity", repr(serving.cache_identity), "ASCII text")
    model = serving.model
    for what, value in (
        ("context_tokens", serving.context_tokens),
        ("vocabulary", model.vocabulary),
        ("input_vocabulary", model.input_vocabulary),
    ):
        if not 1 <= value <= MAX_EXTENT:
            raise fail(f"serving, {what}", value, f"1 to {MAX_EXTENT}")
    if model.input_vocabulary < model.vocabulary:
        raise fail(
            "input_vocabulary", model.input_vocabulary, f"at least the {model.vocabulary} sampled"
        )
    if serving.prefill_tokens > serving.context_tokens:
        raise fail("prefill_tokens", serving.prefill_tokens, f"at most {serving.context_tokens}")
    if not serving.eos_ids:
        raise fail("eos_ids", "none", "at least one")
    for token in serving.eos_ids:
        _check_token("eos_ids", token, model.vocabulary)
    for name in ("bos_id", "eos_id"):
        if model.frontend.HasField(name):
            _check_token(name, getattr(model.frontend, name), model.vocabulary)
    if not all(1 <= width <= 64 for width in serving.speculative_widths):
        raise fail("speculative_widths", list(serving.speculative_widths), "widths from 1 to 64")
    _check_sampling(serving.defaults)


def _check_token(what: str, token: int, vocabulary: int) -> None:
    if token >= vocabulary:
        raise fail(what, token, f"a token below {vocabulary}")


def _check_sampling(defaults: pb.Sampling) -> None:
    for name, low, high in (
        ("temperature", 0.0, 100.0),
        ("top_p", 1e-6, 1.0),
        ("min_p", 0.0, 1.0),
        ("repeat_penalty", 1e-3, 100.0),
    ):
        value = getattr(defaults, name)
        if not math.isfinite(value) or not low <= value <= high:
            raise fail(f"sampling default {name}", value, f"{low:g} to {high:g}")


def check_frontend(frontend: pb.Frontend, resources: Mapping[str, pb.Resource]) -> None:
    """Assets resolve; tool and reasoning syntax fit together."""
    for name, required in (("tokenizer", True), ("chat_template", False)):
        wanted = getattr(frontend, name)
        if not wanted and not required:
            continue
        resource = resources.get(wanted)
        if resource is None or resource.kind != name:
            raise fail(f"frontend, {name}", repr(wanted), f"the id of a {name} resource")
    _check_syntax(
        frontend.tools if frontend.HasField("tools") else None,
        frontend.reasoning if frontend.HasField("reasoning") else None,
    )


# Tool syntaxes whose calls end by themselves; the first also needs no opener.
_OPEN_ENDED = {pb.TOOL_BARE_JSON, pb.TOOL_BRACKET_JSON}
# Reasoning syntaxes that are frames around everything, with the tool syntax of those frames.
_FRAMES = {
    pb.REASONING_XTML_THINK: pb.TOOL_XTML,
    pb.REASONING_RECIPIENT_HEADER: pb.TOOL_RECIPIENT_ATEM,
    pb.REASONING_HARMONY: pb.TOOL_HARMONY,
}


def _check_syntax(tools: pb.ToolConfig | None, reasoning: pb.ReasoningConfig | None) -> None:
    """Delimiters are there, and the two syntaxes read one answer."""
    if tools is not None:
        needs_open = tools.syntax != pb.TOOL_BARE_JSON
        needs_close = tools.syntax not in _OPEN_ENDED
        if (needs_open and not tools.open) or (needs_close and not tools.close):
            wanted = "both" if needs_close else "an opener"
            raise fail("frontend, tools", f"open {tools.open!r}, close {tools.close!r}", wanted)
    if reasoning is not None and reasoning.terminal_marker:
        if tools is None or reasoning.terminal_marker != tools.open:
            raise fail(
                "frontend, terminal_marker",
                repr(reasoning.terminal_marker),
                "the opener of the tool syntax",
            )
    wanted_tools = _FRAMES.get(reasoning.syntax) if reasoning is not None else None
    got_tools = tools.syntax if tools is not None else None
    if wanted_tools is not None and got_tools != wanted_tools:
        got = "no tools" if tools is None else pb.ToolSyntax.Name(tools.syntax)
        raise fail("frontend, tools", got, pb.ToolSyntax.Name(wanted_tools))
    bare_xtml = got_tools == pb.TOOL_XTML and reasoning is None
    if got_tools in _FRAMES.values() and wanted_tools is None and not bare_xtml:
        syntax = next(frames for frames, of_tools in _FRAMES.items() if of_tools == got_tools)
        got = "none" if reasoning is None else pb.ReasoningSyntax.Name(reasoning.syntax)
        raise fail("frontend, reasoning", got, pb.ReasoningSyntax.Name(syntax))
    if reasoning is not None and not (reasoning.open and reasoning.close):
        got = f"open {reasoning.open!r}, close {reasoning.close!r}"
        raise fail("frontend, reasoning", got, "both")


def check_program(
    program: pb.Program,
    buffers: Mapping[str, pb.Buffer],
    states: Mapping[str, pb.StateView],
    producers: Collection[str],
) -> None:
    """One program's bindings, states, pending token and extents."""
    where = f"program {program.name!r}"
    for binding in program.bindings:
        _check_binding(where, binding, buffers)
    sources = _check_sources(where, program)
    access: dict[str, int] = {}
    for entry in program.accesses:
        if entry.state not in states:
            raise fail(f"{where}, access", repr(entry.state), "the name of a state")
        access[entry.state] = entry.access
    _check_pending(where, program, sources, access, states)
    if program.cursor_state and program.cursor_state not in states:
        raise fail(f"{where}, cursor_state", repr(program.cursor_state), "the name of a state")
    _check_extents(where, program, sources, buffers)
    for tuned in program.tuned:
        buffer = buffers.get(tuned.buffer)
        if buffer is None or buffer.space != pb.PERSISTENT:
            raise fail(f"{where}, tuned", repr(tuned.buffer), "the name of a PERSISTENT buffer")
        if tuned.producer not in producers:
            raise fail(f"{where}, producer", repr(tuned.producer), "a tuning executable")


def _check_binding(where: str, binding: pb.ValueBinding, buffers: Mapping[str, pb.Buffer]) -> None:
    where = f"{where}, binding {binding.buffer!r}"
    buffer = buffers.get(binding.buffer)
    if buffer is None or buffer.space != pb.TRANSPORT:
        raise fail(where, "no such buffer", "the name of a TRANSPORT buffer")
    if (binding.source == pb.CONSTANT) != binding.HasField("constant"):
        raise fail(where, f"constant {binding.constant}", "one with source CONSTANT, only there")
    rank = 2 if binding.source == pb.PAGE_TABLE else 1
    if binding.source in (pb.PROMPT_TOKENS, pb.PENDING_TOKEN, pb.POSITIONS, pb.PAGE_TABLE) and (
        len(buffer.shape) != rank or buffer.dtype != pb.I32
    ):
        raise fail(where, list(buffer.shape), f"int32 of rank {rank}")
    if (binding.indexing == pb.SCALAR) != (list(buffer.shape) == [1]):
        raise fail(where, list(buffer.shape), "[1] with SCALAR indexing, only there")


def _check_sources(where: str, program: pb.Program) -> set[int]:
    """Each buffer has one source; only a mixed program fills its tokens from two."""
    by_buffer: dict[str, set[int]] = {}
    count = Counter((binding.buffer, binding.source) for binding in program.bindings)
    for (buffer, source), times in count.items():
        if times > 1:
            raise fail(f"{where}, binding {buffer!r}", "the same source twice", "it once")
        by_buffer.setdefault(buffer, set()).add(source)
    for buffer, sources in by_buffer.items():
        if len(sources) > 1 and not (program.operation == pb.MIXED and sources == _MIXED_TOKENS):
            names = sorted(pb.Source.Name(source) for source in sources)
            raise fail(f"{where}, binding {buffer!r}", names, "one source")
    sources = {binding.source for binding in program.bindings}
    if sources & _COPIED and program.operation != pb.SPECULATIVE:
        raise fail(f"{where}, bindings", "copied tokens", "them in SPECULATIVE only")
    return sources


def _check_pending(
    where: str,
    program: pb.Program,
    sources: set[int],
    access: Mapping[str, int],
    states: Mapping[str, pb.StateView],
) -> None:
    """The pending token lives in one place: a state on the device, or a value the host binds."""
    form = program.WhichOneof("pending")
    if form is None or (form == "pending_host" and not program.pending_host):
        raise fail(f"{where}, pending token", "no form", "pending_state or pending_host = true")
    if form == "pending_host":
        if program.operation in _CONSUMERS and pb.PENDING_TOKEN not in sources:
            raise fail(f"{where}, pending token", "no binding", "one with source PENDING_TOKEN")
        return
    if pb.PENDING_TOKEN in sources:
        raise fail(f"{where}, pending token", "a state and a binding", "one of them")
    state = program.pending_state
    if state not in states:
        raise fail(f"{where}, pending_state", repr(state), "the name of a state")
    held = access.get(state, 0)
    if program.operation in _CONSUMERS and held not in (pb.READ, pb.READ_WRITE):
        raise fail(f"{where}, pending_state", "no read access", "READ or READ_WRITE")
    if program.operation in _PRODUCERS and held not in (pb.WRITE, pb.READ_WRITE):
        raise fail(f"{where}, pending_state", "no write access", "WRITE or READ_WRITE")


def _check_extents(
    where: str, program: pb.Program, sources: set[int], buffers: Mapping[str, pb.Buffer]
) -> None:
    lengths = sources & {pb.QUERY_LENGTH, pb.PREFIX_LIMIT}
    if program.operation != pb.SPECULATIVE:
        if program.draft_tokens or program.confidence_width or pb.PREFIX_LIMIT in sources:
            raise fail(where, "speculative extents", "them in SPECULATIVE only")
        return
    if len(lengths) != 1:
        raise fail(f"{where}, bindings", f"{len(lengths)} length sources", "exactly one")
    if not program.packed_tokens or not program.verify_tokens:
        got = f"W {program.verify_tokens}, P {program.packed_tokens}"
        raise fail(where, got, "both explicit")
    if not program.confidence_width:
        return
    if program.confidence_width != program.draft_tokens:
        raise fail(f"{where}, confidence_width", program.confidence_width, program.draft_tokens)
    storage = buffers.get("proposal_confidence", pb.Buffer())
    shape = list(storage.shape)
    fits = len(shape) == 3 and shape[0] == 2 and shape[2] >= program.draft_tokens
    if storage.dtype != pb.F32 or not fits:
        wanted = f"F32 [2, slots, {program.draft_tokens} or more]"
        raise fail(f"{where}, proposal_confidence", shape, wanted)
