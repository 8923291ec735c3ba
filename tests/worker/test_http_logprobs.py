"""Where an answer stops, how likely it was, and the best of several."""

from __future__ import annotations

import pytest

from helpers.completions import CHAT, HELLO, TEXT, speaking
from helpers.fake_model import BOS
from helpers.fake_server import fake_server


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
