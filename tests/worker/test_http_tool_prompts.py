"""What a template is given of tools, reasoning and roles, also one that knows no tools."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from helpers.fake_model import END_THINK, EOS
from helpers.fake_server import fake_server
from helpers.scripted import TOOLS, Script, tool_model
from helpers.tool_requests import (
    ASK,
    CALL,
    CHAT,
    TIME,
    TWO,
    WEATHER,
    history,
    message_of,
    prompt_of,
    scripted,
)

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
