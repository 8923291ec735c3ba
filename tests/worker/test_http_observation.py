"""What a client may watch: the rules R28 to R36 and R50, each by its number.

A failure as an end of its own: R6 and R7, in test_http_failures.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from ds4_worker.engine import api
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http import service
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import EOS, VOCABULARY
from helpers.fake_server import FakeServer, fake_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
PROMPTS = {CHAT: list(b"[user]hi\n[assistant]"), TEXT: list(b"hi]")}
BODIES: dict[str, dict[str, Any]] = {CHAT: HELLO, TEXT: {"prompt": [*b"hi]"], "temperature": 0}}
FIELDS = ("return_token_ids", "return_token_timestamps")
IDS = {"return_token_ids": True}
TIMED = {**IDS, "return_token_timestamps": True}
USAGE = {"stream_options": {"include_usage": True}}
ANSWER = [*"héllo".encode(), EOS]
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])


def speaking() -> FakeExecutor:
    """Says ANSWER after prompts that end with `]`."""

    def choose(history: list[int]) -> int:
        end = max(i for i, token in enumerate(history) if token == ord("]"))
        token: int = ANSWER[len(history) - 1 - end]
        return token

    config = ExecutorConfig(banks=2, context_tokens=64)
    return FakeExecutor(config, vocabulary=VOCABULARY, choose=choose)


def chunks_of(server: FakeServer, path: str, **fields: Any) -> list[Any]:
    events = server.events(path, {**BODIES[path], **fields})
    assert events[-1] == "[DONE]"
    return events[:-1]


def joined(events: list[Any], field: str) -> list[int]:
    """The values of a field of the first choice of every chunk, one after the other."""
    return [
        value
        for event in events
        if event["choices"]
        for value in event["choices"][0].get(field, [])
    ]


# --- R28: the fields


@BOTH
@pytest.mark.parametrize("field", [*FIELDS, "include_usage"])
@pytest.mark.parametrize("value", [0, 1, "true", [], {}])
def test_r28_an_observation_field_is_a_boolean_or_null(
    path: str, field: str, value: object
) -> None:
    fields = {"stream_options": {field: value}} if field == "include_usage" else {field: value}
    with fake_server(speaking()) as server:
        status, body = server.request("POST", path, {**BODIES[path], **fields})
        assert status == 400
        assert body["error"]["param"].endswith(field)
        assert server.request("POST", path, {**BODIES[path], field: None})[0] == 200


@BOTH
def test_r28_timestamps_without_ids_are_refused(path: str) -> None:
    with fake_server(speaking()) as server:
        for ids in ({}, {"return_token_ids": None}, {"return_token_ids": False}):
            body = {**BODIES[path], "return_token_timestamps": True, **ids}
            status, reply = server.request("POST", path, body)
            assert (status, reply["error"]["param"]) == (400, "return_token_timestamps")


# --- R29, R30: ids


@BOTH
def test_r29_a_whole_answer_has_the_raw_ids_of_prompt_and_answer(path: str) -> None:
    with fake_server(speaking()) as server:
        reply = server.request("POST", path, {**BODIES[path], **IDS})[1]
    assert reply["prompt_token_ids"] == PROMPTS[path]
    assert reply["choices"][0]["token_ids"] == ANSWER, "with the end-of-sequence id"


@BOTH
def test_r29_hidden_stop_tokens_are_among_the_ids(path: str) -> None:
    with fake_server(speaking()) as server:
        body = {**BODIES[path], **IDS, "stop_token_sequences": [[*b"ll"]]}
        choice = server.request("POST", path, body)[1]["choices"][0]
    assert choice["token_ids"] == [*"héll".encode()]
    assert choice.get("text", choice.get("message", {}).get("content")) == "hé"


@BOTH
def test_r30_a_stream_has_one_metadata_chunk_per_id_and_they_join_to_the_whole(path: str) -> None:
    with fake_server(speaking()) as server:
        whole = server.request("POST", path, {**BODIES[path], **IDS})[1]
        events = chunks_of(server, path, **IDS)
    assert [event.get("prompt_token_ids") for event in events] == [
        PROMPTS[path],
        *[None] * (len(events) - 1),
    ]
    assert joined(events, "token_ids") == whole["choices"][0]["token_ids"]
    for event in events:
        choice = event["choices"][0]
        if "token_ids" in choice:
            assert len(choice["token_ids"]) == 1
            assert choice.get("delta", {}) == {}
            assert choice.get("text", "") == ""


# --- R31 to R33: clocks


@BOTH
def test_r31_timestamps_are_aligned_with_ids_and_do_not_decrease(path: str) -> None:
    with fake_server(speaking()) as server:
        before = api.now_ns()
        reply = server.request("POST", path, {**BODIES[path], **TIMED})[1]
        events = chunks_of(server, path, **TIMED)
        after = api.now_ns()
    for stamps in (
        reply["choices"][0]["token_timestamps_ns"],
        joined(events, "token_timestamps_ns"),
    ):
        assert len(stamps) == len(ANSWER)
        assert [before, *stamps, after] == sorted([before, *stamps, after])


@BOTH
def test_r32_the_end_of_an_observed_answer_says_what_was_reused_and_used(path: str) -> None:
    with fake_server(speaking()) as server:
        whole = server.request("POST", path, {**BODIES[path], **IDS})[1]
        events = chunks_of(server, path, **TIMED)
        plain = server.request("POST", path, BODIES[path])[1]
    assert whole["usage"]["completion_tokens"] == len(ANSWER)
    assert "performance" not in whole
    assert "reused_prompt_tokens" in whole
    *earlier, last = events
    assert last["usage"]["completion_tokens"] == len(ANSWER)
    assert set(last["performance"]) == {"ingress_ns", "enqueue_ns", "reused_prompt_tokens"}
    assert last["performance"]["reused_prompt_tokens"] == last["reused_prompt_tokens"] > 0
    for event in earlier:
        assert not {"performance", "reused_prompt_tokens"} & set(event)
    assert not {"performance", "reused_prompt_tokens", "prompt_token_ids"} & set(plain)


@BOTH
def test_r33_ingress_comes_before_enqueue_and_that_before_the_first_token(path: str) -> None:
    with fake_server(speaking()) as server:
        reply = server.request("POST", path, {**BODIES[path], **TIMED})[1]
    performance, stamps = reply["performance"], reply["choices"][0]["token_timestamps_ns"]
    assert 0 < performance["ingress_ns"] <= performance["enqueue_ns"] <= stamps[0]


# --- R34, R35: what watching costs


@BOTH
def test_r34_an_unobserved_stream_reads_no_clock_per_token_and_sends_no_ids(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def counted() -> int:
        reads.append(api.now_ns())
        return reads[-1]

    monkeypatch.setattr(service, "now_ns", counted)
    with fake_server(speaking()) as server:
        events = chunks_of(server, path)
    assert len(reads) == 2, "ingress and enqueue"
    for event in events:
        assert "token_ids" not in event["choices"][0]
        assert "prompt_token_ids" not in event


@BOTH
def test_r35_watching_changes_no_token_no_step_and_no_reuse(path: str) -> None:
    found = []
    for fields in ({}, IDS, TIMED, {**TIMED, **USAGE}):
        executor = FakeExecutor(ExecutorConfig(banks=2, context_tokens=64), vocabulary=VOCABULARY)
        body = {**BODIES[path], "temperature": 1, "seed": 5, "max_tokens": 20, **fields}
        with fake_server(executor) as server:
            for _ in range(2):
                reply = server.request("POST", path, body)[1]
            steps = [[(s.bank, s.start, list(s.tokens)) for s in step] for step in executor.steps]
            choice = reply["choices"][0]
            text = choice.get("text", choice.get("message", {}).get("content"))
            assert server.app.service
            stats = server.app.service.engine.stats
            found.append((text, steps, stats.prefix_hits, stats.pages_cached))
    assert found[1:] == found[:1] * 3


# --- R36: usage


@BOTH
def test_r36_usage_is_one_last_chunk_without_choices_and_null_before(path: str) -> None:
    with fake_server(speaking()) as server:
        *earlier, last = chunks_of(server, path, **USAGE)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(ANSWER)
        assert all(event["usage"] is None for event in earlier)
        *earlier, last = chunks_of(server, path, **USAGE, **IDS)
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], len(ANSWER))
        assert all(event["usage"] is None for event in earlier)
        *earlier, last = chunks_of(server, path, **IDS)
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["usage"]["completion_tokens"] == len(ANSWER)
        assert all("usage" not in event for event in earlier)
        assert all("usage" not in event for event in chunks_of(server, path))


# --- R50: ends are told apart


@BOTH
def test_r50_each_end_has_a_reason_of_its_own(path: str) -> None:
    with fake_server(speaking()) as server:
        for fields, reason, tokens in (
            ({}, "stop", len(ANSWER)),
            ({"max_tokens": 2}, "length", 2),
            ({"stop": "l"}, "stop", 4),
            ({"stop_token_ids": [ord("l")]}, "stop", 4),
        ):
            reply = server.request("POST", path, {**BODIES[path], **fields})[1]
            assert reply["choices"][0]["finish_reason"] == reason
            assert reply["usage"]["completion_tokens"] == tokens
            last = chunks_of(server, path, **fields)[-1]
            assert last["choices"][0]["finish_reason"] == reason
        assert server.app.service
        finished = server.app.service.engine.stats.finished
        assert finished == {"stop": 6, "length": 2, "cancelled": 0, "failed": 0}
