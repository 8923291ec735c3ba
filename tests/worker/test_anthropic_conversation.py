"""What the Messages API's turns, blocks and tools mean, and which of them are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ds4_common.errors import RequestError
from ds4_worker.http.anthropic.body import MessagesBody
from ds4_worker.http.anthropic.conversation import plain_tools, plain_turns
from ds4_worker.http.conversation import Call, Turn


def body(*turns: dict[str, Any], **fields: Any) -> MessagesBody:
    return msgspec.convert({"messages": list(turns), **fields}, MessagesBody)


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def test_content_is_a_string_or_blocks_of_text_without_separator() -> None:
    turns = plain_turns(body({"role": "user", "content": "a"}, user(text("b"), "c", text("d"))))
    assert turns == [Turn(role="user", content="a"), Turn(role="user", content="bcd")]


def test_the_system_prompt_loses_the_bookkeeping_of_clients() -> None:
    blocks = [text("x-anthropic-billing-header: cc"), text("one"), text("two")]
    assert plain_turns(body(user("hi"), system=blocks))[0] == Turn(
        role="system", content="one\ntwo"
    )
    assert plain_turns(body(user("hi"), system="plain"))[0].content == "plain"
    assert plain_turns(body(user("hi"), system=[blocks[0]]))[0].role == "user"


def test_an_assistants_turn_keeps_reasoning_text_and_calls_together() -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "xx"},
        text("I look."),
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"b": [1], "a": "ü"}},
    ]
    (turn,) = plain_turns(body({"role": "assistant", "content": content}))
    call = Call(id="toolu_1", name="look", arguments='{"b":[1],"a":"ü"}')
    assert turn == Turn(role="assistant", content="I look.", reasoning="hm", calls=(call,))


def test_tool_results_are_turns_of_their_own_in_place_and_know_their_tool() -> None:
    calls = [
        {"type": "tool_use", "id": "1", "name": "look", "input": {}},
        {"type": "tool_use", "id": "2", "name": "run", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "2", "content": "done"},
        {"type": "tool_result", "tool_use_id": "1", "content": [text("a"), "b"]},
        text("and now?"),
        {"type": "tool_result", "tool_use_id": "3"},
    ]
    turns = plain_turns(body({"role": "assistant", "content": calls}, user(*results)))
    assert turns[1:] == [
        Turn(role="tool", content="done", call_id="2", name="run"),
        Turn(role="tool", content="ab", call_id="1", name="look"),
        Turn(role="user", content="and now?"),
        Turn(role="tool", content="", call_id="3"),
    ]


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ("no such file", "Error: no such file"),
        ("Error: no such file", "Error: no such file"),
        ("<tool_use_error>x</tool_use_error>", "<tool_use_error>x</tool_use_error>"),
    ],
)
def test_a_failed_tool_says_so_in_its_text(said: str, seen: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": said}
    assert plain_turns(body(user(result)))[0].content == seen


def test_a_system_turn_in_the_middle_stays_there() -> None:
    turns = plain_turns(body(user("hi"), {"role": "system", "content": "be brief"}))
    assert turns[1] == Turn(role="system", content="be brief")


@pytest.mark.parametrize(
    ("turn", "path", "message"),
    [
        (user(text("a"), {"type": "image"}), "messages[0].content[1]", "takes no images"),
        (user({"type": "tool_use", "id": "1", "name": "n", "input": {}}), "messages[0].content[0]",
         "got a block of type 'tool_use', expected text or tool_result"),
        (user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
         "messages[0].content[0].content[0]", "expected text"),
        ({"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
         "messages[0].content[0]", "expected text, thinking or tool_use"),
    ],
)  # fmt: skip
def test_what_a_text_model_cannot_take_is_refused_by_its_place(
    turn: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        plain_turns(body(turn))
    assert (refusal.value.param, refusal.value.code) == (path, "unsupported_content")


def test_no_turns_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one"):
        plain_turns(body())


def test_tools_need_a_schema_and_names_of_their_own() -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string"}}}
    given = body(
        user("hi"),
        tools=[{"name": "look", "description": "d", "input_schema": schema, "cache_control": {}}],
    )
    (tool,) = plain_tools(given.tools)
    assert (tool.name, tool.description, tool.parameters) == ("look", "d", schema)
    hosted = body(user("hi"), tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(RequestError, match="'web_search' of type 'web_search_20250305'") as refusal:
        plain_tools(hosted.tools)
    assert refusal.value.param == "tools[0]"
    twice = body(user("hi"), tools=[{"name": "a", "input_schema": {}}] * 2)
    with pytest.raises(RequestError, match="a second tool named 'a'"):
        plain_tools(twice.tools)
