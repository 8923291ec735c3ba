"""Every guard of the contract's validation refuses what it guards against, and names it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.validate import validate
from helpers.bundles import Refusal, both, buffer, check_refusal, op, program, valid_bundle


def add_state(bundle: pb.Bundle, **changes: Any) -> None:
    """A persistent buffer of four rows of 16 bytes and a view of all of them."""
    bundle.execution.buffers.add(name="kept", dtype=pb.F32, space=pb.PERSISTENT, shape=[4, 4])
    fields: dict[str, Any] = {"buffer": "kept", "row_stride": 16, "row_bytes": 16}
    bundle.serving.model.states.add(name="state", **(fields | changes))


def hold_pending(bundle: pb.Bundle, access: pb.Access, name: str = "state") -> None:
    """The pending token moves from the host into a state."""
    add_state(bundle)
    step = program(bundle)
    step.pending_state = name
    step.accesses.add(state="state", access=access)
    kept = [b for b in step.bindings if b.source != pb.PENDING_TOKEN]
    del step.bindings[:]
    step.bindings.extend(kept)


def speculative(bundle: pb.Bundle, *sources: pb.Source, **extents: int) -> None:
    """A second program of that operation, with the length sources given."""
    second = bundle.serving.model.programs.add()
    second.CopyFrom(program(bundle))
    second.name = "draft"
    second.operation = pb.SPECULATIVE
    del second.bindings[0]
    for source in sources:
        name = f"lengths{source}"
        bundle.execution.buffers.add(name=name, dtype=pb.I32, space=pb.TRANSPORT, shape=[0])
        second.bindings.add(buffer=name, source=source, indexing=pb.ACTIVE_ROW)
    for name, value in extents.items():
        setattr(second, name, value)
    executable = bundle.execution.programs.add()
    executable.CopyFrom(bundle.execution.programs[0])
    executable.name = "draft"


def bind_output(bundle: pb.Bundle) -> None:
    """The host feeds what the first op writes."""
    bundle.execution.buffers.add(name="more", dtype=pb.F32, space=pb.TRANSPORT, shape=[0, 64])
    program(bundle).bindings.add(buffer="more", source=pb.SEED, indexing=pb.ACTIVE_ROW)
    op(bundle, "embed").out[0] = "more"


def bind(bundle: pb.Bundle, shape: list[int], **fields: Any) -> None:
    """One more transport buffer with a host value."""
    bundle.execution.buffers.add(name="more", dtype=pb.I32, space=pb.TRANSPORT, shape=shape)
    program(bundle).bindings.add(buffer="more", **fields)


REFUSALS: list[Refusal] = [
    # versions, names, resources
    ("format", lambda b: setattr(b, "format", 2), "format: got 2, expected 1"),
    ("version", lambda b: setattr(b.serving.model, "version", 9), "model version: got 9"),
    ("buffer without name", lambda b: setattr(b.execution.buffers[0], "name", ""), "empty name"),
    (
        "two buffers of one name",
        lambda b: b.execution.buffers.append(b.execution.buffers[0]),
        "buffer 'tokens': got two of that name",
    ),
    (
        "two resources of one id",
        lambda b: b.resources.append(b.resources[0]),
        "resource 'alloc:0': got an empty or repeated id",
    ),
    (
        "resource kind",
        lambda b: setattr(b.resources[0], "kind", "blob"),
        "kind 'blob', expected one of allocation, tokenizer, chat_template",
    ),
    ("allocation id", lambda b: setattr(b.resources[0], "id", "alloc:x"), "alloc:<number>"),
    ("sha256", lambda b: setattr(b.resources[0], "sha256", b"x" * 31), "got 31 bytes"),
    # buffers
    (
        "blocks outside weights",
        lambda b: setattr(buffer(b, "x"), "dtype", pb.GGML_BLOCKS),
        "GGML_BLOCKS in WEIGHT and nowhere else",
    ),
    ("no shape", lambda b: buffer(b, "x").ClearField("shape"), "expected one to four extents"),
    ("zero extent", lambda b: buffer(b, "x").shape.append(0), "buffer 'x', shape"),
    (
        "huge extent",
        lambda b: buffer(b, "x").shape.__setitem__(0, 1 << 60),
        "buffer 'x', shape: got [1152921504606846976, 64]",
    ),
    ("offset of scratch", lambda b: setattr(buffer(b, "x"), "offset", 4), "WEIGHT only"),
    ("ggml type", lambda b: setattr(buffer(b, "output.weight"), "ggml_type", 99), "ggml_type"),
    ("layout", lambda b: setattr(buffer(b, "output.weight"), "layout", 99), "layout: got 99"),
    (
        "row width",
        lambda b: buffer(b, "output.weight").shape.__setitem__(1, 33),
        "row width: got 33, expected a multiple of 32",
    ),
    ("bytes", lambda b: setattr(buffer(b, "output.weight"), "bytes", 8), "bytes: got 8, expected"),
    (
        "no bytes",
        both(
            lambda b: setattr(buffer(b, "output.weight"), "layout", 5),
            lambda b: buffer(b, "output.weight").ClearField("bytes"),
        ),
        "bytes: got 0, expected at least 1",
    ),
    (
        "weight without allocation",
        lambda b: setattr(buffer(b, "output.weight"), "resource", "tokenizer"),
        "expected the id of an allocation",
    ),
    (
        "weight beyond its allocation",
        lambda b: setattr(buffer(b, "output.weight"), "offset", 1 << 40),
        "weight 'output.weight', end: got byte",
    ),
    # serving
    ("served id", lambda b: b.serving.ClearField("served_id"), "served_id"),
    (
        "cache identity",
        lambda b: setattr(b.serving, "cache_identity", b"\xff"),
        "cache_identity: got b'\\xff', expected ASCII text",
    ),
    ("no context", lambda b: b.serving.ClearField("context_tokens"), "context_tokens: got 0"),
    ("vocabulary", lambda b: setattr(b.serving.model, "vocabulary", 0), "vocabulary: got 0"),
    (
        "input vocabulary",
        lambda b: setattr(b.serving.model, "input_vocabulary", 5),
        "input_vocabulary: got 5, expected at least the 320 sampled",
    ),
    (
        "prefill beyond context",
        lambda b: setattr(b.serving, "prefill_tokens", 257),
        "prefill_tokens: got 257, expected at most 256",
    ),
    ("no ends", lambda b: b.serving.ClearField("eos_ids"), "eos_ids: got none"),
    ("end beyond vocabulary", lambda b: b.serving.eos_ids.append(320), "eos_ids: got 320"),
    ("bos", lambda b: setattr(b.serving.model.frontend, "bos_id", 999), "bos_id: got 999"),
    ("eos", lambda b: setattr(b.serving.model.frontend, "eos_id", 999), "eos_id: got 999"),
    ("widths", lambda b: b.serving.speculative_widths.append(0), "speculative_widths"),
    ("NaN", lambda b: setattr(b.serving.defaults, "temperature", math.nan), "got nan"),
    ("top_p", lambda b: setattr(b.serving.defaults, "top_p", 0.0), "default top_p: got 0"),
    ("min_p", lambda b: setattr(b.serving.defaults, "min_p", 1.5), "default min_p"),
    (
        "penalty",
        lambda b: setattr(b.serving.defaults, "repeat_penalty", 0.0),
        "default repeat_penalty",
    ),
    # frontend
    (
        "tokenizer",
        lambda b: setattr(b.serving.model.frontend, "tokenizer", "alloc:0"),
        "expected the id of a tokenizer resource",
    ),
    (
        "template",
        lambda b: setattr(b.serving.model.frontend, "chat_template", "nothing"),
        "expected the id of a chat_template resource",
    ),
    (
        "tools without tags",
        lambda b: b.serving.model.frontend.tools.MergeFrom(pb.ToolConfig(syntax=pb.TOOL_DSML)),
        "frontend, tools: got open '', close ''",
    ),
    (
        "terminal marker",
        lambda b: b.serving.model.frontend.reasoning.MergeFrom(
            pb.ReasoningConfig(syntax=pb.REASONING_THINK_TAGS, terminal_marker="<x>")
        ),
        "terminal_marker: got '<x>', expected the opener of the tool syntax",
    ),
    (
        "XTML reasoning without XTML tools",
        lambda b: b.serving.model.frontend.reasoning.MergeFrom(
            pb.ReasoningConfig(syntax=pb.REASONING_XTML_THINK)
        ),
        "got no tools, expected TOOL_XTML",
    ),
    (
        "recipient header without ATEM",
        lambda b: b.serving.model.frontend.MergeFrom(
            pb.Frontend(
                tools=pb.ToolConfig(syntax=pb.TOOL_DSML, open="<", close=">"),
                reasoning=pb.ReasoningConfig(syntax=pb.REASONING_RECIPIENT_HEADER),
            )
        ),
        "got TOOL_DSML, expected TOOL_RECIPIENT_ATEM",
    ),
    # cache
    ("page tokens", lambda b: setattr(b.serving.model.cache, "page_tokens", 0), "page_tokens"),
    (
        "no planes",
        lambda b: b.serving.model.cache.histories[0].ClearField("planes"),
        "cache history 0, planes: got none",
    ),
    (
        "ratio",
        lambda b: setattr(b.serving.model.cache.histories[0], "tokens_per_record", 0),
        "tokens_per_record: got 0",
    ),
    (
        "plane name",
        lambda b: b.serving.model.cache.histories[0].planes.append("nothing"),
        "plane: got 'nothing', expected the name of a CACHE buffer",
    ),
    (
        "plane twice",
        lambda b: b.serving.model.cache.histories[0].planes.append("cache.0.k"),
        "got 'cache.0.k' twice",
    ),
    (
        "plane geometry",
        lambda b: setattr(b.serving.model.cache, "page_tokens", 32),
        "expected [0, 32, heads, dim]",
    ),
    ("plane dtype", lambda b: setattr(buffer(b, "cache.0.v"), "dtype", pb.U8), "F16 or F32"),
    (
        "unclaimed plane",
        lambda b: b.serving.model.cache.histories[0].planes.pop(),
        "buffer 'cache.0.v': got no history",
    ),
    (
        "page table name",
        lambda b: setattr(b.serving.model.cache.page_tables[0], "buffer", "nothing"),
        "page table 'nothing': got no such buffer",
    ),
    (
        "page table geometry",
        lambda b: setattr(b.serving, "context_tokens", 1000),
        "page table 'page_table'",
    ),
    # states
    ("state buffer", lambda b: add_state(b, buffer="x"), "the name of a PERSISTENT buffer"),
    ("state rows", lambda b: add_state(b, row_stride=8), "state 'state': got offset 0, stride 8"),
    ("state end", lambda b: add_state(b, offset=1), "4 disjoint rows within 64 bytes"),
    ("state without bytes", lambda b: add_state(b, row_bytes=0), "row 0"),
    # programs
    ("frames", lambda b: setattr(b.execution, "frames", 3), "frames: got 3"),
    (
        "program names",
        lambda b: setattr(program(b), "name", "other"),
        "executables: got ['step'], expected those of the programs: ['other']",
    ),
    (
        "no way to decode",
        both(
            lambda b: setattr(program(b), "operation", pb.PREFILL),
            lambda b: program(b).bindings.pop(1),
        ),
        "programs: got ['PREFILL'], expected MIXED, or PREFILL and DECODE",
    ),
    (
        "binding name",
        lambda b: setattr(program(b).bindings[0], "buffer", "x"),
        "binding 'x': got no such buffer",
    ),
    (
        "constant without value",
        lambda b: setattr(program(b).bindings[0], "source", pb.CONSTANT),
        "expected one with source CONSTANT",
    ),
    (
        "binding rank",
        lambda b: setattr(program(b).bindings[4], "source", pb.POSITIONS),
        "expected int32 of rank 1",
    ),
    (
        "scalar that is none",
        lambda b: setattr(program(b).bindings[2], "indexing", pb.SCALAR),
        "[1] with SCALAR indexing",
    ),
    (
        "vector of one scalar",
        lambda b: bind(b, [1], source=pb.LIVE_ROWS, indexing=pb.ACTIVE_ROW),
        "[1] with SCALAR indexing",
    ),
    (
        "one source twice",
        lambda b: program(b).bindings.append(program(b).bindings[2]),
        "binding 'positions': got the same source twice",
    ),
    (
        "two sources for one buffer",
        lambda b: setattr(program(b).bindings[3], "buffer", "positions"),
        "got ['POSITIONS', 'SLOT'], expected one source",
    ),
    (
        "copied tokens",
        lambda b: bind(b, [0], source=pb.COPIED_COUNT, indexing=pb.ACTIVE_ROW),
        "got copied tokens, expected them in SPECULATIVE only",
    ),
    (
        "access to nothing",
        lambda b: program(b).accesses.add(state="nothing", access=pb.READ),
        "access: got 'nothing'",
    ),
    ("no pending form", lambda b: program(b).ClearField("pending_host"), "pending token: got no"),
    ("false form", lambda b: setattr(program(b), "pending_host", False), "pending token: got no"),
    ("pending binding", lambda b: program(b).bindings.pop(1), "one with source PENDING_TOKEN"),
    (
        "two pending forms",
        lambda b: setattr(program(b), "pending_state", "state"),
        "got a state and a binding",
    ),
    ("pending state", lambda b: hold_pending(b, pb.READ_WRITE, "nothing"), "'nothing', expected"),
    ("unreadable pending state", lambda b: hold_pending(b, pb.WRITE), "got no read access"),
    ("unwritten pending state", lambda b: hold_pending(b, pb.READ), "got no write access"),
    ("cursor", lambda b: setattr(program(b), "cursor_state", "nothing"), "cursor_state: got"),
    ("draft extents", lambda b: setattr(program(b), "draft_tokens", 1), "speculative extents"),
    (
        "tuned buffer",
        lambda b: program(b).tuned.add(buffer="x", producer="p"),
        "tuned: got 'x', expected the name of a PERSISTENT buffer",
    ),
    (
        "tuned producer",
        both(add_state, lambda b: program(b).tuned.add(buffer="kept", producer="p")),
        "producer: got 'p', expected a tuning executable",
    ),
    # speculation
    ("no length source", lambda b: speculative(b, packed_tokens=4), "0 length sources"),
    (
        "two length sources",
        lambda b: speculative(b, pb.QUERY_LENGTH, pb.PREFIX_LIMIT, packed_tokens=4),
        "2 length sources, expected exactly one",
    ),
    ("no packed extent", lambda b: speculative(b, pb.QUERY_LENGTH), "W 1, P 0, expected both"),
    (
        "confidence width",
        lambda b: speculative(
            b, pb.QUERY_LENGTH, packed_tokens=4, draft_tokens=2, confidence_width=3
        ),
        "confidence_width: got 3, expected 2",
    ),
    (
        "confidence storage",
        lambda b: speculative(
            b, pb.QUERY_LENGTH, packed_tokens=4, draft_tokens=2, confidence_width=2
        ),
        "expected F32 [2, slots, 2 or more]",
    ),
    # executables
    (
        "graph",
        lambda b: b.execution.programs[0].graph.SetInParent(),
        "program 'step': got graph, expected a list of ops",
    ),
    ("no body", lambda b: b.execution.programs[0].ClearField("ops"), "got no body"),
    (
        "output that the host feeds",
        bind_output,
        "output: got 'more', expected a buffer no host value feeds",
    ),
    (
        "no logits",
        lambda b: setattr(b.execution.completion, "buffer", "x"),
        "completion buffer: got 'x', expected written for the wanted rows",
    ),
    (
        "row words",
        lambda b: setattr(b.execution.completion, "row_words", 5),
        "completion: got 320 columns, 5 row words",
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal[0])
def test_an_inconsistent_contract_is_refused(refusal: Refusal) -> None:
    check_refusal(refusal)


def test_the_unchanged_contract_is_valid() -> None:
    validate(valid_bundle())


def test_a_pending_token_in_a_readable_written_state_is_valid() -> None:
    bundle = valid_bundle()
    hold_pending(bundle, pb.READ_WRITE)
    validate(bundle)


@pytest.mark.parametrize("source", [pb.QUERY_LENGTH, pb.PREFIX_LIMIT])
def test_a_speculative_program_with_one_length_source_is_valid(source: pb.Source) -> None:
    bundle = valid_bundle()
    speculative(bundle, source, packed_tokens=4, draft_tokens=2, confidence_width=2)
    bundle.execution.buffers.add(
        name="proposal_confidence", dtype=pb.F32, space=pb.PERSISTENT, shape=[2, 4, 2]
    )
    validate(bundle)
