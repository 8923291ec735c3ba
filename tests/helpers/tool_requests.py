"""Requests to a scripted model that calls tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.fake_model import ByteTokenizer
from helpers.fake_server import FakeServer, fake_server
from helpers.scripted import Script, tool_model

CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


NAMED = {"name": "time"}
TIME: dict[str, Any] = {"type": "function", "function": NAMED}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "tools": [WEATHER, TIME],
}


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Zürich"}}\n</tool_call>'
TWO = f'{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'


@contextmanager
def scripted(*answers: str, **model: Any) -> Iterator[FakeServer]:
    with fake_server(Script(*answers), model=tool_model(**model)) as server:
        yield server


def ask(server: FakeServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply to what has to be answered."""
    status, reply = server.request("POST", path, body)
    assert status == 200, reply
    assert isinstance(reply, dict)
    return reply


def prompt_of(server: FakeServer, body: dict[str, Any]) -> str:
    status, reply = server.request("POST", CHAT, {**body, "return_token_ids": True})
    assert status == 200, reply
    return spell(reply["prompt_token_ids"])


def spell(ids: list[int]) -> str:
    return b"".join(map(ByteTokenizer().token_bytes, ids)).decode()


def message_of(server: FakeServer, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    status, reply = server.request("POST", CHAT, body)
    assert status == 200, reply
    return reply["choices"][0]["message"], reply["choices"][0]["finish_reason"]


def history(message: dict[str, Any]) -> list[dict[str, Any]]:
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
        for call in message["tool_calls"]
    ]
    return [*ASK["messages"], message, *results]
