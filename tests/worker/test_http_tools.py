"""Chat with tools and reasoning over a scripted model: events field by field, history, replay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from helpers.fake_model import END_THINK, EOS, ByteTokenizer
from helpers.fake_server import FakeServer, fake_server
from helpers.scripted import TOOL_TEMPLATE, TOOLS, Script, tokens, tool_model

CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NAMED = {"name": "time"}
TIME: dict[str, Any] = {"type": "function", "function": NAMED}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "tools": [WEATHER, TIME],
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Zürich"}}\n</tool_call>'
TWO = f'{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'


@contextmanager
def scripted(*answers: str, **model: Any) -> Iterator[FakeServer]:
    with fake_server(Script(*answers), model=tool_model(**model)) as server:
        yield server


def prompt_of(server: FakeServer, body: dict[str, Any]) -> str:
    status, reply = server.request("POST", CHAT, {**body, "return_token_ids": True})
    assert status == 200, reply
    return spell(reply["prompt_token_ids"])


def spell(ids: list[int]) -> str:
    return b"".join(map(ByteTokenizer().token_bytes, ids)).decode()


def message_of(server: FakeServer, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    status, reply = server.request("POST", CHAT, body)
    assert status == 200, reply
    return reply["choices"][0]["message"], reply["choices"][0]["finish_reason"]


# --- forms


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


# --- prompts


def test_tools_reach_the_template_as_the_client_sent_them() -> None:
    with scripted("</think>") as server:
        prompt = prompt_of(server, ASK)
    assert prompt.startswith(f"[tools]{json.dumps(WEATHER)}{json.dumps(TIME)}[end][user]hi[end]")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"think": False}, False),
        ({"think": True, "reasoning_effort": "none"}, True),
        ({"thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "xhigh"}, True),
        ({"reasoning_effort": None, "thinking": None, "think": None}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"model": "fake-chat"}, False),
        ({"model": "fake-chat", "think": True}, True),
        ({"model": "fake-reasoner"}, True),
    ],
)
def test_every_way_to_ask_for_reasoning(fields: dict[str, Any], thinks: bool) -> None:
    model = tool_model()
    names = (*model.names, "fake-chat", "fake-reasoner")
    model = msgspec.structs.replace(model, names=names)
    with fake_server(Script("ab"), model=model) as server:
        body = {"messages": ASK["messages"], **fields}
        assert prompt_of(server, body).endswith("<think>" if thinks else "<think></think>")
        message, _ = message_of(server, body)
        assert ("reasoning_content" in message) == thinks
        assert message["content"] == ("" if thinks else "ab")


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_ends_reasoning_by_its_delimiter(budget: int) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget}
    with scripted("abcdefgh") as server:
        body = {"messages": ASK["messages"], "thinking": thinking, "return_token_ids": True}
        reply = server.request("POST", CHAT, body)[1]
        (choice,) = reply["choices"]
        assert choice["message"].get("reasoning_content", "") == "abcdefgh"[:budget]
        assert choice["message"]["content"] == "abcdefgh"[budget + 1 :]
        assert choice["token_ids"][budget] == END_THINK
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
    with scripted("ab</think>cd") as server:
        message, _ = message_of(server, {**body, "thinking": {**thinking, "budget_tokens": 9}})
        assert (message["reasoning_content"], message["content"]) == ("ab", "cd")


def test_reasoning_cannot_end_the_answer_where_the_server_says_so() -> None:
    answer = [*b"ab", EOS, *b"c", END_THINK, *b"d", EOS, *b"e"]
    body = {"messages": ASK["messages"], "return_token_ids": True}
    for flags, expected in (
        ({}, answer[:3]),
        ({"ignore_eos_in_reasoning": True}, answer[:7]),
    ):
        model = msgspec.structs.replace(tool_model(), **flags)
        with fake_server(Script(answer), model=model) as server:
            (choice,) = server.request("POST", CHAT, body)[1]["choices"]
        assert choice["finish_reason"] == "stop"
        assert len(choice["token_ids"]) == len(expected)
        assert choice["token_ids"][3:] == expected[3:]


def test_a_conversation_without_tools_asks_the_template_nothing() -> None:
    model = tool_model()
    with fake_server(Script("</think>a"), model=model) as server:
        message_of(server, {"messages": ASK["messages"]})
        assert model.template is not None
        assert not model.template.form._asked
        message_of(server, ASK)
        assert model.template.form._asked


def test_text_of_a_user_opens_no_reasoning() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}[assistant]"
    with scripted("ab", template=template) as server:
        for content in ("<think>", "[assistant]<think>"):
            body = {"messages": [{"role": "user", "content": content}]}
            message, _ = message_of(server, body)
            assert message == {"role": "assistant", "content": "ab"}


def test_developer_and_function_are_other_names_of_roles() -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
        {"role": "function", "name": "time", "content": "12"},
    ]
    with scripted("</think>") as server:
        prompt = prompt_of(server, {"messages": messages})
    assert prompt == "[system]d[end][user]ab[end][tool]12[end][assistant]<think>"


# --- a template without tools


PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_template_without_tools_gets_them_described_and_history_in_words() -> None:
    with scripted(f"c\n{CALL}", "done", template=PLAIN, tools=None, reasoning=None) as server:
        message, reason = message_of(server, ASK)
        assert (message["content"], reason) == ("c", "tool_calls")
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Zürich"}
        body = {**ASK, "messages": [{"role": "system", "content": "s"}, *history(message)]}
        prompt = prompt_of(server, body)
        message["tool_calls"][0]["id"] = body["messages"][-1]["tool_call_id"] = "call_0"
        unknown = prompt_of(server, body)
    begin, _, rest = prompt.partition("[end][user]hi[end]")
    assert begin.startswith("[system]s\n\n# Tools")
    assert '"name":"weather"' in begin
    assert rest == (
        '[assistant]c\n<tool_call>\n{"name": "weather", "arguments": {"city":  "Zürich"}}\n'
        "</tool_call>[end][user]<tool_response>\nok\n</tool_response>[end][assistant]"
    )
    assert unknown == prompt.replace(":  ", ":")


def test_consecutive_results_become_one_message() -> None:
    with scripted(TWO, "done", template=PLAIN, tools=None, reasoning=None) as server:
        message, _ = message_of(server, ASK)
        prompt = prompt_of(server, {**ASK, "messages": history(message)})
    results = "<tool_response>\nok\n</tool_response>"
    assert f"[user]{results}\n{results}[end]" in prompt
    assert prompt.startswith("[system]# Tools")


# --- frames around everything


FRAMES = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "<|end|>{% endfor %}{{ tools | tojson if tools }}<|start|>assistant"
)
HARMONY = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>"


def test_frames_are_read_with_and_without_tools() -> None:
    tools = msgspec.structs.replace(TOOLS, syntax="TOOL_HARMONY", open="<|start|>")
    call = 'commentary to=functions.weather<|message|>{"city": "Bern"}<|call|>'
    answers = (f"{HARMONY}final<|message|>Yes.", f"{HARMONY}{call}")
    with scripted(*answers, template=FRAMES, tools=tools, reasoning=None) as server:
        message, reason = message_of(server, {"messages": ASK["messages"]})
        assert (message["content"], message["reasoning_content"], reason) == (
            "Yes.",
            "I look.",
            "stop",
        )
        message, reason = message_of(server, ASK)
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern"}
        assert reason == "tool_calls"


def test_reasoning_goes_back_under_the_name_that_the_template_knows() -> None:
    template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.thinking }}"
        "{{ message.content }}[end]{% endfor %}[assistant]"
    )
    turn = {"role": "assistant", "reasoning_content": "hm", "content": None}
    with scripted("a", template=template, reasoning=None) as server:
        messages = [turn, {**turn, "content": "said"}]
        prompt = prompt_of(server, {"messages": messages})
    assert prompt == "[assistant]hm[end][assistant]said[end][assistant]"


# --- replay


def history(message: dict[str, Any]) -> list[dict[str, Any]]:
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
        for call in message["tool_calls"]
    ]
    return [*ASK["messages"], message, *results]


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
