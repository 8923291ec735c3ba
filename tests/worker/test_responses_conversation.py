"""What the Responses API's items and tools mean, and which of them are refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ds4_common.errors import RequestError
from ds4_worker.http.conversation import Call, Turn
from ds4_worker.http.responses.body import ResponsesBody, ToolSpec
from ds4_worker.http.responses.conversation import plain_turns
from ds4_worker.http.responses.tools import Toolbox


def turns(*items: dict[str, Any], **fields: Any) -> list[Turn]:
    body = msgspec.convert({"input": list(items), **fields}, ResponsesBody)
    return plain_turns(body, Toolbox())


def message(role: str, *parts: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": list(parts)}


def text(words: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def called(id_: str, name: str = "run", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments}


def call(id_: str, name: str = "run", arguments: str = "{}") -> Call:
    return Call(id=id_, name=name, arguments=arguments)


def test_a_string_is_a_users_message_after_the_instructions() -> None:
    body = msgspec.convert({"input": "hi", "instructions": "be brief"}, ResponsesBody)
    assert plain_turns(body, Toolbox()) == [
        Turn(role="system", content="be brief"),
        Turn(role="user", content="hi"),
    ]


def test_messages_may_lack_a_type_and_hold_texts_of_any_kind() -> None:
    easy = {"role": "developer", "content": "rules"}
    answer = message("assistant", text("b", "output_text"), {"type": "refusal", "refusal": "c"})
    assert turns(easy, message("user", text("a"), "!"), answer) == [
        Turn(role="system", content="rules"),
        Turn(role="user", content="a!"),
        Turn(role="assistant", content="bc"),
    ]


def test_reasoning_belongs_to_the_assistants_next_item() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [text("a", "summary_text")],
        "content": [text("b", "reasoning_text")],
        "encrypted_content": None,
    }
    assert turns(reasoning, message("assistant", text("hi", "output_text"))) == [
        Turn(role="assistant", content="hi", reasoning="ab")
    ]
    assert turns(reasoning, called("1")) == [
        Turn(role="assistant", reasoning="ab", calls=(call("1"),))
    ]
    assert turns(reasoning) == [Turn(role="assistant", reasoning="ab")]


def test_calls_join_the_assistants_message_before_them_and_results_follow() -> None:
    output = {"type": "function_call_output", "call_id": "2", "output": [text("x"), text("y")]}
    assert turns(message("assistant", "I run."), called("1"), called("2", "look"), output) == [
        Turn(role="assistant", content="I run.", calls=(call("1"), call("2", "look"))),
        Turn(role="tool", content="xy", call_id="2", name="look"),
    ]


def test_calls_of_hosted_and_custom_tools_become_calls_like_any_other() -> None:
    items: list[dict[str, Any]] = [
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "***"},
        {"type": "local_shell_call", "id": "ls_2", "call_id": "2", "action": {"type": "exec"}},
        {"type": "web_search_call", "id": "ws_3", "action": {"query": "q"}, "status": "completed"},
        {"type": "image_generation_call", "id": "ig_4", "revised_prompt": "cat", "result": "AA"},
        {"type": "tool_search_call", "call_id": "5", "arguments": {"query": "maps"}},
        {"type": "function_call", "call_id": "6", "namespace": "m.", "name": "x", "arguments": ""},
        {"type": "local_shell_call_output", "id": "2", "output": "ok"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "applied"},
    ]
    assistant, shell, patch = turns(*items)
    assert assistant.calls == (
        call("1", "patch", '{"input":"***"}'),
        call("2", "local_shell", '{"type":"exec"}'),
        call("ws_3", "web_search", '{"query":"q"}'),
        call("ig_4", "image_generation", '{"prompt":"cat"}'),
        call("5", "tool_search", '{"query":"maps"}'),
        call("6", "m.x", ""),
    )
    assert shell == Turn(role="tool", content="ok", call_id="2", name="local_shell")
    assert patch == Turn(role="tool", content="applied", call_id="1", name="patch")


def test_a_search_loads_the_tools_that_it_found() -> None:
    loaded = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    item = {"type": "tool_search_output", "call_id": "1", "tools": [loaded]}
    more = {"type": "additional_tools", "role": "developer", "tools": [{**loaded, "name": "run"}]}
    box = Toolbox()
    (turn,) = plain_turns(msgspec.convert({"input": [item, item, more]}, ResponsesBody), box)[:1]
    assert json.loads(turn.content) == [loaded]
    assert [tool.name for tool in box.tools] == ["look", "run"]


def test_compactions_are_skipped() -> None:
    assert turns({"type": "compaction", "encrypted_content": "x"}, message("user", "a")) == [
        Turn(role="user", content="a")
    ]


@pytest.mark.parametrize(
    ("item", "path"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"content": "x"}, "input[0].type"),
        ({**called("1"), "status": "in_progress"}, "input[0].status"),
        (message("robot", "x"), "input[0].role"),
        (message("user", {"type": "input_image", "image_url": "x"}), "input[0].content[0]"),
        ({"type": "function_call", "call_id": "1", "arguments": "{}"}, "input[0].name"),
        ({"type": "function_call", "name": "n", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "name": "n", "call_id": "1"}, "input[0].arguments"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_its_place(item: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError) as refusal:
        turns(item)
    assert refusal.value.param == path
    assert path in str(refusal.value)


def test_no_items_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one item"):
        turns()


# --- tools


def test_tools_are_known_to_the_model_by_unique_names() -> None:
    box = Toolbox()
    inner = ToolSpec(type="function", name="look", description="d", parameters={"type": "object"})
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    specs = [
        ToolSpec(type="namespace", name="maps__", description="of maps", tools=[inner]),
        ToolSpec(type="custom", name="patch", description="edits", format=grammar),
        ToolSpec(type="tool_search", description="finds tools"),
        ToolSpec(type="web_search"),
    ]
    box.add(specs, "tools")
    look, patch, search = box.tools
    assert (look.name, look.description, look.parameters) == ("maps__look", "d", inner.parameters)
    assert patch.description == "edits\n\nThe input follows this grammar:\nstart: /x/"
    assert patch.parameters["required"] == ["input"]
    assert (search.name, search.parameters["required"]) == ("tool_search", ["query"])
    assert box.find("maps__look").namespace == "maps__"
    assert box.find("unknown").kind == "function"
    assert (box.prompt_name("look"), box.prompt_name("x")) == ("maps__look", None)
    with pytest.raises(RequestError, match="another tool is named 'patch'"):
        box.add([ToolSpec(type="function", name="patch")], "tools")
    with pytest.raises(RequestError, match="needs a name") as refusal:
        box.add([ToolSpec(type="namespace", name="n", tools=[ToolSpec(type="function")])], "tools")
    assert refusal.value.param == "tools[0].tools[0].name"
    box.restrict(["look"])
    assert [tool.name for tool in box.tools] == ["maps__look"]


def test_a_deferred_tool_is_offered_once_a_search_has_found_it() -> None:
    found = ToolSpec(type="function", name="look", defer_loading=True)
    space = ToolSpec(type="namespace", name="maps__", tools=[found])
    box = Toolbox()
    box.add([ToolSpec(type="tool_search"), found, space], "tools")
    assert [tool.name for tool in box.tools] == ["tool_search"]
    box.add([space], "input[1].tools")
    assert [tool.name for tool in box.tools] == ["tool_search", "maps__look"]
