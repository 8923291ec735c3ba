"""The official client against a real worker: what an application sees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from helpers import stack

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(port: int) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client:
        yield client


def test_chat(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="local", messages=HELLO, temperature=0, max_completion_tokens=32
    )
    assert reply.model == "local"
    assert reply.choices[0].message.content == "Hello! How can I assist you today?"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (31, 10)


def test_streamed_chat_gives_the_same_text(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="local",
        messages=HELLO,
        temperature=0,
        max_completion_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello! How can I assist you today?"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_logprobs_order_the_alternatives(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="local",
        messages=HELLO,
        temperature=0,
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=5,
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for item in logprobs.content:
        values = [top.logprob for top in item.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert item.logprob == values[0] <= 0
        assert item.token == item.top_logprobs[0].token
    assert "".join(item.token for item in logprobs.content) == reply.choices[0].message.content


def test_text_completion_with_a_stop_and_several_choices(client: OpenAI) -> None:
    reply = client.completions.create(
        model="local", prompt="The capital of France is", temperature=0, max_tokens=20, stop="."
    )
    assert reply.choices[0].text == " Paris"
    assert reply.choices[0].finish_reason == "stop"
    several = client.completions.create(
        model="local", prompt=["One", "Two"], n=2, max_tokens=3, seed=1
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_models(client: OpenAI) -> None:
    listed = list(client.models.list())
    assert listed[0].id == "local"
    assert client.models.retrieve("local").owned_by == "ds4"


def test_errors_arrive_as_the_clients_own_exceptions(client: OpenAI, port: int) -> None:
    def chat(**fields: Any) -> None:
        client.chat.completions.create(**{"model": "local", "messages": HELLO, **fields})

    with pytest.raises(openai.NotFoundError) as missing:
        chat(model="gpt-4")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(max_tokens=0)
    assert wrong.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as long:
        chat(messages=[{"role": "user", "content": "word " * 600}])
    assert long.value.code == "context_length_exceeded"
    with OpenAI(base_url=client.base_url, api_key="x", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    assert stack.request(port, "GET", "/health")[0] == 200


def test_leaving_a_stream_early_leaves_the_server_to_others(client: OpenAI) -> None:
    for _ in range(8):  # more than there are banks
        stream = client.chat.completions.create(
            model="local", messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    test_chat(client)


def test_a_prompt_scored_by_echo_has_the_log_probabilities_it_was_generated_with(
    client: OpenAI,
) -> None:
    made = client.completions.create(
        model="local", prompt="The capital of France is", temperature=0, max_tokens=8, logprobs=3
    )
    text = f"The capital of France is{made.choices[0].text}"
    scored = client.completions.create(
        model="local", prompt=text, echo=True, logprobs=3, max_tokens=0, temperature=0
    )
    before, after = made.choices[0].logprobs, scored.choices[0].logprobs
    assert before is not None
    assert after is not None
    assert scored.choices[0].text == text
    assert after.tokens is not None
    assert "".join(after.tokens) == text
    assert after.token_logprobs is not None
    assert after.token_logprobs[0] is None
    assert after.tokens[-8:] == before.tokens
    assert after.token_logprobs[-8:] == before.token_logprobs
    assert after.text_offset is not None
    for token, offset in zip(after.tokens, after.text_offset, strict=True):
        assert text.startswith(token, offset)


TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_tools_reach_a_model_whose_template_knows_none(client: OpenAI) -> None:
    asked = client.chat.completions.create(
        model="local", messages=HELLO, tools=[TOOL], temperature=0, max_completion_tokens=8
    )
    plain = client.chat.completions.create(
        model="local",
        messages=HELLO,
        tools=[TOOL],
        tool_choice="none",
        temperature=0,
        max_completion_tokens=32,
    )
    assert asked.usage is not None
    assert asked.usage.prompt_tokens > 100
    assert plain.choices[0].message.content == "Hello! How can I assist you today?"


def test_a_call_and_its_result_are_rendered_into_the_prompt(client: OpenAI) -> None:
    call: Any = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    messages: list[ChatCompletionMessageParam] = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    reply = client.chat.completions.create(
        model="local", messages=messages, temperature=0, max_completion_tokens=16
    )
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 60


def test_async_streams_of_one_client_give_what_each_gives_alone(port: int) -> None:
    prompts = ["One", "Two", "Three", "Four", "Five", "Six"]

    async def text(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.chat.completions.create(
            model="local",
            messages=[{"role": "user", "content": prompt}],
            seed=7,
            max_completion_tokens=12,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> tuple[list[str], list[str]]:
        base_url = f"http://127.0.0.1:{port}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
            alone = [await text(client, prompt) for prompt in prompts]
            return alone, await asyncio.gather(*(text(client, prompt) for prompt in prompts))

    alone, together = asyncio.run(run())
    assert alone == together
