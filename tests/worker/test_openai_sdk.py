"""The official client against a scripted model: tools, reasoning, streams, errors, cancellation."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from ds4_common.errors import ExecutorFailure
from helpers.fake_executor import failing_after
from helpers.fake_server import DEADLINE_SECONDS, FakeServer, fake_server
from helpers.scripted import Script, tool_model

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Rain in Zürich?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
THOUGHT = "I look.</think>"
ANSWER = f"{THOUGHT}Let me see.\n{CALL}\n{CALL}"


@contextmanager
def client_of(*answers: str, **model: Any) -> Iterator[tuple[OpenAI, FakeServer]]:
    with fake_server(Script(*answers), model=tool_model(**model)) as server:
        with OpenAI(base_url=url_of(server), api_key="k", max_retries=0) as client:
            yield client, server


def url_of(server: FakeServer) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


def test_a_conversation_with_a_tool_to_its_end() -> None:
    with client_of(f"{THOUGHT}{CALL}", "</think>Yes.") as (client, _):
        messages = [*ASK]
        first = client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Zürich"}
        messages.append(choice.message.to_dict())  # type: ignore[arg-type]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
        second = client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])
        assert second.choices[0].message.content == "Yes."
        assert second.choices[0].finish_reason == "stop"


def test_the_clients_accumulator_rebuilds_the_answer_from_a_stream() -> None:
    with client_of(ANSWER) as (client, _):
        with client.chat.completions.stream(
            model="fake",
            messages=ASK,
            tools=[WEATHER],
            stream_options={"include_usage": True},
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        whole = client.chat.completions.create(model="fake", messages=ASK, tools=[WEATHER])
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert "content.done" in kinds
    message, expected = final.choices[0].message, whole.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.content == expected.content == "Let me see."
    assert message.tool_calls is not None
    assert expected.tool_calls is not None
    for call, other in zip(message.tool_calls, expected.tool_calls, strict=True):
        assert other.type == "function"
        assert call.function.name == other.function.name == "weather"
        assert call.function.arguments == other.function.arguments
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_reasoning_is_a_field_beside_the_content() -> None:
    with client_of("I look.</think>Rain.") as (client, _):
        whole = client.chat.completions.create(model="fake", messages=ASK)
        assert whole.choices[0].message.to_dict()["reasoning_content"] == "I look."
        assert whole.choices[0].message.content == "Rain."
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens == len("I look.")
        chunks = list(client.chat.completions.create(model="fake", messages=ASK, stream=True))
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks]
    assert "".join(str(d.get("reasoning_content", "")) for d in deltas) == "I look."
    assert "".join(str(d.get("content", "")) for d in deltas) == "Rain."


def test_async_streams_run_at_once_and_do_not_mix() -> None:
    answers = [f"</think>{letter * 20}" for letter in "abcdef"]

    async def text(client: AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="fake", messages=ASK, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run(server: FakeServer) -> list[str]:
        async with AsyncOpenAI(base_url=url_of(server), api_key="k", max_retries=0) as client:
            return await asyncio.gather(*(text(client) for _ in answers))

    with fake_server(Script(*answers), model=tool_model()) as server:
        texts = asyncio.run(run(server))
    assert sorted(texts) == [letter * 20 for letter in "abcdef"]


def test_a_stream_that_is_closed_early_frees_its_bank() -> None:
    with client_of(f"</think>{'x' * 1000}", banks=1) as (client, server):
        for _ in range(4):  # more than there are banks
            stream = client.chat.completions.create(model="fake", messages=ASK, stream=True)
            next(iter(stream))
            stream.close()
        whole = client.chat.completions.create(model="fake", messages=ASK, max_tokens=3)
        assert whole.choices[0].finish_reason == "length"
        assert server.request("GET", "/health")[0] == 200


def test_errors_are_the_clients_own_and_name_the_field() -> None:
    with client_of("</think>") as (client, _):

        def ask(**fields: Any) -> None:
            client.chat.completions.create(**{"model": "fake", "messages": ASK, **fields})

        with pytest.raises(openai.BadRequestError) as wrong:
            ask(tools=[{"type": "function", "function": {"name": 1}}])
        assert wrong.value.param == "tools[0].function.name"
        with pytest.raises(openai.BadRequestError) as choice:
            ask(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "x"}})
        assert choice.value.param == "tool_choice.function.name"
        with pytest.raises(openai.NotFoundError):
            ask(model="other")


def test_a_failure_inside_a_stream_is_the_clients_error() -> None:
    begun = threading.Event()
    fail = failing_after(3)

    def check() -> None:
        try:
            fail()
        except ExecutorFailure:
            begun.wait(DEADLINE_SECONDS)
            raise

    executor = Script("</think>abcdef", before_step=check)
    with fake_server(executor, model=tool_model()) as server:
        with OpenAI(base_url=url_of(server), api_key="k", max_retries=0) as client:
            stream = client.chat.completions.create(model="fake", messages=ASK, stream=True)
            chunks = iter(stream)
            next(chunks)
            begun.set()
            with pytest.raises(openai.APIError) as failed:
                list(chunks)
        server.failures.clear()
    assert failed.value.code == "engine_failure"
