"""A worker dies by `kill -9`; the next one gives the very same bytes from the very same memory."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from helpers import stack

GREEDY = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "logprobs": 2}
SAMPLED = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.9, "seed": 7}


def answers(port: int) -> list[Any]:
    """What a client sees, without the fields that name the request or its time."""
    seen = []
    for body in (GREEDY, SAMPLED):
        status, reply = stack.request(port, "POST", "/v1/completions", body)
        assert status == 200, reply
        seen.append([reply["choices"], reply["usage"]])
    return seen


def test_a_killed_worker_is_replaced_with_identical_answers_and_no_second_load(
    owner: stack.Program, manifest: Path
) -> None:
    port = stack.free_port()
    lines_before = len([line for line in owner.lines if "ready manifest=" in line])
    with stack.worker(manifest, port) as first:
        before = answers(port)
        first.stop(signal.SIGKILL)
    with stack.worker(manifest, port, "--threads", "1"):
        after = answers(port)
    assert json.dumps(before) == json.dumps(after)
    assert owner.process.poll() is None
    assert len([line for line in owner.lines if "ready manifest=" in line]) == lines_before == 1


def test_a_client_that_connects_while_no_worker_lives_is_answered_by_the_next(
    owner: stack.Program, manifest: Path
) -> None:
    port = stack.free_port()
    with stack.worker(manifest, port) as first:
        first.stop(signal.SIGKILL)
        with stack.connected(port) as waiting:
            waiting.sendall(b"GET /v1/models HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
            with stack.worker(manifest, port), waiting.makefile("rb") as reply:
                assert reply.readline().split()[1] == b"200"
