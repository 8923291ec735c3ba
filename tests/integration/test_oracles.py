"""The real model through the whole path - shards, owner, worker, HTTP - against another engine.

The rules are those of tests/golden/oracles/README.md: teacher-forced top-1 wherever the recorded
margin is larger than the noise of that engine, exact ids and prompts for conversations.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import stack
from helpers.oracles import DECISIVE_MARGIN, oracle

BATCH = 16


@pytest.fixture(scope="module", params=["first worker", "after kill -9"])
def port(request: pytest.FixtureRequest, manifest: Path) -> Iterator[int]:
    """Where the first worker serves, then where the one that took its place does."""
    port = stack.free_port()
    with stack.worker(manifest, port, "--max-seqs", "8") as first:
        if request.param == "first worker":
            yield port
            return
        first.stop(signal.SIGKILL)
    with stack.worker(manifest, port, "--max-seqs", "8"):
        yield port


def forced_answers(port: int, prompts: list[list[int]]) -> list[int]:
    """The greedy next token of every prompt; several prompts share each request."""
    answers: list[int] = []
    for first in range(0, len(prompts), BATCH):
        body = {
            "prompt": prompts[first : first + BATCH],
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        }
        status, reply = stack.request(port, "POST", "/v1/completions", body)
        assert status == 200, reply
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
        answers += [choice["token_ids"][0] for choice in choices]
    return answers


@pytest.mark.parametrize("name", ["capital", "code", "story"])
def test_teacher_forced_top_1_agrees_wherever_the_margin_is_clear(port: int, name: str) -> None:
    case = oracle("greedy")["results"]["q_fa0"][name]
    tokens = case["greedy_tokens"]
    clear = [
        step
        for step, (_, best, _, second) in enumerate(case["steps_top1_top2"])
        if best - second > DECISIVE_MARGIN
    ]
    assert len(clear) > 10, "the oracle must leave something to test"
    got = forced_answers(port, [case["prompt_tokens"] + tokens[:step] for step in clear])
    expected = [case["steps_top1_top2"][step][0] for step in clear]
    assert got == expected


@pytest.mark.parametrize("case", oracle("chat")["cases"], ids=lambda case: str(case["name"]))
def test_conversations_are_rendered_and_encoded_exactly(port: int, case: dict[str, Any]) -> None:
    if "tokens" not in case:
        pytest.fail(f"oracle case {case['name']} has no tokens")
    body = {
        "messages": case["messages"],
        "max_tokens": 1,
        "temperature": 0,
        "return_token_ids": True,
    }
    status, reply = stack.request(port, "POST", "/v1/chat/completions", body)
    assert status == 200, reply
    assert reply["prompt_token_ids"] == case["tokens"]


def test_tricky_texts_become_the_same_ids(port: int) -> None:
    cases = [case for case in oracle("tokenize")["cases"] if case["text"]]
    got = []
    for case in cases:
        body = {"prompt": case["text"], "max_tokens": 1, "return_token_ids": True}
        status, reply = stack.request(port, "POST", "/v1/completions", body)
        assert status == 200, reply
        got.append(reply["prompt_token_ids"])
    assert got == [case["special1_parse1"] for case in cases]


def test_log_probabilities_follow_the_other_engine(port: int) -> None:
    """Every third token of one text; those outside the 20 best have no figure to compare."""
    text = oracle("nll")
    exact = text["results"]["f32_fa0_kvf32"]["logprobs"]
    tokens, differences = text["tokens"], []
    positions = range(2, len(tokens) - 1, 3)
    prompts = [tokens[: position + 1] for position in positions]
    for first in range(0, len(prompts), BATCH):
        body = {"prompt": prompts[first : first + BATCH], "max_tokens": 1, "logprobs": 20}
        body |= {"temperature": 0, "return_token_ids": True}
        status, reply = stack.request(port, "POST", "/v1/completions", body)
        assert status == 200, reply
        for choice in sorted(reply["choices"], key=lambda choice: int(choice["index"])):
            position = positions[first + choice["index"]]
            chosen = choice["logprobs"]["token_logprobs"][0]
            if choice["token_ids"][0] == tokens[position + 1]:
                differences.append(abs(chosen - exact[position]))
    assert len(differences) > 15, "too few tokens of the text are the most likely ones"
    assert sum(differences) / len(differences) < 0.06
