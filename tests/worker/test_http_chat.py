"""Chat and text completions over a fake model: forms, fields, observation, refusals."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest

from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http import service
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import BOS, EOS, VOCABULARY
from helpers.fake_server import FakeServer, fake_server
from helpers.scripted import Script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
PROMPT = list(b"[user]hi\n[assistant]")


def speaking(text: str, *, context_tokens: int = 64, banks: int = 2) -> FakeExecutor:
    """Says `text`, then ends. Prompts have to end with `]`."""
    script = [*text.encode(), EOS]

    def choose(history: list[int]) -> int:
        end = max(i for i, token in enumerate(history) if token == ord("]"))
        token: int = script[len(history) - 1 - end]
        return token

    config = ExecutorConfig(banks=banks, context_tokens=context_tokens)
    return FakeExecutor(config, vocabulary=VOCABULARY, choose=choose)


def error_of(server: FakeServer, path: str, body: object) -> tuple[int, Any]:
    status, reply = server.request("POST", path, body)
    assert set(reply) == {"error"}
    return status, reply["error"]


# --- forms


def test_a_chat_answer_has_the_openai_form() -> None:
    with fake_server(speaking("hé!")) as server:
        status, body = server.request("POST", CHAT, {**HELLO, "model": "fake"})
    assert status == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hé!"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 5,
            "total_tokens": len(PROMPT) + 5,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": len(PROMPT)},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


def test_a_prediction_makes_an_answer_faster_and_no_other() -> None:
    said = "def f(x):\n    return x + 1\n"
    body = {**HELLO, "temperature": 0}
    parts = [{"type": "text", "text": said[:9]}, {"type": "text", "text": said[9:]}]
    answers = []
    for content in ("", said, parts):
        prediction = {"type": "content", "content": content}
        with fake_server(Script(said), speculate=8) as server:
            status, reply = server.request("POST", CHAT, {**body, "prediction": prediction})
        assert status == 200
        answers.append((reply["choices"], reply["usage"]["completion_tokens_details"]))
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert answers[0][1]["accepted_prediction_tokens"] < 5
    assert answers[1][1] == answers[2][1]
    assert answers[1][1]["accepted_prediction_tokens"] >= len(said) * 2 // 3


@pytest.mark.parametrize("prediction", [{"type": "image", "content": "a"}, {"type": "content"}])
def test_a_prediction_of_another_form_is_refused(prediction: dict[str, str]) -> None:
    with fake_server() as server:
        status, reply = server.request("POST", CHAT, {**HELLO, "prediction": prediction})
    assert status == 400
    assert reply["error"]["param"].startswith("prediction")


def test_a_chat_stream_is_role_then_text_then_reason_then_done() -> None:
    with fake_server(speaking("hé!")) as server:
        events = server.events(CHAT, HELLO)
    assert events.pop() == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert all("usage" not in event for event in events)
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "é"},
        {"content": "!"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]


def test_usage_comes_in_a_last_chunk_of_its_own_when_asked_for() -> None:
    with fake_server(speaking("ab")) as server:
        events = server.events(CHAT, {**HELLO, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    total = events.pop()
    assert total["choices"] == []
    assert total["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in events)


def test_a_text_completion_continues_the_prompt_as_it_stands() -> None:
    with fake_server(speaking("yes")) as server:
        status, body = server.request("POST", TEXT, {"prompt": "]", "max_tokens": 2})
        assert status == 200
        assert body["object"] == "text_completion"
        assert body["choices"][0] == {
            "index": 0,
            "text": "ye",
            "logprobs": None,
            "finish_reason": "length",
        }
        echoed = server.request("POST", TEXT, {"prompt": "]", "echo": True})[1]
        assert echoed["choices"][0]["text"] == "]yes"
        events = server.events(TEXT, {"prompt": "]", "echo": True})
        assert [e["choices"][0]["text"] for e in events[:-1]] == ["]", "y", "e", "s", ""]


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt() -> None:
    with fake_server() as server:
        body = {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 3, "seed": 5, "ignore_eos": True}
        body["return_token_ids"] = True
        choices = server.request("POST", TEXT, body)[1]["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [choice["prompt_token_ids"] for choice in choices] == [[1, 2]] * 2 + [[3]] * 2
        for prompt, expected in (([1, 2], choices[0]), ([3], choices[2])):
            alone = {**body, "prompt": prompt, "n": 1}
            (choice,) = server.request("POST", TEXT, alone)[1]["choices"]
            assert choice["token_ids"] == expected["token_ids"]
        assert choices[0]["token_ids"] != choices[1]["token_ids"]
        assert len(server.request("POST", TEXT, {"prompt": ["a", "b"]})[1]["choices"]) == 2


def test_the_same_seed_gives_the_same_tokens_and_no_seed_gives_others() -> None:
    with fake_server() as server:

        def tokens(**fields: Any) -> Any:
            body = {"prompt": "a", "max_tokens": 12, "return_token_ids": True, **fields}
            return server.request("POST", TEXT, body)[1]["choices"][0]["token_ids"]

        assert tokens(seed=1) == tokens(seed=1) != tokens(seed=2)
        assert tokens() != tokens()
        assert tokens(temperature=0) == tokens(temperature=0) == tokens(top_p=0, seed=9)


def test_content_parts_are_joined_and_a_missing_content_is_empty() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "user", "content": parts}]
    with fake_server(speaking("")) as server:
        body = {"messages": messages, "return_token_ids": True}
        assert server.request("POST", CHAT, body)[1]["prompt_token_ids"] == PROMPT
        body["messages"] = [{"role": "assistant", "content": None}]
        reply = server.request("POST", CHAT, body)[1]
        assert bytes(reply["prompt_token_ids"]) == b"[assistant]\n[assistant]"


def test_an_absent_limit_means_the_context_in_chat_and_sixteen_in_text() -> None:
    with fake_server() as server:
        chat = server.request("POST", CHAT, {**HELLO, "ignore_eos": True})[1]
        assert chat["usage"]["total_tokens"] == 64
        text = server.request("POST", TEXT, {"prompt": "a", "ignore_eos": True})[1]
        assert text["usage"]["completion_tokens"] == 16
        both = {**HELLO, "max_tokens": 3, "max_completion_tokens": 2, "ignore_eos": True}
        assert server.request("POST", CHAT, both)[1]["usage"]["completion_tokens"] == 2


# --- stops and log-probabilities


def test_a_stop_string_ends_the_answer_before_itself() -> None:
    with fake_server(speaking("one. two. three")) as server:
        body = {**HELLO, "stop": [". t"], "return_token_ids": True}
        reply = server.request("POST", CHAT, body)[1]
        assert reply["choices"][0]["message"]["content"] == "one"
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert bytes(reply["choices"][0]["token_ids"]) == b"one. t"
        assert reply["usage"]["completion_tokens"] == 6
        assert server.request("POST", CHAT, {**HELLO, "stop": []})[0] == 200
        streamed = server.events(CHAT, {**HELLO, "stop": "two"})
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in streamed[:-1])
        assert text == "one. "


def test_stop_tokens_are_hidden_but_reported() -> None:
    with fake_server(speaking("one. two")) as server:
        body = {**HELLO, "stop_token_ids": [ord(".")], "return_token_ids": True}
        choice = server.request("POST", CHAT, body)[1]["choices"][0]
        assert choice["message"]["content"] == "one"
        assert bytes(choice["token_ids"]) == b"one."


def test_chat_logprobs_name_tokens_bytes_and_alternatives() -> None:
    with fake_server(speaking("é")) as server:
        body = {**HELLO, "logprobs": True, "top_logprobs": 2}
        content = server.request("POST", CHAT, body)[1]["choices"][0]["logprobs"]["content"]
        assert [item["bytes"] for item in content] == [[0xC3], [0xA9]]
        assert [len(item["top_logprobs"]) for item in content] == [2, 2]
        assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"] == -0.5
        streamed = server.events(CHAT, body)[:-1]
        chunks = [e["choices"][0]["logprobs"] for e in streamed if e["choices"][0]["logprobs"]]
        assert [item for chunk in chunks for item in chunk["content"]] == content
        plain = server.request("POST", CHAT, {**HELLO, "logprobs": True})[1]
        assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_text_logprobs_have_offsets_into_the_text() -> None:
    with fake_server(speaking("abc")) as server:
        reply = server.request("POST", TEXT, {"prompt": "]", "logprobs": 1})[1]
        logprobs = reply["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "b", "c"]
        assert logprobs["text_offset"] == [0, 1, 2]
        assert logprobs["token_logprobs"] == [-0.5] * 3
        assert logprobs["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}]


def test_best_of_shows_the_most_likely_of_more_tries() -> None:
    with fake_server() as server:
        body = {"prompt": "a", "max_tokens": 4, "seed": 5, "ignore_eos": True, "logprobs": 0}
        both = server.request("POST", TEXT, {**body, "n": 2})[1]["choices"]
        best = server.request("POST", TEXT, {**body, "best_of": 2})[1]
        (choice,) = best["choices"]
        assert choice["index"] == 0
        means = [sum(c["logprobs"]["token_logprobs"]) / 4 for c in both]
        assert choice["text"] == both[means.index(max(means))]["text"]
        assert best["usage"]["completion_tokens"] == 8
        silent = server.request("POST", TEXT, {**body, "best_of": 2, "logprobs": None})[1]
        assert silent["choices"][0] == {**choice, "logprobs": None}


def test_the_best_of_several_prompts_keep_their_own_places() -> None:
    with fake_server() as server:
        body = {"prompt": [[1, 2, 3], [65]], "echo": True, "logprobs": 0, "max_tokens": 1}
        plain = server.request("POST", TEXT, {**body, "temperature": 0})[1]["choices"]
        best = server.request("POST", TEXT, {**body, "temperature": 0, "best_of": 2})[1]["choices"]
    assert best == plain
    assert [c["logprobs"]["text_offset"] for c in best] == [[0, 1, 2, 3], [0, 1]]


def test_text_logprobs_spell_half_characters_and_place_tokens_in_the_text() -> None:
    with fake_server(speaking("aéb")) as server:
        reply = server.request("POST", TEXT, {"prompt": "]", "logprobs": 1, "max_tokens": 4})[1]
        logprobs = reply["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
        assert logprobs["text_offset"] == [0, 1, 1, 2]
        echoed = {"prompt": "x]", "logprobs": None, "echo": True, "max_tokens": 4}
        assert server.request("POST", TEXT, echoed)[1]["choices"][0]["text"] == "x]aéb"


def test_echo_with_logprobs_scores_the_prompt_but_its_first_token() -> None:
    prompt = "a long prompt of more than one page or chunk, with é]"
    with fake_server(speaking("yes"), prefill_chunk=8) as server:
        body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 2}
        (choice,) = server.request("POST", TEXT, body)[1]["choices"]
        assert choice["text"] == prompt + "ye"
        logprobs = choice["logprobs"]
        ids = [BOS, *prompt.encode(), *b"ye"]
        assert len(logprobs["tokens"]) == len(ids)
        assert (logprobs["tokens"][1], logprobs["token_logprobs"][0]) == ("a", None)
        assert logprobs["top_logprobs"][0] is None
        for i, value in enumerate(logprobs["token_logprobs"][1:-2], start=1):
            assert value == -float(sum(ids[:i]) % 97) - ids[i] / 1000
            assert logprobs["top_logprobs"][i][logprobs["tokens"][i]] == value
        assert logprobs["token_logprobs"][-2:] == [-0.5, -0.5]
        assert logprobs["text_offset"][:9] == [0, *range(8)]  # the start token has no text
        assert logprobs["text_offset"][-2:] == [len(prompt), len(prompt) + 1]

        only = server.request("POST", TEXT, {**body, "max_tokens": 0})[1]
        assert only["choices"][0]["text"] == prompt
        assert only["choices"][0]["finish_reason"] == "length"
        assert only["choices"][0]["logprobs"]["tokens"] == logprobs["tokens"][:-2]
        assert only["usage"]["completion_tokens"] == 0

        for request, expected in ((body, choice), ({**body, "max_tokens": 0}, only["choices"][0])):
            chunks = [e["choices"][0] for e in server.events(TEXT, request)[:-1]]
            assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
            parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
            for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [x for part in parts for x in part[field]] == expected["logprobs"][field]


def test_a_scored_prompt_is_scored_again_when_it_is_cached_and_beside_others() -> None:
    body = {"prompt": "the same prompt]", "echo": True, "logprobs": 0, "max_tokens": 3}
    with fake_server(speaking("yes"), prefill_chunk=4) as server:
        first = server.request("POST", TEXT, body)[1]["choices"]
        assert server.request("POST", TEXT, body)[1]["choices"] == first
        both = server.request("POST", TEXT, {**body, "prompt": ["the same prompt]", "x]"]})[1]
        assert both["choices"][0] == first[0]
        assert both["choices"][1]["text"] == "x]yes"
        assert both["choices"][1]["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("prompt", ["]", "a longer one]"])
def test_no_tokens_at_all_are_a_prompt_computed(prompt: str) -> None:
    with fake_server(speaking("yes")) as server:
        for fields in ({}, {"echo": True}, {"echo": True, "logprobs": 1}):
            body = {"prompt": prompt, "max_tokens": 0, **fields}
            reply = server.request("POST", TEXT, body)[1]
            (choice,) = reply["choices"]
            assert choice["text"] == (prompt if fields else "")
            assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 0)
            assert [e["choices"][0]["finish_reason"] for e in server.events(TEXT, body)[:-1]][
                -1
            ] == ("length")


# --- observation


def test_observed_json_holds_all_ids_and_what_was_reused() -> None:
    with fake_server(speaking("hé")) as server:
        reply = server.request("POST", CHAT, {**HELLO, "return_token_ids": True})[1]
    assert reply["prompt_token_ids"] == PROMPT
    assert reply["choices"][0]["token_ids"] == [*"hé".encode(), EOS]
    assert reply["reused_prompt_tokens"] == 0
    assert "performance" not in reply
    assert "token_timestamps_ns" not in reply["choices"][0]


def test_an_observed_stream_has_one_metadata_chunk_per_id_and_usage_at_its_end() -> None:
    with fake_server(speaking("hé")) as server:
        events = server.events(CHAT, {**HELLO, "return_token_ids": True})[:-1]
    assert events[0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in event for event in events[1:])
    observed = [e["choices"][0] for e in events if "token_ids" in e["choices"][0]]
    assert [choice["token_ids"] for choice in observed] == [[0x68], [0xC3], [0xA9], [EOS]]
    assert all(choice["delta"] == {} for choice in observed)
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
    assert text == "hé"
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert events[-1]["reused_prompt_tokens"] == 0
    assert all("usage" not in event for event in events[:-1])


def test_observed_usage_moves_to_the_usage_chunk_when_that_is_asked_for() -> None:
    body = {**HELLO, "return_token_ids": True, "stream_options": {"include_usage": True}}
    with fake_server(speaking("a")) as server:
        events = server.events(CHAT, body)[:-1]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert events[-2]["usage"] is None
    assert events[-2]["reused_prompt_tokens"] == 0


def test_timestamps_align_with_ids_and_follow_ingress_and_enqueue() -> None:
    body = {**HELLO, "return_token_ids": True, "return_token_timestamps": True}
    with fake_server(speaking("abc")) as server:
        reply = server.request("POST", CHAT, body)[1]
        events = server.events(CHAT, body)[:-1]
    stamps = reply["choices"][0]["token_timestamps_ns"]
    performance = reply["performance"]
    assert len(stamps) == len(reply["choices"][0]["token_ids"])
    ingress, enqueue = performance["ingress_ns"], performance["enqueue_ns"]
    assert 0 < ingress <= enqueue <= stamps[0]
    assert stamps == sorted(stamps)
    assert performance["reused_prompt_tokens"] == 0
    streamed = [e["choices"][0].get("token_timestamps_ns") for e in events]
    assert sum(stamp is not None for stamp in streamed) == 4
    assert events[-1]["performance"]["ingress_ns"] > ingress


def test_observation_changes_no_token() -> None:
    with fake_server() as server:
        body = {"prompt": "a", "max_tokens": 20, "seed": 3, "ignore_eos": True}
        plain = server.request("POST", TEXT, body)[1]
        observed = server.request("POST", TEXT, {**body, "return_token_ids": True})[1]
        assert plain["choices"][0]["text"] == observed["choices"][0]["text"]
        nulls = {"return_token_ids": None, "return_token_timestamps": None, "stream_options": None}
        assert set(server.request("POST", TEXT, {**body, **nulls})[1]) == set(plain)


# --- refusals


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


# --- routes


def test_health_and_models_tell_what_is_served() -> None:
    with fake_server() as server:
        status, health = server.request("GET", "/health")
        assert (status, health["status"], health["model"]) == (200, "ok", "fake-model")
        listed = server.request("GET", "/v1/models")[1]
        assert [model["id"] for model in listed["data"]] == ["fake-model", "fake"]
        assert server.request("GET", "/v1/models/fake")[1]["context_length"] == 64
        assert server.request("GET", "/v1/models/other")[0] == 404


def test_while_loading_only_health_tells_more_than_503() -> None:
    with fake_server(ready=False) as server:
        status, health = server.request("GET", "/health")
        assert (status, health["status"]) == (503, "loading")
        status, headers, body = server.exchange("POST", CHAT, HELLO)
        assert (status, headers["retry-after"]) == (503, "1")
        assert body["error"]["code"] == "loading"


def test_unknown_paths_and_methods_get_json_errors() -> None:
    with fake_server() as server:
        assert error_of(server, "/nowhere", {})[0] == 404
        status, headers, _ = server.exchange("GET", CHAT)
        assert (status, headers["allow"]) == (405, "POST")
        assert server.request("DELETE", "/health")[0] == 405


def test_an_api_key_guards_everything_but_health() -> None:
    with fake_server(speaking("a"), api_key="s3cret") as server:
        assert server.request("GET", "/health")[0] == 200
        for path in ("/v1/models", "/metrics"):
            assert server.request("GET", path)[0] == 401
        for wrong in ("Bearer x", "Bearer s3cre", "Basic s3cret", "s3cret", "Bearer é"):
            assert server.request("POST", CHAT, HELLO, Authorization=wrong)[0] == 401
        assert server.request("POST", CHAT, HELLO, Authorization="Bearer s3cret")[0] == 200
        assert server.request("POST", CHAT, HELLO, Authorization="bearer  s3cret")[0] == 200


def test_an_api_key_may_hold_any_character() -> None:
    with fake_server(api_key="clé-ключ") as server:
        sent = "clé-ключ".encode().decode("latin-1")  # http.client writes headers as latin-1
        assert server.request("GET", "/v1/models", Authorization=f"Bearer {sent}")[0] == 200
        assert server.request("GET", "/v1/models", **{"x-api-key": sent})[0] == 200


def test_cors_headers_only_when_asked_for() -> None:
    with fake_server(cors=True) as server:
        headers = server.exchange("OPTIONS", CHAT)[1]
        assert headers["access-control-allow-origin"] == "*"
        # Browsers do not take the asterisk for the header that carries the key.
        assert headers["access-control-allow-headers"] == "Authorization, *"
        assert "access-control-allow-origin" in server.exchange("POST", TEXT, {"prompt": "a"})[1]
    with fake_server() as server:
        assert "access-control-allow-origin" not in server.exchange("GET", "/health")[1]


def test_metrics_count_and_name_no_content() -> None:
    with fake_server(speaking("secret")) as server:
        server.request("POST", CHAT, HELLO)
        text = server.request("GET", "/metrics")[1]
    for line in (
        'ds4_sequences_finished_total{reason="stop"} 1.0',
        "ds4_generated_tokens_total 7.0",
        f"ds4_prompt_tokens_total {len(PROMPT)}.0",
        "ds4_first_token_seconds_count 1.0",
        "ds4_between_tokens_seconds_count 6.0",
        "ds4_permits_free 6.0",
    ):
        assert line in text
    assert "secret" not in text
    assert "chatcmpl" not in text


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
