"""Drafts of a real worker, over HTTP: the same answers to the last bit of every log-probability."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import stack

TEXT = (
    "The ferry leaves at half past four. The ferry to the island of Varn leaves at half past four, "
    "and the ferry to the lighthouse leaves at five. "
)
BODY: dict[str, Any] = {
    "prompt": TEXT * 3 + "The ferry leaves",
    "max_tokens": 60,
    "logprobs": 3,
    "return_token_ids": True,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0, "seed": 5, "n": 2},
    "penalized": {"temperature": 0, "frequency_penalty": 0.1, "repetition_penalty": 1.02},
    "stopped": {"temperature": 0, "stop": ["lighthouse"]},
    "grammar": {
        "temperature": 0,
        "structured_outputs": {"regex": "( leaves| ferry| at| five){12}"},
    },
}


@pytest.fixture(scope="module")
def ports(manifest: Path) -> Iterator[tuple[int, int]]:
    """A worker without drafts and one that offers all there are."""
    ports = stack.free_port(), stack.free_port()
    with stack.worker(manifest, ports[0], "--speculate", "off"):
        with stack.worker(manifest, ports[1], "--speculate", "8"):
            yield ports


def accepted(port: int) -> int:
    """Drafts that came true, so far."""
    stats: dict[str, Any] = stack.request(port, "GET", "/v1/stats")[1]
    return int(stats["tokens"]["draft_accepted"])


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS.keys())
def test_drafts_change_no_answer(ports: tuple[int, int], fields: dict[str, Any]) -> None:
    body = {**BODY, **fields}
    before = [accepted(port) for port in ports]
    plain, drafted = (stack.request(port, "POST", "/v1/completions", body)[1] for port in ports)
    assert plain["choices"] == drafted["choices"]
    assert plain["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    assert accepted(ports[0]) == before[0] == 0
    assert accepted(ports[1]) > before[1]
