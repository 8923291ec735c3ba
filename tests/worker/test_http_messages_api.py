"""The Messages API over a scripted model: whole and streamed, tools, thinking, errors, counting."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds4_worker.http.limits import HttpLimits
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import ByteTokenizer
from helpers.fake_server import FakeServer, fake_server, read_all
from helpers.gate import Gate
from helpers.scripted import Script, tokens, tool_model
from helpers.tool_requests import ask, scripted

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
ASK: dict[str, Any] = {
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Bern"}}\n</tool_call>'


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def stream(server: FakeServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = server.events(PATH, body)
    return events


def prompt_of(server: FakeServer) -> str:
    """The prompt of the last sequence that began."""
    assert isinstance(server.executor, FakeExecutor)
    return b"".join(map(ByteTokenizer().token_bytes, server.executor.prompts[-1])).decode()


def streamed(body: dict[str, Any]) -> bytes:
    """The bytes of a request for a stream."""
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def refused(server: FakeServer, body: object, path: str = PATH) -> tuple[int, dict[str, Any]]:
    status, reply = server.request("POST", path, body)
    assert set(reply) == {"type", "error"}
    assert reply["type"] == "error"
    return status, reply["error"]


def test_a_message_has_blocks_a_reason_and_usage() -> None:
    said = f"hm</think>I look.\n\n{CALL}"
    with scripted(said) as server:
        reply = ask(server, PATH, {**ASK, "tools": [WEATHER], "model": "fake"})
    text = "[tools]"  # the rendered prompt begins so; its length is the usage
    assert reply["usage"]["cache_creation_input_tokens"] > len(text)
    assert reply["usage"]["input_tokens"] == reply["usage"]["cache_read_input_tokens"] == 0
    assert reply["usage"]["output_tokens"] == len(tokens(said))
    assert reply["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "fake")
    thinking, words, call = reply["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": reply["id"]}
    assert words == {"type": "text", "text": "I look."}
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Bern"}}
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("tool_use", None)


def test_a_stream_gives_the_same_message() -> None:
    body = {**ASK, "tools": [WEATHER]}
    with scripted(f"hm</think>I look.\n\n{CALL}") as server:
        events = stream(server, body)
        whole = ask(server, PATH, body)
    assert events[0]["type"] == "message_start"
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    started, again = events[0]["message"]["usage"], whole["usage"]
    assert started["cache_read_input_tokens"] == 0
    # The same prompt again: all but its last token is found in the cache.
    assert again["cache_read_input_tokens"] == started["cache_creation_input_tokens"] - 1
    assert again["cache_creation_input_tokens"] == 1
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "hm"
    assert "".join(d.get("text", "") for d in deltas) == "I look."
    arguments = "".join(d.get("partial_json", "") for d in deltas)
    assert json.loads(arguments) == whole["content"][-1]["input"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]


def test_the_history_of_a_tool_loop_reaches_the_template() -> None:
    with scripted("hm</think>It is warm.") as server:
        used = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
        thought = {"type": "thinking", "thinking": "so", "signature": "x"}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "20 C"}
        history = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, used]},
            {"role": "user", "content": [result]},
        ]
        ask(server, PATH, {**ASK, "messages": history, "tools": [WEATHER], "system": "brief"})
        prompt = prompt_of(server)
    head, _, rest = prompt.partition("[end]")
    assert json.loads(head.removeprefix("[tools]"))["function"]["parameters"] == SCHEMA
    assert rest.startswith("[system]brief[end][user]hi[end][assistant]<think>so</think>I look.")
    assert '{"name": "weather", "arguments": {"city": "Bern"}}' in rest
    assert rest.endswith("[tool]20 C[end][assistant]<think>")


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<think>"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "<think>"),
        ({"thinking": {"type": "adaptive"}}, "<think>"),
        ({"thinking": {"type": "disabled"}}, "<think></think>"),
        ({"thinking": False}, "<think></think>"),
        ({"reasoning_effort": "none"}, "<think></think>"),
        ({"output_config": {"effort": "high"}}, "<think>"),
    ],
)
def test_thinking_is_switched_in_the_apis_own_ways(fields: dict[str, Any], end: str) -> None:
    with scripted("a</think>b") as server:
        ask(server, PATH, {**ASK, **fields})
        assert prompt_of(server).endswith("[assistant]" + end)


def test_a_stop_sequence_is_reported() -> None:
    with scripted("x</think>abcENDdef") as server:
        reply = ask(server, PATH, {**ASK, "stop_sequences": ["END", "nope"]})
    assert reply["content"][-1]["text"] == "abc"
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")


def test_an_output_limit_is_reported() -> None:
    with scripted("x</think>abcdef") as server:
        reply = ask(server, PATH, {**ASK, "max_tokens": 5})
    assert (reply["stop_reason"], reply["usage"]["output_tokens"]) == ("max_tokens", 5)


def test_counting_tokens_counts_what_a_message_would_send() -> None:
    body = {**ASK, "tools": [WEATHER], "system": "brief"}
    with scripted("a</think>b") as server:
        status, counted = server.request("POST", f"{PATH}/count_tokens", body)
        assert status == 200
        usage = ask(server, PATH, body)["usage"]
        long = {"messages": [{"role": "user", "content": "x" * 5000}]}
        assert server.request("POST", f"{PATH}/count_tokens", long)[1]["input_tokens"] > 5000
    assert counted == {"input_tokens": usage["cache_creation_input_tokens"]}


def test_headers_and_queries_of_the_official_clients_are_accepted() -> None:
    with fake_server(Script("a</think>b"), model=tool_model(), api_key="k") as server:
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
        status, reply = server.request("POST", f"{PATH}?beta=true", ASK, **headers)
        assert (status, reply["content"][-1]["text"]) == (200, "b")
        status, error = refused(server, ASK)
        assert (status, error["type"]) == (401, "authentication_error")


# --- errors


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [user({"type": "image"})]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "x"})]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ],
)
def test_refusals_have_the_apis_form_and_name_the_field(fields: dict[str, Any], place: str) -> None:
    with scripted("a</think>b") as server:
        status, error = refused(server, {**ASK, **fields})
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith(f"{place}: "), error
        assert not server.executor.steps


def test_other_errors_have_the_apis_form_too() -> None:
    with scripted("a</think>b", context_tokens=64) as server:
        status, error = refused(server, {**ASK, "model": "nope"})
        assert (status, error["type"]) == (404, "not_found_error")
        status, error = refused(server, ASK, path=f"{PATH}/batches")
        assert (status, error["type"]) == (404, "not_found_error")
        status, error = refused(server, b"{")
        assert (status, error["type"]) == (400, "invalid_request_error")
        status, headers, reply = server.exchange("GET", PATH)
        assert (status, headers["allow"], reply["type"]) == (405, "POST", "error")
        long = {**ASK, "messages": [{"role": "user", "content": "x" * 200}]}
        status, error = refused(server, long)
        assert (status, error["n_ctx"]) == (400, 64)
        assert error["n_prompt_tokens"] > 64
    with fake_server(ready=False) as server:
        status, error = refused(server, ASK)
        assert (status, error["type"]) == (503, "overloaded_error")


def test_refusals_of_the_transport_have_the_apis_form() -> None:
    with fake_server(Script("a"), model=tool_model(), limits=HttpLimits(body_bytes=100)) as server:
        with server.connect() as connection:
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n"
            connection.sendall(head.encode())
            head, _, body = read_all(connection).decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 413 ")
    assert json.loads(body)["error"]["type"] == "request_too_large"


def test_a_silent_stream_is_kept_alive_by_pings() -> None:
    gate = Gate()
    executor = Script("</think>b")
    executor.before_step = gate
    limits = HttpLimits(silence_seconds=0.05)
    with fake_server(executor, model=tool_model(), limits=limits) as server:
        with server.connect() as connection:
            connection.sendall(streamed(ASK))
            text = ""
            while "event: ping" not in text:
                text += connection.recv(1 << 16).decode()
            gate.open()
            while "message_stop" not in text:
                text += connection.recv(1 << 16).decode()
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in text


def test_what_was_sampled_is_replayed_by_the_ids_of_its_calls() -> None:
    tools = {**ASK, "tools": [WEATHER]}
    with scripted(f"hm</think>{CALL}", "</think>done") as server:
        first = ask(server, PATH, tools)
        result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "1"}
        turns = [{"role": "assistant", "content": first["content"]}, user(result)]
        ask(server, PATH, {**tools, "messages": [*ASK["messages"], *turns]})
        assert CALL in prompt_of(server)  # with its two spaces


def test_a_failure_in_a_stream_is_one_error_event_at_its_end() -> None:
    gate = Gate()
    executor = Script("</think>bcdef")
    executor.before_step = gate
    with fake_server(executor, model=tool_model()) as server, server.connect() as connection:
        gate.allow(2)
        connection.sendall(streamed(ASK))
        text = ""
        while "text_delta" not in text:
            text += connection.recv(1 << 16).decode()
        executor.errors = {0: "no finite logits", 1: "no finite logits"}
        gate.open()
        while "event: error" not in text:
            text += connection.recv(1 << 16).decode()
    assert "message_stop" not in text
    error = text.partition("event: error\ndata: ")[2].partition("\n")[0]
    assert json.loads(error) == {
        "type": "error",
        "error": {"type": "api_error", "message": "no finite logits"},
    }


def test_an_answer_that_the_client_began_goes_on() -> None:
    history = [*ASK["messages"], {"role": "assistant", "content": "The answer is"}]
    with scripted(" 4") as server:
        reply = ask(server, PATH, {**ASK, "messages": history, "thinking": False})
        assert prompt_of(server).endswith("[assistant]The answer is")
        assert reply["content"] == [{"type": "text", "text": " 4"}]
        used = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
        history[-1] = {"role": "assistant", "content": [used]}
        status, error = refused(server, {**ASK, "messages": history})
        assert (status, error["message"][:13]) == (400, "messages[1]: ")
