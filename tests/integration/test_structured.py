"""Structured answers, named tools and the prefix cache of a real worker, by the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from helpers import stack

ASK: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Name a city and how many people live there, as JSON."}
]
LONG = " ".join(f"Line {i} says {i * i}." for i in range(60))


class City(BaseModel):
    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=99_999_999)
    coast: bool


@pytest.fixture(scope="module")
def ports(manifest: Path) -> Iterator[tuple[int, int]]:
    """A worker that reuses prefixes and one that does not."""
    ports = stack.free_port(), stack.free_port()
    with stack.worker(manifest, ports[0], "--ctx", "2048"):
        with stack.worker(manifest, ports[1], "--ctx", "2048", "--prefix-reuse", "off"):
            yield ports


@pytest.fixture(scope="module")
def client(ports: tuple[int, int]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{ports[0]}/v1", api_key="k", max_retries=0) as made:
        yield made


def test_a_parsed_answer_is_the_callers_class(client: OpenAI) -> None:
    """The client sends its class as a strict schema and reads the answer back into it."""
    for temperature in (0, 1.5):
        reply = client.chat.completions.parse(
            model="", messages=ASK, response_format=City, seed=3, temperature=temperature,
            max_tokens=400,
        )  # fmt: skip
        assert reply.choices[0].finish_reason == "stop"
        assert isinstance(reply.choices[0].message.parsed, City)


def test_expressions_hold_at_any_temperature(client: OpenAI) -> None:
    expression = r"[A-Z][a-z]{2,8}, [0-9]{1,3}"
    for seed in range(3):
        reply = client.chat.completions.create(
            model="", messages=ASK, temperature=3, seed=seed,
            extra_body={"structured_outputs": {"regex": expression}},
        )  # fmt: skip
        assert re.fullmatch(expression, reply.choices[0].message.content or "")


def test_a_named_tool_is_called_with_arguments_that_fit(client: OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Basel"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    reply = client.chat.completions.create(
        model="", messages=ASK, tools=[tool], temperature=0, max_tokens=300,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )  # fmt: skip
    (call, *_) = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Bern", "Basel")
    assert isinstance(arguments["days"], int)


def test_a_second_turn_computes_its_new_words_only_and_answers_as_from_a_cold_start(
    ports: tuple[int, int],
) -> None:
    answers = []
    for port in ports:
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client:
            turns: list[Any] = [{"role": "user", "content": LONG}]
            given, cached = [], []
            for question in ("And then?", "Why?"):
                reply = client.chat.completions.create(
                    model="", messages=turns, temperature=0.8, seed=5, max_tokens=24,
                    logprobs=True, extra_body={"return_token_ids": True, "ignore_eos": True},
                )  # fmt: skip
                choice: Any = reply.choices[0]
                assert reply.usage is not None
                details = reply.usage.prompt_tokens_details
                cached.append(details.cached_tokens if details else 0)
                given.append((choice.token_ids, [t.logprob for t in choice.logprobs.content]))
                turns += [
                    {"role": "assistant", "content": choice.message.content},
                    {"role": "user", "content": question},
                ]
            answers.append(given)
            if port == ports[0]:
                assert cached[1] is not None
                assert cached[1] > 400
            else:
                assert cached == [0, 0]
    assert answers[0] == answers[1]
