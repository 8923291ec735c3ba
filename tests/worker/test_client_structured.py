"""Structured answers and forced tools through the official clients, of a model that draws any byte
at random: whatever they get was held to what they asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam
from openai import OpenAI
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel

from ds4_worker.executor.api import ExecutorConfig
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY
from helpers.fake_server import FakeServer, fake_server

HELLO: list[MessageParam] = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOK: FunctionToolParam = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
CLAIMED: ToolParam = {"name": "look", "input_schema": SCHEMA}


class Verdict(BaseModel):
    word: Literal["yes", "no"]
    certain: bool


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    config = ExecutorConfig(banks=2, context_tokens=4096)
    executor = FakeExecutor(config, vocabulary=VOCABULARY, page_tokens=64)
    with fake_server(executor) as running:
        yield running


@pytest.fixture(scope="module")
def responses(server: FakeServer) -> Iterator[OpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with OpenAI(base_url=url, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def messages(server: FakeServer) -> Iterator[Anthropic]:
    url = f"http://127.0.0.1:{server.port}"
    with Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        yield client


def test_a_response_is_parsed_into_the_clients_own_type(responses: OpenAI) -> None:
    reply = responses.responses.parse(model="fake", input="hi", text_format=Verdict)
    assert isinstance(reply.output_parsed, Verdict)
    assert json.loads(reply.output_text) == reply.output_parsed.model_dump()
    with responses.responses.stream(model="fake", input="hi", text_format=Verdict) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Verdict)


def test_a_message_is_parsed_into_the_clients_own_type(messages: Anthropic) -> None:
    reply = messages.messages.parse(
        model="fake", max_tokens=2000, messages=HELLO, output_format=Verdict
    )
    assert isinstance(reply.parsed_output, Verdict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_a_response_calls_the_tool_that_it_must(responses: OpenAI, choice: Any) -> None:
    other: FunctionToolParam = {**LOOK, "name": "look_again"}
    tools = [LOOK] if choice == "required" else [other, LOOK]
    reply = responses.responses.create(
        model="fake", input="hi", tools=tools, tool_choice=choice, parallel_tool_calls=False
    )
    (call,) = reply.output
    assert call.type == "function_call"
    assert call.name == "look"
    assert set(json.loads(call.arguments)) == {"city"}


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_a_message_calls_the_tool_that_it_must(messages: Anthropic, kind: str) -> None:
    choice: Any = {"type": kind, "disable_parallel_tool_use": True}
    if kind == "tool":
        choice["name"] = "look"
    reply = messages.messages.create(
        model="fake", max_tokens=2000, messages=HELLO, tools=[CLAIMED], tool_choice=choice
    )
    call = reply.content[-1]
    assert call.type == "tool_use"
    assert (call.name, set(call.input)) == ("look", {"city"})
    assert reply.stop_reason == "tool_use"


def test_a_schema_that_cannot_be_compiled_is_refused_by_its_field(
    responses: OpenAI, messages: Anthropic
) -> None:
    nonsense: dict[str, object] = {"type": "nonsense"}
    with pytest.raises(openai.BadRequestError, match="nonsense") as bad:
        responses.responses.create(
            model="fake",
            input="hi",
            text={"format": {"type": "json_schema", "name": "n", "schema": nonsense}},
        )
    assert bad.value.param == "text.format.schema"
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        messages.messages.create(
            model="fake",
            max_tokens=10,
            messages=HELLO,
            output_config={"format": {"type": "json_schema", "schema": nonsense}},
        )
