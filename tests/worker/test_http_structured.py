"""Structured answers over HTTP: a model that draws any byte at random is held to every grammar."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ds4_worker.executor.api import ExecutorConfig
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY
from helpers.fake_server import FakeServer, fake_server
from helpers.scripted import Script, tool_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: "<" word ">"\nword: /[a-c]{2,5}/'
GBNF = 'root ::= "<" word ">"\nword ::= [a-c] [a-c] [a-c]?'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 3}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


def random_bytes(banks: int = 3) -> FakeExecutor:
    return FakeExecutor(
        ExecutorConfig(banks=banks, context_tokens=4096), vocabulary=VOCABULARY, page_tokens=64
    )


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and 0 <= value["age"] < 200 and len(value["name"]) <= 4


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_word(text: str) -> bool:
    return re.fullmatch("<[a-c]{2,5}>", text) is not None


@pytest.mark.parametrize("temperature", [0, 1])
def test_drafts_under_a_grammar_give_the_answer_without_them(temperature: float) -> None:
    schema = {"type": "array", "items": {"enum": ["ab", "abc"]}, "minItems": 9, "maxItems": 9}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {**HELLO, "response_format": form, "temperature": temperature, "seed": 4}
    answers = []
    for speculate in ("off", 6):
        executor = random_bytes()
        with fake_server(executor, speculate=speculate) as server:
            status, reply = server.request("POST", CHAT, {**body, "max_tokens": 200})
            stats = server.request("GET", "/v1/stats")[1]
        assert status == 200
        answers.append(reply["choices"])
        assert len(json.loads(reply["choices"][0]["message"]["content"])) == 9
    assert answers[0] == answers[1]
    assert stats["tokens"]["draft_accepted"] > 0


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


ASKED: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "strict schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": SCHEMA, "strict": True},
            }
        },
        is_person,
    ),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        is_person,
    ),
    "json_object with a schema": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        is_person,
    ),
    "regex": ({"response_format": {"type": "regex", "value": "<[a-c]{2,5}>"}}, is_word),
    "lark": ({"response_format": {"type": "lark", "value": LARK}}, is_word),
    "structured_outputs.json": ({"structured_outputs": {"json": SCHEMA}}, is_person),
    "structured_outputs.json as text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        is_person,
    ),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "<[a-c]+>"}}, bool),
    "structured_outputs.choice": (
        {"structured_outputs": {"choice": ["yes", 'no "or" so']}},
        lambda text: text in ("yes", 'no "or" so'),
    ),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": LARK}}, is_word),
    "guided_json": ({"guided_json": SCHEMA}, is_person),
    "guided_regex": ({"guided_regex": "<[a-c]{2,5}>"}, is_word),
    "guided_choice": ({"guided_choice": ["a", "b"]}, lambda text: text in ("a", "b")),
    "guided_grammar": ({"guided_grammar": LARK}, is_word),
    "json_schema": ({"json_schema": SCHEMA}, is_person),
    "grammar in GBNF": ({"grammar": GBNF}, is_word),
}


@pytest.fixture(scope="module")
def server() -> Any:
    with fake_server(random_bytes()) as running:
        yield running


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_answer_matches_what_was_asked_for(server: FakeServer, path: str, name: str) -> None:
    fields, fits = ASKED[name]
    prompt = HELLO if path == CHAT else {"prompt": "hi"}
    for seed in range(3):
        body = {**prompt, **fields, "seed": seed, "temperature": 1, "max_tokens": 2000}
        status, reply = server.request("POST", path, body)
        assert status == 200, reply
        choice = reply["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert choice["finish_reason"] == "stop"
        assert fits(text), text


def test_any_object_is_an_object(server: FakeServer) -> None:
    body = {**HELLO, "response_format": {"type": "json_object"}, "max_tokens": 3000, "top_p": 1}
    for seed in range(3):
        _, reply = server.request("POST", CHAT, {**body, "seed": seed})
        choice = reply["choices"][0]
        assert choice["message"]["content"].lstrip().startswith("{")
        assert choice["finish_reason"] == "length" or is_object(choice["message"]["content"])


def test_a_stream_ends_when_the_grammar_is_complete(server: FakeServer) -> None:
    events = server.events(CHAT, {**HELLO, "guided_regex": "ab", "return_token_ids": True})
    ids = [i for e in events[:-1] for c in e["choices"] for i in c.get("token_ids") or ()]
    assert ids == list(b"ab")  # no end-of-sequence was needed
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_json": {"type": "nonsense"}}, "guided_json", "Invalid type: nonsense"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", 'unknown name: "foo"'),
        ({"grammar": "root ::= foo"}, "grammar", "not a GBNF grammar"),
        ({"guided_json": "{"}, "guided_json", "not a JSON schema"),
        ({"guided_choice": []}, "guided_choice", "is empty"),
        ({"guided_regex": "a" * (1 << 19)}, "guided_regex", "at most"),
        ({"guided_regex": "(" * 5000 + "a" + ")" * 5000}, "guided_regex", "invalid regex"),
        ({"guided_grammar": "start: " + "(" * 50000}, "guided_grammar", ""),
        ({"grammar": "root ::= " + "(" * 50000}, "grammar", "recursion"),
        ({"guided_json": nested(120)}, "guided_json", "recursion limit"),
        (
            {"guided_json": {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}},
            "guided_json",
            "",
        ),
        ({"guided_json": {"enum": [f"value {i}" for i in range(20000)]}}, "guided_json", "at most"),
        (
            {"guided_json": {"properties": {f"p{i}": {"maxLength": i} for i in range(4000)}}},
            "guided_json",
            "too big",
        ),
        ({"guided_json": {"type": "integer", "multipleOf": 999983}}, "guided_json", "multipleOf"),
        (
            {"guided_json": {"allOf": [{"multipleOf": 99.7}, {"multipleOf": 9.91}]}},
            "guided_json",
            "least common multiple",
        ),
        (
            {"guided_grammar": 'start: %json {"type": "integer", "multipleOf" : 999983}'},
            "guided_grammar",
            "multipleOf",
        ),
        ({"guided_grammar": "start: a\na: b\nb: a"}, "guided_grammar", "no text fits the grammar"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text fits the grammar"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json constrains"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "array", "contains": {}}, "strict": True},
                }
            },
            "response_format.json_schema.schema",
            "Unimplemented keys",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        ({"response_format": {"type": "regex"}}, "response_format.value", "is missing"),
        ({"guided_regex": "a", "stop": "b"}, "stop", "cannot be combined with guided_regex"),
        ({"guided_regex": 5}, "guided_regex", "Expected `str | null`"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    server: FakeServer, fields: dict[str, Any], param: str, message: str
) -> None:
    for path, prompt in ((CHAT, HELLO), (TEXT, {"prompt": "hi"})):
        status, reply = server.request("POST", path, {**prompt, **fields})
        assert (status, reply["error"]["param"]) == (400, param)
        assert message in reply["error"]["message"]
        assert "<non-verbose/>" not in reply["error"]["message"]
        assert len(reply["error"]["message"]) < 2000


def test_there_may_be_thousands_of_choices(server: FakeServer) -> None:
    choices = [str(number) for number in range(10_000)]
    body = {"prompt": "hi", "max_tokens": 20, "guided_choice": ["", *choices]}
    status, reply = server.request("POST", TEXT, body)
    assert status == 200, reply
    assert reply["choices"][0]["text"] in {"", *choices}


def test_numbers_in_steps_are_no_large_grammar(server: FakeServer) -> None:
    steps = {"guided_json": {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 0.25}}
    status, reply = server.request("POST", TEXT, {"prompt": "hi", "max_tokens": 99, **steps})
    assert status == 200, reply
    assert float(reply["choices"][0]["text"]) % 0.25 == 0


def test_a_schema_that_is_not_strict_may_hold_what_is_not_enforced(server: FakeServer) -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    status, reply = server.request("POST", CHAT, {**HELLO, "response_format": form})
    assert status == 200, reply


def test_token_stops_and_biases_go_with_a_grammar(server: FakeServer) -> None:
    """`b` is banned and `c` stops: only `a` and `c` can come, and `c` is not shown."""
    fields = {"guided_regex": "[abc]{300}", "logit_bias": {str(ord("b")): -100}}
    body = {**HELLO, **fields, "stop_token_ids": [ord("c")], "max_tokens": 400}
    _, reply = server.request("POST", CHAT, body)
    assert set(reply["choices"][0]["message"]["content"]) <= {"a"}
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_a_grammar_ends_what_ignores_end_of_sequence(server: FakeServer) -> None:
    for expression, reason in (("ab", "stop"), ("a*", "length")):
        body = {**HELLO, "guided_regex": expression, "ignore_eos": True, "max_tokens": 50}
        _, reply = server.request("POST", CHAT, body)
        assert reply["choices"][0]["finish_reason"] == reason


def test_choices_of_one_request_have_places_of_their_own(server: FakeServer) -> None:
    body = {**HELLO, "guided_json": SCHEMA, "n": 3, "seed": 5, "max_tokens": 2000}
    _, reply = server.request("POST", CHAT, body)
    answers = [choice["message"]["content"] for choice in reply["choices"]]
    assert all(map(is_person, answers))
    assert len(set(answers)) == 3
    alone = [{**body, "n": 1, "seed": 5 + i} for i in range(3)]
    replies = [server.request("POST", CHAT, one)[1] for one in alone]
    assert [reply["choices"][0]["message"]["content"] for reply in replies] == answers


# --- tools -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ],
    ids=["required", "named"],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_tool_is_called(choice: Any, names: set[str], parallel: bool) -> None:
    with fake_server(random_bytes(), model=tool_model(banks=3)) as running:
        for seed in range(3):
            body = {**HELLO, "tools": [WEATHER, CLOCK], "tool_choice": choice, "seed": seed}
            body |= {"parallel_tool_calls": parallel, "max_tokens": 3000, "temperature": 1}
            status, reply = running.request("POST", CHAT, body)
            assert status == 200, reply
            answer = reply["choices"][0]
            if answer["finish_reason"] == "length":
                continue  # a random model may reason, or call, for long
            calls = answer["message"]["tool_calls"]
            assert answer["finish_reason"] == "tool_calls"
            assert {call["function"]["name"] for call in calls} <= names
            assert all(is_object(call["function"]["arguments"]) for call in calls)
            assert parallel or len(calls) == 1


def test_a_structured_answer_may_reason_first() -> None:
    with fake_server(random_bytes(), model=tool_model(banks=3)) as running:
        body = {**HELLO, "guided_json": SCHEMA, "seed": 1, "max_tokens": 4000, "temperature": 1}
        body |= {"thinking": {"type": "enabled", "budget_tokens": 20}}
        _, reply = running.request("POST", CHAT, body)
    message = reply["choices"][0]["message"]
    assert is_person(message["content"])
    assert message["reasoning_content"]


# --- failures ----------------------------------------------------------------------------------


def test_a_token_that_the_grammar_forbids_fails_its_sequence_alone() -> None:
    """The script says what it wants, whatever the mask: the library's error state would look like
    a clean stop."""
    with fake_server(Script("xyz", "fine", stubborn=True)) as running:
        status, reply = running.request("POST", CHAT, {**HELLO, "guided_regex": "abc"})
        assert (status, reply["error"]["code"]) == (500, "grammar_failure")
        status, reply = running.request("POST", CHAT, HELLO)
        assert reply["choices"][0]["message"]["content"] == "fine"


def test_without_the_library_a_grammar_is_not_implemented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "ds4_worker.grammar.compiler", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with fake_server(random_bytes()) as running:
        status, reply = running.request("POST", CHAT, {**HELLO, "guided_regex": "a"})
        assert (status, reply["error"]["param"]) == (501, "guided_regex")
        assert "pip install llguidance" in reply["error"]["message"]
        assert running.request("POST", CHAT, {**HELLO, "max_tokens": 1})[0] == 200


def test_the_library_is_loaded_by_the_first_grammar_only() -> None:
    code = "import sys, ds4_worker.serve; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- counters ----------------------------------------------------------------------------------


def test_steps_under_a_grammar_are_counted() -> None:
    with fake_server(random_bytes()) as running:
        service = running.app.service
        assert service is not None
        stats = service.engine.stats
        running.request("POST", CHAT, {**HELLO, "max_tokens": 5})
        assert (stats.constrained_max_inflight, stats.mixed_grammar_decode_steps) == (0, 0)
        running.request("POST", CHAT, {**HELLO, "guided_regex": "abc"})
        assert (stats.constrained_max_inflight, stats.mixed_grammar_decode_steps) == (1, 0)


# --- the other APIs ----------------------------------------------------------------------------


def test_every_api_holds_its_answers_to_a_schema(server: FakeServer) -> None:
    limit = {"max_output_tokens": 2000}
    form = {"type": "json_schema", "name": "p", "schema": SCHEMA, "strict": True}
    body = {"input": "hi", "text": {"format": form}, "temperature": 1, **limit}
    status, reply = server.request("POST", "/v1/responses", body)
    assert status == 200, reply
    assert is_person(reply["output"][-1]["content"][0]["text"])
    body = {"messages": HELLO["messages"], "max_tokens": 2000, "temperature": 1}
    body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    status, reply = server.request("POST", "/v1/messages", body)
    assert status == 200, reply
    assert is_person(reply["content"][-1]["text"])
    body["output_config"] = {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}
    status, reply = server.request("POST", "/v1/messages", body)
    assert (status, reply["type"]) == (400, "error")
    assert "Invalid type" in reply["error"]["message"]
