"""Contracts are read without protobuf's leniency: what the schema does not define is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract import strict
from ds4_common.contract.validate import parse_bundle, validate
from ds4_common.errors import ContractError
from helpers.bundles import Change, ops, program, valid_bundle, valid_bytes

# --- wire strictness ---


@pytest.mark.parametrize(
    ("find", "path"),
    [
        (lambda b: b, "bundle"),
        (lambda b: b.serving.defaults, "bundle.serving.defaults"),
        (lambda b: ops(b)[3], "bundle.execution.programs[0].ops.ops[3]"),
    ],
)
def test_unknown_fields_are_refused_at_any_depth(find: Change, path: str) -> None:
    bundle = valid_bundle()
    inner = find(bundle)
    assert isinstance(inner, Message)
    inner.MergeFromString(b"\xfa\x3f\x01x")  # field 1023, one byte long
    with pytest.raises(ContractError, match="unknown field number 1023") as refusal:
        parse_bundle(bundle.SerializeToString())
    assert f": {path}: " in str(refusal.value)


def test_unknown_enum_numbers_are_refused() -> None:
    bundle = valid_bundle()
    op_bytes = pb.Buffer(name="new").SerializeToString() + b"\x10\x63"  # dtype = 99
    bundle.execution.buffers.append(pb.Buffer.FromString(op_bytes))
    refusal = r"buffers\[\d+\]\.dtype: got 99, expected a known DType"
    with pytest.raises(ContractError, match=refusal):
        parse_bundle(bundle.SerializeToString())


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.execution.buffers[0].ClearField("dtype"),
        lambda b: b.execution.buffers[0].ClearField("space"),
        lambda b: program(b).ClearField("operation"),
        lambda b: program(b).bindings[0].ClearField("source"),
        lambda b: program(b).bindings[0].ClearField("indexing"),
        lambda b: program(b).accesses.add(state="state"),
        lambda b: b.serving.model.cache.histories[0].ClearField("kind"),
        lambda b: b.serving.model.frontend.tools.SetInParent(),
        lambda b: b.serving.model.frontend.reasoning.SetInParent(),
    ],
)
def test_unspecified_enums_are_refused(change: Change) -> None:
    bundle = valid_bundle()
    change(bundle)
    with pytest.raises(ContractError, match="got 0, expected a known"):
        validate(bundle)


def test_bytes_that_are_no_bundle_are_refused() -> None:
    with pytest.raises(ContractError, match="expected an encoded Bundle"):
        parse_bundle(b"\xff" * 40)


def test_a_blob_beyond_reason_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict, "MAX_BUNDLE_BYTES", 10)
    with pytest.raises(ContractError, match="got 11 bytes, expected at most 10"):
        parse_bundle(bytes(11))


# --- anything else ---


def accept_or_refuse(data: bytes) -> None:
    """Nothing but ContractError may come out."""
    try:
        validate(parse_bundle(data))
    except ContractError as refusal:
        event(str(refusal)[:60])


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_bytes_are_accepted_or_refused(data: st.DataObject) -> None:
    damaged = bytearray(valid_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        cut = data.draw(st.integers(0, 4))
        damaged[at : at + cut] = data.draw(st.binary(max_size=4))
    accept_or_refuse(bytes(damaged))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        validate(parse_bundle(data))


NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 63, 64, 65, 1000, 1 << 24, (1 << 31) - 1])
TEXTS = st.sampled_from(["", "x", "tokens", "cache.0.k", "output.weight", "alloc:0", "step"])
REALS = st.sampled_from([0.0, -1.0, 0.5, 1.0, 3.0, 1e30, math.inf, -math.inf, math.nan])


def messages(message: Message) -> Iterator[Message]:
    """The message and all that it holds."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            yield from messages(inner)


def spoil(message: Message, field: Any, draw: st.DataObject) -> None:
    """Sets one field of any kind to something of its type."""
    held = getattr(message, field.name)
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            held[draw.draw(st.sampled_from(["heads", "dim", "scale", "?"]))] = draw.draw(REALS)
        elif field.is_repeated and held and draw.draw(st.booleans()):
            held.append(held[draw.draw(st.integers(0, len(held) - 1))])
        else:
            message.ClearField(field.name)
        return
    value: Any
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        raw = field.type == FieldDescriptor.TYPE_BYTES
        value = b"?" if raw else draw.draw(TEXTS)
    elif field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        value = draw.draw(REALS)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        value = draw.draw(st.booleans())
    else:
        value = draw.draw(NUMBERS)
    if not field.is_repeated:
        setattr(message, field.name, value)
    elif held and draw.draw(st.booleans()):
        held[draw.draw(st.integers(0, len(held) - 1))] = value
    else:
        held.append(value)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_spoiled_fields_are_accepted_or_refused(data: st.DataObject) -> None:
    bundle = parse_bundle(valid_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        every = list(messages(bundle))
        message = every[data.draw(st.integers(0, len(every) - 1))]
        fields = message.DESCRIPTOR.fields
        spoil(message, fields[data.draw(st.integers(0, len(fields) - 1))], data)
    accept_or_refuse(bundle.SerializeToString())
