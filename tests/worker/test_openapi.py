"""The OpenAPI document: complete, true to the routes, and what a generator of requests finds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ds4_worker.http.app import App
from ds4_worker.http.openapi import document
from helpers.fake_server import FakeServer, fake_server
from helpers.scripted import Script, tool_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own dependencies
    import schemathesis
    import schemathesis.checks
    from schemathesis import GenerationMode

SCHEMA = schemathesis.openapi.from_dict(json.loads(document()))
FOUND: list[Any] = list(SCHEMA.get_all_operations())
OPERATIONS = [operation.ok() for operation in FOUND]
CHECKS = [
    getattr(schemathesis.checks, name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    )
]

COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
CLAIMED = {"name": "f", "input_schema": {"type": "object"}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "tools": [FUNCTION], "logprobs": True},
    "/v1/completions": {"prompt": "hi", "logprobs": 1, "return_token_ids": True},
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", "name": "f"}],
        "reasoning": {"summary": "auto"},
        "top_logprobs": 1,
    },
    "/v1/messages": {"messages": HELLO, "tools": [CLAIMED]},
    COUNT: {"messages": HELLO, "tools": [CLAIMED]},
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(Script("hm</think>ok"), model=tool_model()) as running:
        yield running


def test_it_holds_every_route_and_no_other() -> None:
    paths = json.loads(document())["paths"]
    described = {path: {method.upper() for method in item} for path, item in paths.items()}
    served = {path: set(methods) for path, methods in App()._routes.items()}
    del served["/"]  # the page
    served["/v1/models/{id}"] = {"GET"}
    assert described == served


def test_its_references_lead_somewhere_and_its_names_are_short() -> None:
    whole = json.loads(document())
    schemas = whole["components"]["schemas"]
    assert all("." not in name for name in schemas)
    prefix = "#/components/schemas/"

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (v for k, v in value.items() if k == "$ref")
            for inner in value.values():
                yield from walk(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from walk(inner)

    references = list(walk(whole))
    assert references
    assert all(reference.removeprefix(prefix) in schemas for reference in references)
    for path in ("/v1/messages", "/v1/responses", "/v1/chat/completions"):
        answers = whole["paths"][path]["post"]["responses"]
        assert set(answers) >= {"200", "400", "401", "404", "413", "429", "500", "503"}
        stream = answers["200"]["content"]["text/event-stream"]
        assert stream["schema"]


def test_the_server_gives_it_out(server: FakeServer) -> None:
    status, body = server.request("GET", "/openapi.json")
    assert status == 200
    assert body == json.loads(document())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
def test_good_requests_get_the_answers_that_are_described(path: str, stream: bool) -> None:
    (operation,) = (operation for operation in OPERATIONS if operation.path == path)
    body = {**REQUESTS[path], "temperature": 0, "max_tokens": 300, "stream": stream}
    said = Script('hm</think>ok\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    with fake_server(said, model=tool_model()) as running:
        case = operation.Case(method="POST", body=body)
        base_url = f"http://127.0.0.1:{running.port}"
        reply = case.call_and_validate(base_url=base_url, checks=CHECKS)
    assert reply.status_code == 200, reply.text
    assert ("text/event-stream" in reply.headers["content-type"][0]) == (stream and path != COUNT)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda m: m.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.path)
def test_generated_requests_get_the_answers_that_are_described(
    operation: Any, mode: GenerationMode, server: FakeServer
) -> None:
    if mode.is_negative and operation.method == "get":
        return  # nothing in it could be wrong

    @settings(
        max_examples=4,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and case.body.get("max_tokens") is None:
            case.body["max_tokens"] = 4
        case.call_and_validate(base_url=f"http://127.0.0.1:{server.port}", checks=CHECKS)

    check()
