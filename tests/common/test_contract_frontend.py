"""The frontend blob says what the contract says, and a worker reads it without protobuf."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.frontend import encode_frontend, frontend_from_bundle, parse_frontend
from ds4_common.errors import ContractError
from helpers.bundles import valid_bundle


def blob(bundle: pb.Bundle) -> bytes:
    return frontend_from_bundle(bundle, chat_template="{{ x }}", bos_token="<s>", eos_token="</s>")


def changed(**fields: Any) -> bytes:
    document = json.loads(blob(valid_bundle()))
    return json.dumps(document | fields).encode()


def test_a_blob_reads_back_as_written() -> None:
    data = blob(valid_bundle())
    assert encode_frontend(parse_frontend(data)) == data


def test_a_blob_is_read_without_protobuf() -> None:
    script = (
        "import sys; from ds4_common.contract.frontend import parse_frontend;"
        "parse_frontend(sys.stdin.buffer.read());"
        "print([m for m in sys.modules if m.startswith(('google', 'numpy'))])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=blob(valid_bundle()), capture_output=True, check=True)
    assert done.stdout == b"[]\n"


def test_syntax_travels_under_its_schema_name() -> None:
    bundle = valid_bundle()
    bundle.serving.model.frontend.tools.CopyFrom(
        pb.ToolConfig(syntax=pb.TOOL_XTML, open="<tools>", close="</tools>", separator="\n")
    )
    bundle.serving.model.frontend.reasoning.CopyFrom(
        pb.ReasoningConfig(syntax=pb.REASONING_XTML_THINK, open="<think>", close="</think>")
    )
    frontend = parse_frontend(blob(bundle))
    assert frontend.tools is not None
    assert (frontend.tools.syntax, frontend.tools.open) == ("TOOL_XTML", "<tools>")
    assert frontend.reasoning is not None
    assert frontend.reasoning.syntax == "REASONING_XTML_THINK"
    assert parse_frontend(blob(valid_bundle())).tools is None


def test_defaults_are_what_was_meant_not_their_float32() -> None:
    assert parse_frontend(blob(valid_bundle())).defaults.min_p == 0.05


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 2}, "format: got 2, expected 1"),
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"context_tokens": 0}, "context_tokens"),
        ({"context_tokens": "8"}, "context_tokens"),
        ({"served_id": ""}, "served_id"),
        ({"eos_ids": [320]}, "got id 320, expected one below the vocabulary of 320"),
        ({"bos_id": 320}, "got id 320"),
        ({"eos_ids": [-1]}, "eos_ids"),
        ({"defaults": {"temperature": -1}}, "temperature"),
    ],
)
def test_a_blob_that_says_nonsense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError) as refusal:
        parse_frontend(changed(**fields))
    assert message in str(refusal.value)


@pytest.mark.parametrize("field", ["served_id", "vocabulary", "eos_ids", "defaults"])
def test_a_blob_without_a_field_is_refused(field: str) -> None:
    document = json.loads(blob(valid_bundle()))
    del document[field]
    with pytest.raises(ContractError, match=field):
        parse_frontend(json.dumps(document).encode())


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        parse_frontend(data)


@pytest.mark.parametrize("cut", [bytes.upper, lambda data: data[:-1], lambda data: data + b"}"])
def test_a_damaged_blob_is_refused(cut: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ContractError, match="frontend blob"):
        parse_frontend(cut(blob(valid_bundle())))
