"""The official client of the Responses API against the HTTP side over a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import FunctionToolParam, ResponseInputParam

from helpers.fake_server import FakeServer, fake_server
from helpers.gate import Gate
from helpers.scripted import Script, tool_model

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@contextmanager
def client(server: FakeServer) -> Iterator[OpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with OpenAI(base_url=url, api_key="k", max_retries=0) as found:
        yield found


@contextmanager
def serving(*answers: str) -> Iterator[tuple[FakeServer, OpenAI]]:
    with (
        fake_server(Script(*answers), model=tool_model(), api_key="k") as server,
        client(server) as found,
    ):
        yield server, found


def test_a_tool_loop_replays_the_output_as_input() -> None:
    with serving(f"Hm.</think>I look.\n{CALL}", "Warm.</think>It is warm.") as (_, found):
        first = found.responses.create(
            model="fake",
            input="hi",
            instructions="brief",
            tools=[WEATHER],
            reasoning={"effort": "high", "summary": "auto"},
            store=False,
            include=["reasoning.encrypted_content"],
        )
        reasoning, message, call = first.output
        assert reasoning.type == "reasoning"
        assert reasoning.summary[0].text == "Hm."
        assert message.type == "message"
        assert first.output_text == "I look."
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"city": "Bern"}
        history: ResponseInputParam = [{"role": "user", "content": "hi"}]
        history += [item.to_dict() for item in first.output]  # type: ignore[misc]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "20 C"})
        second = found.responses.create(model="fake", input=history, tools=[WEATHER])
        assert second.output_text == "It is warm."
        assert second.status == "completed"
        assert second.usage is not None
        assert second.usage.output_tokens_details.reasoning_tokens > 0


def test_a_stream_accumulates_to_the_response() -> None:
    ask: dict[str, Any] = {"model": "fake", "input": "hi", "tools": [WEATHER]}
    ask["reasoning"] = {"summary": "auto"}
    with serving(f"Hm.</think>I look.\n{CALL}") as (_, found):
        whole = found.responses.create(**ask)
        with found.responses.stream(**ask) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
        raw = [event.type for event in found.responses.create(**ask, stream=True)]
    assert kinds == raw
    assert [kinds[0], kinds[1], kinds[-1]] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert streamed.output_text == whole.output_text
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]
    assert streamed.output[-1].type == "function_call"
    assert whole.output[-1].type == "function_call"
    assert streamed.output[-1].arguments == whole.output[-1].arguments
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_the_asynchronous_client() -> None:
    async def talk(server: FakeServer) -> None:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as found:
            async with found.responses.stream(model="fake", input="hi") as stream:
                async for _ in stream:
                    pass
                assert (await stream.get_final_response()).output_text == "ok"
            replies = await asyncio.gather(
                *(found.responses.create(model="fake", input="hi") for _ in range(4))
            )
            assert [reply.output_text for reply in replies] == ["ok"] * 4
            assert len({reply.id for reply in replies}) == 4

    with serving("a</think>ok") as (server, _):
        asyncio.run(talk(server))


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    with serving("a</think>abcdef") as (_, found):
        reply = found.responses.create(model="fake", input="hi", max_output_tokens=4)
        assert reply.status == "incomplete"
        assert reply.incomplete_details is not None
        assert reply.incomplete_details.reason == "max_output_tokens"
        assert reply.output_text == "ab"


def test_errors_are_the_clients_own() -> None:
    with serving("a</think>ok") as (_, found):
        with pytest.raises(openai.NotFoundError) as missing:
            found.responses.create(model="nope", input="hi")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as kept:
            found.responses.create(model="fake", input="hi", previous_response_id="resp_1")
        assert kept.value.param == "previous_response_id"
        with pytest.raises(openai.BadRequestError) as long:
            found.responses.create(model="fake", input="x" * 5000)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
        with pytest.raises(openai.BadRequestError) as none:
            found.embeddings.create(model="fake", input="hi")
        assert none.value.code == "embeddings_not_supported"
        with pytest.raises(openai.AuthenticationError):
            found.with_options(api_key="x").responses.create(model="fake", input="hi")


def test_a_failure_in_a_stream_is_a_failed_response() -> None:
    gate = Gate()
    executor = Script("</think>bcdef")
    executor.before_step = gate
    with fake_server(executor, model=tool_model()) as server, client(server) as found:
        gate.allow(2)
        stream = found.responses.create(model="fake", input="hi", stream=True)
        kinds = []
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                executor.errors = {0: "no finite logits", 1: "no finite logits"}
                gate.open()
    assert event.type == "response.failed"
    assert kinds.count("response.failed") == 1
    assert event.response.status == "failed"
    assert event.response.error is not None
    assert (event.response.error.code, event.response.error.message) == (
        "server_error",
        "no finite logits",
    )
    assert event.response.output_text == "b"
