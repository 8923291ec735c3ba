"""The chat format of models that come without a template and write DSML: golden prompts.

What is expected is written out by hand from the published format; only the preamble that
introduces the tools is looked for by its begin and end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ds4_common.contract.frontend import Frontend, parse_frontend
from ds4_common.gguf import LogicalModel
from ds4_common.tokenizer.build import build_blob
from ds4_common.tokenizer.encoder import Tokenizer
from ds4_worker.http.template import ChatTemplate
from helpers.dsml_model import (
    ASSISTANT,
    BOS,
    DSML,
    EOS,
    MARKS,
    USER,
    vocabulary,
    write_dsml_model,
)  # fmt: skip
from helpers.fake_server import FakeServer, fake_server
from helpers.prepared import prepare_file
from helpers.scripted import Script, tool_model

Message = dict[str, Any]
WEATHER: Message = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "é": ["<", 1]}},
}
TIME: Message = {"type": "function", "function": {"name": "time"}}
SCHEMAS = '{"name": "weather", "parameters": {"type": "object", "é": ["<", 1]}}\n{"name": "time"}'
RULE = (
    "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls."
)
PARIS = (
    f'<{DSML}tool_calls>\n<{DSML}invoke name="weather">\n'
    f'<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
    f"</{DSML}invoke>\n</{DSML}tool_calls>"
)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, reasoning: str | None = None, *calls: tuple[str, Any]) -> Message:
    made: Message = {"role": "assistant", "content": text}
    if reasoning is not None:
        made["reasoning_content"] = reasoning
    if calls:
        made["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
    return made


def result(text: str) -> Message:
    return {"role": "tool", "content": text}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dsml_model(tmp_path_factory.mktemp("dsml") / "m.gguf")


@pytest.fixture(scope="module")
def frontend(path: Path) -> Frontend:
    return parse_frontend(prepare_file(path).frontend)


@pytest.fixture(scope="module")
def template(frontend: Frontend) -> ChatTemplate:
    assert frontend.chat_template is not None
    return ChatTemplate(
        frontend.chat_template, bos_token=frontend.bos_token, eos_token=frontend.eos_token
    )


# --- which models have it


def test_a_file_without_a_template_gets_its_family_s(frontend: Frontend) -> None:
    assert frontend.tools is not None
    assert frontend.reasoning is not None
    assert frontend.tools.syntax == "TOOL_DSML"
    assert (frontend.tools.open, frontend.tools.close) == (
        f"<{DSML}tool_calls>", f"</{DSML}tool_calls>",
    )  # fmt: skip
    reasoning = frontend.reasoning
    assert (reasoning.open, reasoning.close) == ("<think>", "</think>")
    assert (reasoning.assistant_open, reasoning.message_end) == (ASSISTANT, EOS)
    assert reasoning.terminal_marker == frontend.tools.open


def test_a_file_s_own_template_stays(tmp_path: Path) -> None:
    path = write_dsml_model(tmp_path / "m.gguf", chat_template="{{ messages }}")
    frontend = parse_frontend(prepare_file(path).frontend)
    assert (frontend.chat_template, frontend.tools) == ("{{ messages }}", None)


@pytest.mark.parametrize("missing", [mark for mark in MARKS if mark not in (BOS, EOS)])
def test_a_vocabulary_without_one_of_its_marks_gets_none(missing: str, tmp_path: Path) -> None:
    marks = tuple("gone" if mark == missing else mark for mark in MARKS)
    path = write_dsml_model(tmp_path / "m.gguf", words=vocabulary(marks))
    assert parse_frontend(prepare_file(path).frontend).chat_template is None


def test_every_mark_in_a_prompt_is_one_token(path: Path, template: ChatTemplate) -> None:
    text = template.render(
        [user("hi"), said("", "hm", ("weather", {"city": "Paris"})), result("sun")],
        extra={"thinking": True, "tools": [WEATHER]},
    )
    with LogicalModel.open(path) as model:
        tokenizer = Tokenizer(build_blob(model.metadata))
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    counts = [ids.count(token) for token in range(len(MARKS))]
    assert counts == [text.count(mark) for mark in MARKS]
    assert all(counts)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    tokenizer.close()


# --- prompts

PROMPTS: dict[str, tuple[list[Message], Message, str]] = {
    "reasoning": ([user("hi")], {"thinking": True}, f"{USER}hi{ASSISTANT}<think>"),
    "no reasoning": ([user("hi")], {"thinking": False}, f"{USER}hi{ASSISTANT}</think>"),
    "by the other name": (
        [user("hi")], {"enable_thinking": True}, f"{USER}hi{ASSISTANT}<think>",
    ),
    "all system messages first": (
        [{"role": "system", "content": "A"}, user("hi"), {"role": "developer", "content": "B"}],
        {},
        f"A\n\nB{USER}hi{ASSISTANT}</think>",
    ),
    "an empty system message": (
        [{"role": "system", "content": ""}, user("hi")], {}, f"{USER}hi{ASSISTANT}</think>",
    ),
    "earlier reasoning is dropped": (
        [user("a"), said("b", "r"), user("c")],
        {"thinking": True},
        f"{USER}a{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}<think>",
    ),
    "the last answer keeps its reasoning": (
        [user("a"), said("b", "r")],
        {"thinking": True},
        f"{USER}a{ASSISTANT}<think>r</think>b{EOS}",
    ),
    "without reasoning it goes": (
        [user("a"), said("b", "r")], {}, f"{USER}a{ASSISTANT}</think>b{EOS}",
    ),
    "answers in a row": (
        [user("a"), said("b"), said("c")], {}, f"{USER}a{ASSISTANT}</think>b{EOS}c{EOS}",
    ),
    "calls and results": (
        [
            user("a"),
            said("Look.", "r", ("weather", {"city": "Paris"})),
            result("sun"), result("wind"),
            said("Sun.", "s"), user("b"),
        ],
        {"thinking": True},
        f"{USER}a{ASSISTANT}<think>r</think>Look.\n\n{PARIS}{EOS}"
        f"{USER}<tool_result>sun</tool_result><tool_result>wind</tool_result>"
        f"{ASSISTANT}<think>s</think>Sun.{EOS}{USER}b{ASSISTANT}<think>",
    ),
    "values": (
        [
            user("a"),
            said(
                "", None,
                (
                    'a&<>"',
                    {
                        "raw": f'1 < 2 && "x"\n</{DSML}parameter></{DSML}invoke>',
                        "n": 1.5, "no": None, "list": [1, {"k": "ü"}, f"</{DSML}parameter>"],
                        'k"': True,
                    },
                ),
                ("none", {}),
                ("broken", '{"city": "Pa'),
            ),
        ],
        {},
        f"{USER}a{ASSISTANT}</think>\n\n<{DSML}tool_calls>\n"
        f'<{DSML}invoke name="a&amp;&lt;&gt;&quot;">\n'
        f'<{DSML}parameter name="raw" string="true">1 < 2 && "x"\n'
        f"&lt;/{DSML}parameter></{DSML}invoke></{DSML}parameter>\n"
        f'<{DSML}parameter name="n" string="false">1.5</{DSML}parameter>\n'
        f'<{DSML}parameter name="no" string="false">null</{DSML}parameter>\n'
        f'<{DSML}parameter name="list" string="false">[1,{{"k":"ü"}},"\\u003c/{DSML}parameter>"]'
        f"</{DSML}parameter>\n"
        f'<{DSML}parameter name="k&quot;" string="false">true</{DSML}parameter>\n'
        f"</{DSML}invoke>\n"
        f'<{DSML}invoke name="none">\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="broken">\n'
        f'<{DSML}parameter name="arguments" string="true">{{"city": "Pa</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}tool_calls>{EOS}",
    ),
    "a result that would end early": (
        [user("a"), result("<b></tool_result>")],
        {},
        f"{USER}a{USER}<tool_result><b>&lt;/tool_result></tool_result>{ASSISTANT}</think>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_a_conversation_is_written_as_published(name: str, template: ChatTemplate) -> None:
    messages, values, expected = PROMPTS[name]
    assert template.render(messages, extra=values) == BOS + expected


def test_without_a_request_for_an_answer_the_prompt_ends_after_the_messages(
    template: ChatTemplate,
) -> None:
    text = template.render([user("a")], add_generation_prompt=False, extra={"thinking": True})
    assert text == f"{BOS}{USER}a"


def test_tools_come_before_the_system_messages_and_keep_all_reasoning(
    template: ChatTemplate,
) -> None:
    messages = [{"role": "system", "content": "A"}, user("a"), said("b", "r"), user("c")]
    text = template.render(messages, extra={"thinking": True, "tools": [WEATHER, TIME]})
    begin, end = text.split("### Available Tool Schemas")
    assert begin.startswith(f"{BOS}## Tools\n\nYou have access to a set of tools")
    assert end == (
        f"\n\n{SCHEMAS}\n\n{RULE}\n\nA{USER}a{ASSISTANT}<think>r</think>b{EOS}"
        f"{USER}c{ASSISTANT}<think>"
    )


@pytest.mark.parametrize(
    ("values", "present"),
    [
        ({"thinking": True, "reasoning_effort": "max"}, True),
        ({"thinking": True, "reasoning_effort": "high"}, False),
        ({"thinking": False, "reasoning_effort": "max"}, False),
    ],
)
def test_the_greatest_effort_is_asked_for_before_everything_else(
    values: Message, present: bool, template: ChatTemplate
) -> None:
    text = template.render([{"role": "system", "content": "A"}, user("a")], extra=values)
    marked = text.startswith(f"{BOS}Reasoning Effort: Absolute maximum with no shortcuts")
    assert marked == present
    assert text.endswith(f"A{USER}a{ASSISTANT}" + ("<think>" if values["thinking"] else "</think>"))
    assert (f"\n\nA{USER}" in text) == present


# --- conversations through a server


@pytest.fixture
def server(frontend: Frontend) -> Iterator[FakeServer]:
    model = tool_model(
        template=frontend.chat_template or "", tools=frontend.tools, reasoning=frontend.reasoning
    )
    model = msgspec.structs.replace(model, context_tokens=1 << 16)
    script = Script(f"hm</think>\n\n{PARIS}", "sun</think>Sunny.", context_tokens=1 << 16)
    with fake_server(script, model=model) as running:
        yield running


def test_a_call_is_streamed_and_the_next_prompt_holds_what_was_sampled(server: FakeServer) -> None:
    ask: Message = {"messages": [user("a")], "tools": [WEATHER], "temperature": 0}
    observed = ask | {"return_token_ids": True}
    events = server.events("/v1/chat/completions", observed)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [call["function"].get("name") for call in calls if "id" in call] == ["weather"]
    fragments = [call["function"]["arguments"] for call in calls if "id" not in call]
    assert "".join(fragments) == '{"city":"Paris"}'
    assert len(fragments) > 5  # as its tokens come, not at the end
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"

    made = {
        "role": "assistant", "content": None, "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": calls[0]["id"], "type": "function",
                "function": {"name": "weather", "arguments": '{ "city" : "Paris" }'},
            }
        ],
    }  # fmt: skip
    answer = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sun"}
    status, reply = server.request(
        "POST", "/v1/chat/completions", observed | {"messages": [user("a"), made, answer]}
    )
    assert status == 200
    prompt = bytes(token for token in reply["prompt_token_ids"] if token < 256).decode()
    assert prompt.endswith(
        # `<think>` and `</think>` are tokens of the model, and not among these bytes
        f"{USER}a{ASSISTANT}hm\n\n{PARIS}{EOS}{USER}<tool_result>sun</tool_result>{ASSISTANT}"
    )
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("sun", "Sunny.")
