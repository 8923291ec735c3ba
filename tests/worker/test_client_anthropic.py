"""The official client of the Messages API against the HTTP side over a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import MessageParam, ToolParam

from helpers.fake_server import DEADLINE_SECONDS, FakeServer, fake_server
from helpers.gate import Gate
from helpers.scripted import Script, tool_model

HELLO: list[MessageParam] = [{"role": "user", "content": "hi"}]
WEATHER: ToolParam = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
ASK: dict[str, Any] = {"model": "fake", "max_tokens": 400, "messages": HELLO}


@contextmanager
def client(server: FakeServer, **options: Any) -> Iterator[Anthropic]:
    url = f"http://127.0.0.1:{server.port}"
    with Anthropic(base_url=url, api_key="k", max_retries=0, **options) as found:
        yield found


@contextmanager
def serving(*answers: str, **options: Any) -> Iterator[tuple[FakeServer, Anthropic]]:
    with (
        fake_server(Script(*answers), model=tool_model(), api_key="k", **options) as server,
        client(server) as found,
    ):
        yield server, found


def test_a_tool_loop() -> None:
    with serving(f"Hm.</think>I look.\n{CALL}", "Warm.</think>It is warm.") as (_, found):
        first = found.messages.create(
            **ASK,
            tools=[WEATHER],
            system=[{"type": "text", "text": "brief"}],
            thinking={"type": "enabled", "budget_tokens": 1024},
            metadata={"user_id": "me"},
        )
        thinking, words, call = first.content
        assert (thinking.type, words.type, call.type) == ("thinking", "text", "tool_use")
        assert thinking.type == "thinking"
        assert thinking.thinking == "Hm."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Bern"})
        assert first.stop_reason == "tool_use"
        history: list[MessageParam] = [
            *HELLO,
            first.to_param(),
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "20 C"}],
            },
        ]
        counted = found.messages.count_tokens(model="fake", messages=history, tools=[WEATHER])
        second = found.messages.create(**{**ASK, "messages": history}, tools=[WEATHER])
        assert second.content[-1].to_dict() == {"type": "text", "text": "It is warm."}
        assert second.stop_reason == "end_turn"
        usage = second.usage
        assert usage.cache_creation_input_tokens is not None
        assert usage.cache_read_input_tokens is not None
        total = usage.input_tokens + usage.cache_creation_input_tokens
        assert counted.input_tokens == total + usage.cache_read_input_tokens


def test_a_stream_accumulates_to_the_message() -> None:
    with serving(f"Hm.</think>I look.\n{CALL}") as (_, found):
        whole = found.messages.create(**ASK, tools=[WEATHER])
        with found.messages.stream(**ASK, tools=[WEATHER]) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(kinds)
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
    for one, other in zip(streamed.content, whole.content, strict=True):
        left, right = one.to_dict(), other.to_dict()
        for volatile in ("id", "signature", "parsed_output"):
            left.pop(volatile, None)
            right.pop(volatile, None)
        assert left == right
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_the_asynchronous_client_and_the_beta_interface() -> None:
    async def talk(server: FakeServer) -> None:
        url = f"http://127.0.0.1:{server.port}"
        async with AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as found:
            async with found.messages.stream(**ASK) as stream:
                assert "".join([text async for text in stream.text_stream]) == "ok"
            reply = await found.beta.messages.create(**ASK, betas=["interleaved-thinking"])
            assert reply.content[-1].to_dict() == {"type": "text", "text": "ok"}
            models = [model.id async for model in found.models.list()]
            assert models == ["fake-model", "fake"]

    with serving("a</think>ok") as (server, _):
        asyncio.run(talk(server))


def test_errors_are_the_clients_own() -> None:
    with serving("a</think>ok", limits=None) as (server, found):
        with pytest.raises(anthropic.NotFoundError) as missing:
            found.messages.create(**{**ASK, "model": "nope"})
        assert missing.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match=r"stop_sequences: got an empty") as bad:
            found.messages.create(**ASK, stop_sequences=[""])
        assert bad.value.type == "invalid_request_error"
        long: list[MessageParam] = [{"role": "user", "content": "x" * 5000}]
        with pytest.raises(anthropic.BadRequestError, match="tokens"):
            found.messages.create(**{**ASK, "messages": long})
        stranger = found.with_options(api_key="x")
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            stranger.messages.create(**ASK)
        assert unknown.value.type == "authentication_error"
        server.app.service, service = None, server.app.service
        with pytest.raises(anthropic.InternalServerError) as loading:
            found.messages.create(**ASK)
        server.app.service = service
        assert (loading.value.status_code, loading.value.type) == (503, "overloaded_error")


def test_a_full_server_is_a_rate_limit() -> None:
    gate = Gate()
    executor = Script("a</think>ok", banks=1)
    executor.before_step = gate
    with fake_server(executor, model=tool_model(banks=1), queue=0) as server:
        with client(server) as found:
            held = server.connect()
            body = b'{"messages":[{"role":"user","content":"hi"}]}'
            head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            held.sendall(head.encode() + body)
            gate.wait_until_a_step_is_due()
            with pytest.raises(anthropic.RateLimitError) as full:
                found.messages.create(**ASK)
            assert full.value.type == "rate_limit_error"
            assert full.value.response.headers["retry-after"] == "1"
            held.close()
            gate.open()


def test_a_failure_in_a_stream_is_raised() -> None:
    gate = Gate()
    executor = Script("</think>bcdef")
    executor.before_step = gate
    with fake_server(executor, model=tool_model()) as server, client(server) as found:
        gate.allow(2)
        with found.messages.stream(**ASK) as stream:
            texts = stream.text_stream
            assert next(texts) == "b"
            executor.errors = {0: "no finite logits", 1: "no finite logits"}
            gate.open()
            with pytest.raises(anthropic.APIStatusError, match="no finite logits") as failed:
                list(texts)
    assert failed.value.type == "api_error"


def test_leaving_a_stream_frees_its_place() -> None:
    gate = Gate()
    executor = Script("</think>" + "b" * 3000, banks=1)
    executor.before_step = gate
    with fake_server(executor, model=tool_model(banks=1), queue=0) as server:
        with client(server) as found:
            gate.allow(2)
            with found.messages.stream(**{**ASK, "max_tokens": 3000}) as stream:
                next(stream.text_stream)
            gate.open()
            for _ in range(int(DEADLINE_SECONDS * 100)):
                try:
                    found.messages.create(**{**ASK, "max_tokens": 3})
                    break
                except anthropic.RateLimitError:
                    continue
            else:
                pytest.fail("the place was never freed")
