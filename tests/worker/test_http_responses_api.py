"""The Responses API over a scripted model: whole and streamed, tools, reasoning, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.fake_model import ByteTokenizer
from helpers.fake_server import FakeServer
from helpers.scripted import tokens
from helpers.tool_requests import ask, scripted

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": None}
ASK: dict[str, Any] = {"input": "hi", "temperature": 0}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Bern"}}\n</tool_call>'
SHOWN = {"reasoning": {"summary": "auto"}}


def prompt_of(server: FakeServer) -> str:
    """The prompt of the last sequence that began."""
    return b"".join(map(ByteTokenizer().token_bytes, server.executor.prompts[-1])).decode()


def test_a_response_repeats_the_request_and_holds_the_output() -> None:
    said = f"hm</think>I look.\n\n{CALL}"
    with scripted(said) as server:
        fields = {"instructions": "brief", "metadata": {"a": "b"}, "store": True, "user": "me"}
        reply = ask(
            server, PATH, {**ASK, **SHOWN, **fields, "tools": [WEATHER], "max_output_tokens": 500}
        )
        prompt = prompt_of(server)
    assert reply["id"].startswith("resp_")
    assert len(reply["id"]) == len("resp_") + 24
    assert prompt.partition("[end]")[2] == "[system]brief[end][user]hi[end][assistant]<think>"
    assert reply["usage"] == {
        "input_tokens": len(tokens(prompt)) - 1,
        "input_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": len(tokens(prompt)) - 1,
        },
        "output_tokens": len(tokens(said)),
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": len(tokens(prompt)) - 1 + len(tokens(said)),
    }
    kinds = [item["type"] for item in reply["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    reasoning, message, call = reply["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert message["content"][0]["text"] == "I look."
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Bern"})
    assert call["call_id"].startswith("call_")
    repeated = {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": "brief",
        "max_output_tokens": 500,
        "metadata": {"a": "b"},
        "model": "fake-model",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": "auto"},
        "store": False,
        "temperature": 0.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "top_p": None,
        "truncation": "disabled",
        "user": "me",
    }
    assert {key: reply[key] for key in repeated} == repeated


def test_a_stream_ends_with_the_same_response_and_without_done() -> None:
    body = {**ASK, **SHOWN, "tools": [WEATHER]}
    with scripted(f"hm</think>I look.\n\n{CALL}") as server:
        status, text = server.request("POST", PATH, {**body, "stream": True})
        whole = ask(server, PATH, body)
    assert status == 200
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [e["type"] for e in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    streamed = events[-1]["response"]

    def settled(value: dict[str, Any]) -> dict[str, Any]:
        same = {**value, "id": "", "created_at": 0, "completed_at": 0}
        same["output"] = [{**item, "id": "", "call_id": ""} for item in value["output"]]
        same["usage"] = {**value["usage"], "input_tokens_details": {}}
        return same

    assert settled(streamed) == settled(whole)


def test_the_history_of_a_tool_loop_reaches_the_template() -> None:
    with scripted("hm</think>It is warm.") as server:
        first = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
        history = [
            first,
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "so"}],
            },
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "weather",
                "arguments": '{"city": "Bern"}',
                "status": "completed",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "20 C"},
        ]
        reply = ask(server, PATH, {**ASK, "input": history, "tools": [WEATHER]})
        prompt = prompt_of(server)
    assert "[user]hi[end][assistant]<think>so</think><tool_call>" in prompt
    assert prompt.endswith("[tool]20 C[end][assistant]<think>")
    assert [item["type"] for item in reply["output"]] == ["message"]  # no summary was asked for


def test_what_was_sampled_is_replayed_by_the_ids_of_its_calls() -> None:
    with scripted(f"hm</think>{CALL}", "</think>done") as server:
        first = ask(server, PATH, {**ASK, "tools": [WEATHER]})
        (call,) = first["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
        history = [{"role": "user", "content": "hi"}, call, output]
        ask(server, PATH, {**ASK, "input": history, "tools": [WEATHER]})
        assert CALL in prompt_of(server)  # with its two spaces


def test_tools_of_a_namespace_are_called_by_their_names_in_it() -> None:
    space = {"type": "namespace", "name": "wea", "description": "d"}
    inner = {"type": "function", "name": "ther", "parameters": SCHEMA}
    with scripted(f"</think>{CALL}") as server:
        reply = ask(
            server, PATH, {**ASK, "tools": [{**space, "tools": [inner]}, {"type": "web_search"}]}
        )
        assert prompt_of(server).count('"name": "weather"') == 1
    (call,) = reply["output"]
    assert (call["namespace"], call["name"]) == ("wea", "ther")


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<think>"),
        ({"reasoning": {"effort": "none"}}, "<think></think>"),
        ({"reasoning": {"effort": "minimal"}}, "<think>"),
        ({"reasoning": {"effort": "xhigh", "generate_summary": "detailed"}}, "<think>"),
    ],
)
def test_an_effort_controls_thinking(fields: dict[str, Any], end: str) -> None:
    with scripted("a</think>b") as server:
        ask(server, PATH, {**ASK, **fields})
        assert prompt_of(server).endswith("[assistant]" + end)


def test_an_output_limit_makes_the_response_incomplete() -> None:
    with scripted("x</think>abcdef") as server:
        reply = ask(server, PATH, {**ASK, "max_output_tokens": 5})
        assert reply["status"] == "incomplete"
        assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
        assert reply["output"][0]["content"][0]["text"] == "abc"
        events = server.events(PATH, {**ASK, "max_tokens": 5})
        assert events[-1]["type"] == "response.incomplete"


def test_logprobs_belong_to_the_text_whole_and_streamed() -> None:
    body = {**ASK, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    with scripted("hm</think>abc") as server:
        whole = ask(server, PATH, body)["output"][0]["content"][0]
        events = server.events(PATH, body)
    assert "".join(item["token"] for item in whole["logprobs"]) == whole["text"] == "abc"
    assert all(len(item["top_logprobs"]) == 2 for item in whole["logprobs"])
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [item for delta in deltas for item in delta["logprobs"]] == whole["logprobs"]
    (done,) = (e for e in events if e["type"] == "response.output_text.done")
    assert done["logprobs"] == whole["logprobs"]


def test_no_tool_is_offered_where_none_is_to_be_chosen() -> None:
    with scripted("</think>b") as server:
        ask(server, PATH, {**ASK, "tools": [WEATHER], "tool_choice": "none"})
        assert "[tools]" not in prompt_of(server)
        other = {**WEATHER, "name": "time"}
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "time"}]}
        ask(server, PATH, {**ASK, "tools": [WEATHER, other], "tool_choice": allowed})
        assert '"weather"' not in prompt_of(server)
        assert '"time"' in prompt_of(server)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", None),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_item"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"top_logprobs": 21}, "top_logprobs", None),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", None),
        ({"reasoning": {"summary": "much"}}, "reasoning.summary", "invalid_type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", None),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_type"),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_type"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", None),
        ({"tools": [{"type": "function"}]}, "tools[0].name", None),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, code: str | None) -> None:
    with scripted("</think>b") as server:
        status, reply = server.request("POST", PATH, {**ASK, **fields})
        assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, param, code), (
            reply
        )
        assert reply["error"]["message"].startswith(param)
        assert not server.executor.steps


def test_a_prompt_that_is_too_long_names_the_input() -> None:
    with scripted("</think>b", context_tokens=64) as server:
        status, reply = server.request("POST", PATH, {**ASK, "input": "x" * 100})
    error = reply["error"]
    assert (status, error["param"], error["n_ctx"]) == (400, "input", 64)
    assert error["code"] == "context_length_exceeded"
