"""The official clients of the Responses and Messages APIs against a real worker and model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anthropic
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import MessageParam
from openai import AsyncOpenAI, OpenAI

HELLO: list[MessageParam] = [{"role": "user", "content": "Hello"}]
ANSWER = "Hello! How can I assist you today?"
GREEDY = {"temperature": 0}  # a parameter that newer clients lack
PROMPT_TOKENS, ANSWER_TOKENS = 31, 10


@pytest.fixture
def responses(port: int) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
def messages(port: int) -> Iterator[Anthropic]:
    with Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="k", max_retries=0) as client:
        yield client


def test_a_response(responses: OpenAI) -> None:
    reply = responses.responses.create(
        model="local", input="Hello", temperature=0, max_output_tokens=32
    )
    assert (reply.model, reply.status, reply.output_text) == ("local", "completed", ANSWER)
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (PROMPT_TOKENS, ANSWER_TOKENS)


def test_a_streamed_response(responses: OpenAI) -> None:
    with responses.responses.stream(model="local", input="Hello", temperature=0) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas) == ANSWER
    assert len(deltas) > 3


def test_a_message(messages: Anthropic) -> None:
    reply = messages.messages.create(
        model="local", messages=HELLO, max_tokens=32, extra_body=GREEDY, stop_sequences=["assist"]
    )
    assert reply.content[0].to_dict() == {"type": "text", "text": "Hello! How can I "}
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "assist")
    counted = messages.messages.count_tokens(model="local", messages=HELLO)
    assert counted.input_tokens == PROMPT_TOKENS
    usage = reply.usage
    parts = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
    assert sum(part or 0 for part in parts) == PROMPT_TOKENS


def test_a_streamed_message(messages: Anthropic) -> None:
    with messages.messages.stream(
        model="local", messages=HELLO, max_tokens=32, extra_body=GREEDY
    ) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", ANSWER_TOKENS)


def test_a_prompt_that_was_seen_before_is_read_from_the_cache(messages: Anthropic) -> None:
    long: list[MessageParam] = [{"role": "user", "content": "one two three four " * 30}]
    cached = []
    for _ in range(2):
        with messages.messages.stream(model="local", messages=long, max_tokens=2) as stream:
            start = next(event for event in stream if event.type == "message_start")
            final = stream.get_final_message()
        assert final.usage.cache_read_input_tokens == start.message.usage.cache_read_input_tokens
        cached.append(final.usage.cache_read_input_tokens or 0)
    assert cached[1] > cached[0] + 100


def test_both_apis_at_once_asynchronously(port: int) -> None:
    async def talk() -> list[str]:
        async with (
            AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as one,
            AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="k") as other,
        ):

            async def respond() -> str:
                reply = await one.responses.create(model="local", input="Hello", temperature=0)
                return reply.output_text

            async def message() -> str:
                reply = await other.messages.create(
                    model="local", messages=HELLO, max_tokens=32, extra_body=GREEDY
                )
                return str(reply.content[0].to_dict()["text"])

            return await asyncio.gather(*(call() for call in (respond, message) * 2))

    assert asyncio.run(talk()) == [ANSWER] * 4


def test_errors_arrive_as_the_clients_own_exceptions(
    responses: OpenAI, messages: Anthropic
) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        responses.responses.create(model="local", input="word " * 600)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(anthropic.NotFoundError):
        messages.messages.create(model="other", messages=HELLO, max_tokens=1)
    with pytest.raises(anthropic.AuthenticationError):
        messages.with_options(api_key="x").models.list()


def test_leaving_streams_early_leaves_the_server_to_others(
    responses: OpenAI, messages: Anthropic
) -> None:
    for _ in range(6):  # more than there are banks
        stream = responses.responses.create(model="local", input="Tell a story", stream=True)
        next(iter(stream))
        stream.close()
        with messages.messages.stream(model="local", messages=HELLO, max_tokens=400) as held:
            next(iter(held))
    test_a_response(responses)
