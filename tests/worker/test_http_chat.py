"""Chat and text completions over a fake model: their forms, and what can be observed."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.completions import CHAT, HELLO, PROMPT, TEXT, speaking
from helpers.fake_model import EOS
from helpers.fake_server import fake_server
from helpers.scripted import Script

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
