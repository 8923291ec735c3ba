"""Reads a bundle without protobuf's leniency.

Owns: what the protobuf runtime accepts silently and a contract must not - unknown fields, unknown
enum numbers, enums left at 0 - at any depth. Knows no field by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ds4_common.contract.prepared_model_pb2 import Bundle
from ds4_common.errors import ContractError

MAX_BUNDLE_BYTES = 64 << 20


def fail(where: str, got: object, expected: object) -> ContractError:
    """The error of every refusal: the object, what it holds, what it should hold."""
    return ContractError(f"prepared contract: {where}: got {got}, expected {expected}")


def parse_bundle(data: bytes) -> Bundle:
    """Decodes a bundle and refuses whatever the schema does not define. Raises ContractError.

    The result is well-formed but not yet consistent: call `validate` on it.
    """
    if len(data) > MAX_BUNDLE_BYTES:
        raise fail("blob", f"{len(data)} bytes", f"at most {MAX_BUNDLE_BYTES}")
    try:
        bundle = Bundle.FromString(data)
    except DecodeError as error:
        raise fail("blob", f"{len(data)} bytes ({error})", "an encoded Bundle") from error
    check_known(bundle, "bundle")
    return bundle


def check_known(message: Message, path: str) -> None:
    """Refuses unknown fields, unknown enum numbers and unspecified enums, recursively."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        numbers = ", ".join(str(unknown[i].field_number) for i in range(len(unknown)))
        name = message.DESCRIPTOR.name
        raise fail(path, f"unknown field number {numbers}", f"only the fields of {name}")
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_ENUM:
            _check_enum(message, field, path)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner, where in _children(message, field, path):
                check_known(inner, where)


def _check_enum(message: Message, field: Any, path: str) -> None:
    value = getattr(message, field.name)
    known = field.enum_type.values_by_number
    for number in value if field.is_repeated else (value,):
        if number == 0 or number not in known:
            raise fail(f"{path}.{field.name}", number, f"a known {field.enum_type.name}, not 0")


def _children(message: Message, field: Any, path: str) -> Iterator[tuple[Message, str]]:
    if field.is_repeated:
        for i, inner in enumerate(getattr(message, field.name)):
            yield inner, f"{path}.{field.name}[{i}]"
    elif message.HasField(field.name):
        yield getattr(message, field.name), f"{path}.{field.name}"
