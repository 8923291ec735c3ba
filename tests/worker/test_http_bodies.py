"""Fields of a request that fit, and the refusals of those that do not."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest

from ds4_worker.http import service
from helpers.completions import CHAT, HELLO, TEXT, error_of, speaking
from helpers.fake_model import VOCABULARY
from helpers.fake_server import fake_server


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": "x"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": 1}]}, "messages[0].role"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (CHAT, {**HELLO, "max_tokens": "5"}, "max_tokens"),
        (CHAT, {**HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {**HELLO, "max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT, {**HELLO, "temperature": True}, "temperature"),
        (CHAT, {**HELLO, "temperature": -1}, "temperature"),
        (CHAT, {**HELLO, "top_p": 1.5}, "top_p"),
        (CHAT, {**HELLO, "min_p": -0.1}, "min_p"),
        (CHAT, {**HELLO, "top_k": -2}, "top_k"),
        (CHAT, {**HELLO, "n": 0}, "n"),
        (CHAT, {**HELLO, "n": 3}, "n"),
        (CHAT, {**HELLO, "seed": 1.5}, "seed"),
        (CHAT, {**HELLO, "stream": "yes"}, "stream"),
        (CHAT, {**HELLO, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (CHAT, {**HELLO, "return_token_ids": 1}, "return_token_ids"),
        (CHAT, {**HELLO, "return_token_timestamps": True}, "return_token_timestamps"),
        (CHAT, {**HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {**HELLO, "stop": ""}, "stop"),
        (CHAT, {**HELLO, "stop": ["a"] * 5}, "stop"),
        (CHAT, {**HELLO, "stop": "x" * 4097}, "stop"),
        (CHAT, {**HELLO, "stop": "x", "stop_token_ids": [1]}, "stop"),
        (CHAT, {**HELLO, "stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
        (CHAT, {**HELLO, "stop_token_ids": [-1]}, "stop_token_ids"),
        (CHAT, {**HELLO, "stop_token_sequences": [[1]] * 17}, "stop_token_sequences"),
        (CHAT, {**HELLO, "stop_token_sequences": [[1] * 65]}, "stop_token_sequences"),
        (CHAT, {**HELLO, "stop_token_sequences": [[]]}, "stop_token_sequences"),
        (CHAT, {**HELLO, "tools": [{"type": "function"}]}, "tools[0].type"),
        (CHAT, {**HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {**HELLO, "presence_penalty": 2.5}, "presence_penalty"),
        (CHAT, {**HELLO, "frequency_penalty": -2.5}, "frequency_penalty"),
        (CHAT, {**HELLO, "repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {**HELLO, "logit_bias": {"5": 101}}, "logit_bias.5"),
        (CHAT, {**HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {**HELLO, "logit_bias": {"260": 1}}, "logit_bias"),
        (CHAT, {**HELLO, "logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": ["a", 1]}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [VOCABULARY]}, "prompt"),
        (TEXT, {"prompt": [[1], [-1]]}, "prompt"),
        (TEXT, {"prompt": [-1], "echo": True}, "prompt"),
        (TEXT, {"prompt": [VOCABULARY], "echo": True}, "prompt"),
        (TEXT, {"prompt": "a", "logprobs": -1}, "logprobs"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        (TEXT, {"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of"),
        (TEXT, {"prompt": "a", "best_of": 1, "n": 0}, "n"),
        (TEXT, {"prompt": "a", "best_of": 1, "n": -5}, "n"),
        (TEXT, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ],
)
def test_a_field_that_does_not_fit_is_named(path: str, body: object, param: str) -> None:
    with fake_server() as server:
        status, error = error_of(server, path, body)
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert not server.executor.steps


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"nul", b'{"messages":"\xff"}', b"[" * 100_000, b'{"a":' * 50_000]
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with fake_server() as server:
        status, error = error_of(server, CHAT, body)
        assert (status, error["type"]) == (400, "invalid_request_error")


def test_limits_of_stops_are_inclusive() -> None:
    with fake_server(speaking("a")) as server:
        for stops in ("x" * 4096, ["x" * 1024] * 4, None):
            assert server.request("POST", CHAT, {**HELLO, "stop": stops})[0] == 200
        sequences = {"stop_token_sequences": [[1] * 64] * 16, "stop_token_ids": list(range(40))}
        assert server.request("POST", CHAT, {**HELLO, **sequences})[0] == 200


def test_unknown_fields_and_neutral_values_are_ignored() -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": []}
    neutral |= {"response_format": {"type": "text"}, "user": "u", "store": False, "x": [1]}
    with fake_server(speaking("a")) as server:
        assert server.request("POST", CHAT, {**HELLO, **neutral})[0] == 200


def test_an_unknown_model_is_404_and_the_models_own_names_are_not() -> None:
    with fake_server(speaking("a")) as server:
        status, error = error_of(server, CHAT, {**HELLO, "model": "gpt-4"})
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        for name in ("fake-model", "fake", "", None):
            assert server.request("POST", CHAT, {**HELLO, "model": name})[0] == 200
        assert len(error_of(server, CHAT, {**HELLO, "model": "x" * 10**6})[1]["message"]) < 500


def test_a_prompt_beyond_the_context_says_both_numbers() -> None:
    with fake_server() as server:
        status, error = error_of(server, TEXT, {"prompt": [1] * 64})
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (64, 64)
        assert server.request("POST", TEXT, {"prompt": [1] * 63, "max_tokens": 9})[0] == 200
        chat = {"messages": [{"role": "user", "content": "x" * 100}]}
        assert error_of(server, CHAT, chat)[1]["param"] == "messages"
        huge = {"prompt": "x" * 100_000}
        assert "at least" in error_of(server, TEXT, huge)[1]["message"]


def test_a_model_without_a_template_points_to_text_completions() -> None:
    with fake_server(template=None) as server:
        status, error = error_of(server, CHAT, HELLO)
        assert (status, error["code"]) == (400, "no_chat_template")
        assert "/v1/completions" in error["message"]
        assert server.request("POST", TEXT, {"prompt": "a"})[0] == 200


def test_a_null_for_every_optional_field_is_the_same_as_leaving_it_out() -> None:
    optional = ("model", "max_tokens", "top_p", "n", "stop", "stream", "logprobs", "tools", "seed")
    with fake_server(speaking("a")) as server:
        body = json.dumps({**HELLO, **dict.fromkeys(optional)}).encode()
        assert server.request("POST", CHAT, body)[0] == 200


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/messages", "/v1/responses"])
def test_a_great_body_is_read_beside_the_event_loop(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "INLINE_BODY_BYTES", 0)
    threads: list[str] = []
    decode = msgspec.json.decode

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return decode(*args, **kwargs)

    monkeypatch.setattr("ds4_worker.http.bodies.msgspec.json.decode", noted)
    turn = [{"role": "user", "content": "a"}]
    with fake_server() as server:
        asked = {"prompt": "a"} if path == TEXT else {"messages": turn, "input": turn}
        body = {**asked, "max_tokens": 4}
        assert server.request("POST", path, body)[0] == 200
        assert server.request("POST", path, {"max_tokens": "x"})[0] == 400
    assert threads == ["prepare"] * 2
