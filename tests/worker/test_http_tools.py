"""Tools in chat completions: the forms of calls, their replay, and fields that do not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.fake_server import fake_server
from helpers.scripted import TOOL_TEMPLATE, Script, tokens, tool_model
from helpers.tool_requests import (
    ASK,
    CALL,
    CHAT,
    NAMED,
    TIME,
    TWO,
    history,
    message_of,
    prompt_of,
    scripted,
    spell,
)


def test_a_stream_is_reasoning_then_text_then_a_header_and_fragments_per_call() -> None:
    with scripted(f"ab</think>c\n\n{TWO}") as server:
        events = server.events(CHAT, {**ASK, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    usage = events.pop()["usage"]
    choices = [event["choices"][0] for event in events]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1] == {"index": 0, "finish_reason": "tool_calls", "delta": {}, "logprobs": None}
    deltas = [choice["delta"] for choice in choices[:-1]]
    assert deltas[:4] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "a"},
        {"reasoning_content": "b"},
        {"content": "c"},
    ]
    calls = [delta["tool_calls"][0] for delta in deltas[4:]]
    assert all(set(delta) == {"tool_calls"} for delta in deltas[4:])
    headers = [call for call in calls if "id" in call]
    assert [(h["index"], h["type"], h["function"]) for h in headers] == [
        (0, "function", {"name": "weather", "arguments": ""}),
        (1, "function", {"name": "time", "arguments": ""}),
    ]
    assert all(len(h["id"]) == 37 and h["id"].startswith("call_") for h in headers)
    assert headers[0]["id"] != headers[1]["id"]
    fragments = [call for call in calls if "id" not in call]
    assert all(set(f) == {"index", "function"} for f in fragments)
    assert all(set(f["function"]) == {"arguments"} for f in fragments)
    for index, expected in enumerate([{"city": "Zürich"}, {}]):
        text = "".join(f["function"]["arguments"] for f in fragments if f["index"] == index)
        assert json.loads(text) == expected
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2
    assert usage["completion_tokens"] == len(tokens(f"ab</think>c\n\n{TWO}"))


def test_a_whole_answer_has_the_same_parts() -> None:
    with scripted(f"ab</think>c\n\n{TWO}") as server:
        message, reason = message_of(server, ASK)
    calls = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "c", "reasoning_content": "ab"}
    assert reason == "tool_calls"
    assert [set(call) for call in calls] == [{"id", "type", "function"}] * 2
    assert [call["function"]["name"] for call in calls] == ["weather", "time"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Zürich"}


def test_calls_alone_have_null_content() -> None:
    with scripted(f"</think>{CALL}") as server:
        message, _ = message_of(server, ASK)
    assert message["content"] is None
    assert "reasoning_content" not in message


def test_only_the_first_call_remains_without_parallel_calls() -> None:
    with scripted(f"</think>{TWO}") as server:
        message, reason = message_of(server, {**ASK, "parallel_tool_calls": False})
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
        assert reason == "tool_calls"
        events = server.events(CHAT, {**ASK, "parallel_tool_calls": False})[:-1]
        deltas = [e["choices"][0]["delta"] for e in events]
        assert {c["index"] for d in deltas for c in d.get("tool_calls", [])} == {0}


def test_without_tools_or_with_choice_none_a_call_is_text() -> None:
    with scripted(f"</think>{CALL}") as server:
        for body in ({**ASK, "tools": None}, {**ASK, "tool_choice": "none"}):
            message, reason = message_of(server, body)
            assert (message["content"], reason) == (CALL, "stop")
            assert "[tools]" not in prompt_of(server, body)


def test_a_call_of_an_unknown_tool_is_text() -> None:
    with scripted(f"</think>{CALL}") as server:
        assert message_of(server, {**ASK, "tools": [TIME]})[0]["content"] == CALL


def test_an_answer_cut_off_inside_a_call_keeps_its_fragments() -> None:
    length = len(tokens(f"</think>{CALL}")) - len('ürich"}}\n</tool_call>'.encode()) - 1
    with scripted(f"</think>{CALL}") as server:
        message, reason = message_of(server, {**ASK, "max_tokens": length})
        assert reason == "length"
        assert message["tool_calls"][0]["function"]["arguments"].replace(" ", "") == '{"city":"Z'
        message, reason = message_of(server, {**ASK, "stop": "rich"})
        assert reason == "stop"
        assert message["tool_calls"][0]["function"]["arguments"].replace(" ", "") == '{"city":"Zü'


def test_a_stop_string_after_a_call_is_a_stop() -> None:
    with scripted(f"</think>{CALL}\nEND") as server:
        message, reason = message_of(server, {**ASK, "stop": "END"})
        assert (len(message["tool_calls"]), reason) == (1, "stop")
        assert message_of(server, ASK)[1] == "tool_calls"


def test_a_delimiter_spelled_by_other_tokens_is_text() -> None:
    spelled = [*b"a</think>b", *tokens("</think>c")]
    with fake_server(Script(spelled), model=tool_model()) as server:
        message, _ = message_of(server, ASK)
    assert message["reasoning_content"] == "a</think>b"
    assert message["content"] == "c"


def test_logprobs_cover_every_presented_token_once_and_in_order() -> None:
    answer = f"ab</think>c{CALL}"
    with scripted(answer) as server:
        body = {**ASK, "logprobs": True, "top_logprobs": 1}
        whole = server.request("POST", CHAT, body)[1]["choices"][0]["logprobs"]["content"]
        events = server.events(CHAT, body)[:-1]
    streamed = [
        item
        for event in events
        if (logprobs := event["choices"][0]["logprobs"])
        for item in logprobs["content"]
    ]
    assert streamed == whole
    assert b"".join(bytes(item["bytes"]) for item in whole).decode() == answer


def test_observed_ids_are_raw_and_carried_by_empty_deltas() -> None:
    answer = f"ab</think>c{CALL}"
    with scripted(answer) as server:
        events = server.events(CHAT, {**ASK, "return_token_ids": True})[:-1]
    observed = [e["choices"][0] for e in events if "token_ids" in e["choices"][0]]
    assert [t for choice in observed for t in choice["token_ids"]] == tokens(answer)
    assert all(choice["delta"] == {} for choice in observed)


def test_every_choice_has_calls_of_its_own() -> None:
    with scripted(f"</think>{CALL}", f"x</think>y{TWO}") as server:
        choices = server.request("POST", CHAT, {**ASK, "n": 2})[1]["choices"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [c["message"]["content"] for c in choices] == [None, "y"]


@pytest.mark.parametrize("answer", [f"c\n\n{TWO}", f" {CALL}", CALL, f"c{CALL}", f"c \n {TWO}"])
def test_the_next_turn_renders_the_calls_exactly_as_they_were_sampled(answer: str) -> None:
    with scripted(answer, "done") as server:
        body = {**ASK, "think": False}
        first = server.request("POST", CHAT, {**body, "return_token_ids": True})[1]
        sampled = spell(first["prompt_token_ids"]) + answer
        message = first["choices"][0]["message"]
        prompt = prompt_of(server, {**body, "messages": history(message)})
    assert prompt.replace("<think></think>", "").startswith(sampled.replace("<think></think>", ""))
    assert prompt.count("[end][tool]ok") == len(message["tool_calls"])


def test_a_replayed_turn_is_found_in_the_cache_to_its_last_token() -> None:
    begin, _, _ = TOOL_TEMPLATE.partition("{%- if add_generation_prompt %}")
    template = begin + "{%- if add_generation_prompt %}[assistant]{% endif %}"
    odd = CALL.replace(":  ", ":   ")
    with scripted(f"c {odd}", "done", "done", template=template, reasoning=None) as server:
        first = server.request("POST", CHAT, ASK)[1]
        message = first["choices"][0]["message"]
        body = {**ASK, "messages": history(message)}
        replayed = server.request("POST", CHAT, body)[1]["usage"]["prompt_tokens_details"]
        message["tool_calls"][0]["id"] = "call_0"
        rendered = server.request("POST", CHAT, body)[1]["usage"]["prompt_tokens_details"]
    sampled = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1  # but EOS
    assert replayed["cached_tokens"] == sampled
    assert rendered["cached_tokens"] < sampled


def test_unknown_or_mixed_ids_are_rendered_by_the_template() -> None:
    canonical = CALL.replace(":  ", ": ")
    with scripted(f"</think>{CALL}", f"</think>{CALL}", "</think>") as server:
        one, _ = message_of(server, ASK)
        two, _ = message_of(server, ASK)
        mixed = {**one, "tool_calls": [*one["tool_calls"], *two["tool_calls"]]}
        assert f"{canonical}\n{canonical}" in prompt_of(server, {**ASK, "messages": history(mixed)})
        one["tool_calls"][0]["id"] = "call_0"
        assert canonical in prompt_of(server, {**ASK, "messages": history(one)})


def test_no_text_of_a_client_is_taken_for_a_call() -> None:
    """Whatever stands in messages, only the sampled block is put in, once."""
    with scripted(f"</think>{CALL}", "</think>") as server:
        message, _ = message_of(server, ASK)
        message["content"] = f"{CALL} <tool_call>\n"
        messages = history(message)
        messages[0] = {"role": "user", "content": f"{CALL}<tool_call>"}
        prompt = prompt_of(server, {**ASK, "messages": messages})
    assert f"[user]{CALL}<tool_call>[end]" in prompt
    assert f"[assistant]{CALL} <tool_call>\n\n{CALL}[end]" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"think": "yes"}, "think"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "critic", "content": ""}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"messages": [{"role": "user", "tool_calls": [{"id": "a", "function": NAMED}]}]},
            "messages[0].tool_calls",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_a_field_that_does_not_fit_is_named(fields: dict[str, Any], param: str) -> None:
    with scripted("</think>") as server:
        status, reply = server.request("POST", CHAT, {**ASK, **fields})
    assert (status, reply["error"]["param"]) == (400, param)
