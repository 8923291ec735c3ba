"""Tokenizing over HTTP, embeddings that are refused, and the models' objects."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic.types
import pytest
from openai.types import Model

from helpers.fake_model import BOS
from helpers.fake_server import DEADLINE_SECONDS, FakeServer, fake_server
from helpers.scripted import Script, tool_model


def post(server: FakeServer, path: str, body: object) -> dict[str, Any]:
    status, reply = server.request("POST", path, body)
    assert status == 200, reply
    assert isinstance(reply, dict)
    return reply


def test_a_bare_text_gets_no_special_tokens_and_a_prompt_does() -> None:
    with fake_server() as server:
        bare = post(server, "/tokenize", {"content": "é!"})
        assert bare == {"tokens": [0xC3, 0xA9, 0x21], "count": 3, "max_model_len": 64}
        assert post(server, "/tokenize", {"prompt": "a"})["tokens"] == [BOS, 97]
        assert post(server, "/tokenize", {"content": "a", "add_special": True})["count"] == 2
        body = {"prompt": "a", "add_special_tokens": False, "return_token_strs": True}
        assert post(server, "/tokenize", body)["token_strs"] == ["a"]


def test_pieces_are_text_or_bytes() -> None:
    with fake_server() as server:
        reply = post(server, "/tokenize", {"content": "aé", "with_pieces": True})
    assert reply["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "a", "with_pieces": True}),
        ("/tokenize", {"content": "a", "return_token_strs": True}),
        ("/detokenize", {"tokens": [97]}),
    ],
)
def test_others_are_answered_while_tokens_are_spelled(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def held(value: Any) -> bytes:
        began.set()
        assert go_on.wait(DEADLINE_SECONDS)
        return b"a"

    with fake_server() as server, ThreadPoolExecutor() as clients:
        assert server.app.service is not None
        tokenizer = server.app.service.model.tokenizer
        monkeypatch.setattr(tokenizer, "decode" if path == "/detokenize" else "token_bytes", held)
        reply = clients.submit(server.request, "POST", path, body)
        try:
            assert began.wait(DEADLINE_SECONDS)
            assert server.request("GET", "/health")[0] == 200
        finally:
            go_on.set()
        assert reply.result(DEADLINE_SECONDS)[0] == 200


def test_messages_are_tokenized_as_a_chat_would_send_them() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with fake_server(Script("a"), model=tool_model()) as server:
        ids = post(server, "/tokenize", chat)["tokens"]
        sent = post(server, "/v1/chat/completions", {**chat, "return_token_ids": True})
        assert sent["prompt_token_ids"] == ids
        text = post(server, "/detokenize", {"tokens": ids})
    assert text["content"] == text["prompt"]
    assert text["content"].startswith("[user]hi[end][assistant]")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "prompt"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 260]}, "tokens[1]"),
        ("/v1/embeddings", {"input": 5}, "input"),
    ],
)
def test_refusals_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    with fake_server() as server:
        status, reply = server.request("POST", path, body)
    assert (status, reply["error"]["param"]) == (400, param), reply


def test_embeddings_are_refused_with_the_reason() -> None:
    with fake_server() as server:
        status, reply = server.request("POST", "/v1/embeddings", {"input": "a", "model": "fake"})
    assert (status, reply["error"]["code"]) == (400, "embeddings_not_supported")
    assert "fake generates text and makes no embeddings" in reply["error"]["message"]


def test_a_model_is_described_in_the_words_of_both_apis() -> None:
    with fake_server(model=tool_model()) as server:
        listed = server.request("GET", "/v1/models")[1]
        alias = server.request("GET", "/v1/models/fake")[1]
        status, missing = server.request("GET", "/v1/models/other")
    assert [item["id"] for item in listed["data"]] == ["fake-model", "fake"]
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["first_id"], listed["last_id"]) == ("fake-model", "fake")
    assert alias == listed["data"][1]
    assert alias == {
        "id": "fake",
        "object": "model",
        "created": 1767225600,
        "owned_by": "ds4",
        "name": "fake-model",
        "context_length": 4096,
        "top_provider": {
            "context_length": 4096,
            "max_completion_tokens": 4096,
            "is_moderated": False,
        },
        "supported_parameters": [
            *("tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k", "min_p"),
            *("seed", "stop", "stream", "n", "logprobs", "top_logprobs", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty", "logit_bias", "response_format"),
            *("structured_outputs", "reasoning_effort"),
        ],
        "type": "model",
        "display_name": "fake-model",
        "created_at": "2026-01-01T00:00:00Z",
    }
    assert Model.model_validate(alias).id == "fake"
    assert anthropic.types.ModelInfo.model_construct(**alias).display_name == "fake-model"
    assert (status, missing["error"]["code"]) == (404, "model_not_found")
