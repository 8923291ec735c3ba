"""The Messages API's answer: recorded sequences field by field, and the official accumulator."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ds4_common.errors import RequestError
from ds4_worker.http.anthropic.errors import anthropic_error
from ds4_worker.http.anthropic.events import (
    MessageEvent,
    MessageUsage,
    MessageWriter,
    Ping,
    encode_event,
)
from ds4_worker.http.messages import ContextLengthExceeded
from ds4_worker.parse.events import AnswerEvent, Reasoning, Text
from helpers.answer_events import answers, call, joined

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def written(
    answer: list[AnswerEvent],
    reason: str = "stop",
    stop: str | None = None,
    *,
    show_thinking: bool = True,
) -> tuple[Any, list[dict[str, Any]]]:
    """The message, and the events as a client decodes them."""
    out = MessageWriter("m", show_thinking=show_thinking)
    events: list[MessageEvent] = out.begin(MessageUsage(0, 30, 12, 0))
    for part in answer:
        events += out.push(part)
    events += out.end(reason, stop, MessageUsage(0, 30, 12, 7))
    return msgspec.to_builtins(out.message), [decoded(event) for event in events]


def decoded(event: MessageEvent) -> dict[str, Any]:
    name, data, *rest = encode_event(event).decode().split("\n")
    assert rest == ["", ""]
    value: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {value['type']}"
    return value


def test_a_stream_is_start_blocks_delta_stop() -> None:
    answer: list[AnswerEvent] = [Reasoning("I "), Reasoning("think"), Text("Hel"), Text("lo")]
    answer += call(0, "look", '{"a":', "1}") + call(1, "run", "{}")
    message, events = written(answer)
    start = events.pop(0)
    id_ = start["message"]["id"]
    assert id_.startswith("msg_")
    assert start == {
        "type": "message_start",
        "message": {
            "type": "message",
            "id": id_,
            "role": "assistant",
            "model": "m",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": 0,
                "cache_creation_input_tokens": 30,
                "cache_read_input_tokens": 12,
                "output_tokens": 0,
            },
        },
    }

    def block(index: int, content: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"type": "content_block_start", "index": index, "content_block": content},
            *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]

    assert events == [
        *block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "I "},
            {"type": "thinking_delta", "thinking": "think"},
            {"type": "signature_delta", "signature": id_},
        ),
        *block(
            1,
            {"type": "text", "text": ""},
            {"type": "text_delta", "text": "Hel"},
            {"type": "text_delta", "text": "lo"},
        ),
        *block(
            2,
            {"type": "tool_use", "id": "call_0", "name": "look", "input": {}},
            {"type": "input_json_delta", "partial_json": '{"a":'},
            {"type": "input_json_delta", "partial_json": "1}"},
        ),
        *block(
            3,
            {"type": "tool_use", "id": "call_1", "name": "run", "input": {}},
            {"type": "input_json_delta", "partial_json": "{}"},
        ),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": message["usage"],
        },
        {"type": "message_stop"},
    ]
    assert message["content"] == [
        {"type": "thinking", "thinking": "I think", "signature": id_},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "call_0", "name": "look", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_1", "name": "run", "input": {}},
    ]
    assert message["usage"]["output_tokens"] == 7


@pytest.mark.parametrize(
    ("reason", "stop", "answer", "expected"),
    [
        ("stop", None, [Text("a")], "end_turn"),
        ("length", None, [Text("a")], "max_tokens"),
        ("stop", "END", [Text("a")], "stop_sequence"),
        ("tool_calls", None, call(0, "run", "{}"), "tool_use"),
        ("length", None, call(0, "run", '{"a', closed=False), "max_tokens"),
    ],
)
def test_the_reason_to_stop_is_one_of_the_apis(
    reason: str, stop: str | None, answer: list[AnswerEvent], expected: str
) -> None:
    message, events = written(answer, reason, stop)
    assert (message["stop_reason"], message["stop_sequence"]) == (expected, stop)
    assert events[-2]["delta"] == {"stop_reason": expected, "stop_sequence": stop}


@pytest.mark.parametrize("answer", [[], [Reasoning("hm")]])
def test_an_answer_without_text_gets_an_empty_text_block(answer: list[AnswerEvent]) -> None:
    message, events = written(answer)
    assert message["content"][-1] == {"type": "text", "text": ""}
    assert [event["type"] for event in events[-4:-2]] == [
        "content_block_start",
        "content_block_stop",
    ]


def test_omitted_thinking_keeps_its_place_and_signature() -> None:
    message, events = written([Reasoning("secret"), Text("a")], show_thinking=False)
    assert message["content"][0]["thinking"] == ""
    assert message["content"][0]["signature"] == message["id"]
    assert "secret" not in json.dumps(events)


def test_a_call_that_was_cut_off_keeps_its_text_where_it_is_no_json() -> None:
    message, _ = written(call(0, "run", '{"a": [1', closed=False), "length")
    assert message["content"] == [
        {"type": "tool_use", "id": "call_0", "name": "run", "input": {"INVALID_JSON": '{"a": [1'}}
    ]


@given(answers(), st.sampled_from(["stop", "length"]), st.booleans())
def test_the_official_accumulator_rebuilds_the_message_from_the_events(
    answer: list[AnswerEvent], reason: str, shown: bool
) -> None:
    message, events = written(answer, reason, show_thinking=shown)
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        parsed = EVENT.validate_python(event)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    whole = snapshot.to_dict()
    for block in (*message["content"], *whole["content"]):
        if block["type"] == "tool_use" and "INVALID_JSON" in block["input"]:
            block["input"] = "cut off"
    pairs = zip(whole["content"], message["content"], strict=True)
    for rebuilt, block in pairs:
        if block.get("input") == "cut off":
            rebuilt["input"] = "cut off"
        assert rebuilt == block
    assert whole["stop_reason"] == message["stop_reason"]
    assert whole["usage"] == message["usage"]


@given(answers(), st.sampled_from(["stop", "length"]))
def test_fragments_make_no_difference_to_the_message(
    answer: list[AnswerEvent], reason: str
) -> None:
    one, other = written(answer, reason)[0], written(joined(answer), reason)[0]
    for message in (one, other):
        del message["id"]
        for block in message["content"]:
            block.pop("signature", None)
    assert one == other


def test_a_ping_is_an_event_that_says_nothing() -> None:
    assert encode_event(Ping()) == b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_every_status_has_a_type_of_the_apis(status: int, kind: str) -> None:
    error = msgspec.to_builtins(anthropic_error(RequestError("why", status=status)))
    assert error == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_a_prompt_that_is_too_long_says_by_how_much() -> None:
    error = msgspec.to_builtins(anthropic_error(ContextLengthExceeded(100, 64, "messages")))
    assert error["error"]["type"] == "invalid_request_error"
    assert (error["error"]["n_prompt_tokens"], error["error"]["n_ctx"]) == (100, 64)
