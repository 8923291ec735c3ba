"""Rejections and failures: the rules R5 to R8 of the serving contract, each by its number."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http.limits import HttpLimits
from helpers.admission import (
    LONG,
    TEXT,
    executor,
    send,
    service,
    status_of,
    stream_at,
    until,
)
from helpers.fake_executor import FakeExecutor, failing_after
from helpers.fake_model import VOCABULARY
from helpers.fake_server import FakeServer, fake_server, read_all
from helpers.gate import Gate

PATIENT = HttpLimits(silence_seconds=3600)


def gated_failure(gate: Gate, steps: int) -> Callable[[], None]:
    """Passes the gate, and fails at step `steps`."""
    check = failing_after(steps)

    def before() -> None:
        gate()
        check()

    return before


def solo(body: dict[str, Any]) -> Any:
    """The choices of a request that nothing disturbs."""
    with fake_server(executor()) as server:
        status, answer = server.request("POST", TEXT, body)
        assert status == 200
        return answer["choices"]


def too_generous(server: FakeServer) -> None:
    """Makes the HTTP side promise more context than there are pages."""
    held = service(server)
    held.model = msgspec.structs.replace(held.model, context_tokens=4096)


BEYOND = {**LONG, "max_tokens": 1000}


@pytest.mark.parametrize("stream", [False, True])
def test_r05_what_the_scheduler_rejects_is_503(stream: bool) -> None:
    with fake_server(executor(), limits=PATIENT) as server:
        too_generous(server)
        status, body = server.request("POST", TEXT, {**BEYOND, "stream": stream})
        assert (status, body["error"]["code"]) == (503, "admission_rejected")
        assert service(server).engine.stats.rejected == 1


def test_r06_an_engine_failure_before_the_headers_is_500_for_everybody() -> None:
    gate = Gate()
    broken = executor(gated_failure(gate, 1), banks=2)
    with fake_server(broken) as server, ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(server.request, "POST", TEXT, LONG) for _ in range(3)]
        gate.wait_until_a_step_is_due()
        until(server, lambda: service(server).admission.free == 3)
        gate.open()
        results = [job.result() for job in jobs]
        assert [status for status, _ in results] == [500] * 3
        assert {body["error"]["code"] for _, body in results} == {"engine_failure"}
        status, health = server.request("GET", "/health")
        assert (status, health["status"]) == (503, "failed")
        assert server.request("POST", TEXT, LONG)[0] == 500
        assert [str(error) for error in server.failures] == ["fake executor: broken on purpose"]


def test_r06_a_sequence_that_cannot_be_sampled_is_500_and_alone() -> None:
    broken = executor(banks=2)
    broken.errors[1] = "not a number"  # banks are given from 0 on
    with fake_server(broken) as server:
        status, body = server.request("POST", TEXT, {**LONG, "prompt": ["a", "b"]})
        assert (status, body["error"]["message"]) == (500, "not a number")
        assert server.request("POST", TEXT, LONG)[0] == 200
        assert server.request("GET", "/health")[0] == 200


def test_r06_a_programming_error_in_the_engine_is_a_failure_and_no_hang() -> None:
    def bug(history: list[int]) -> int:
        raise KeyError("bug")

    config = ExecutorConfig(banks=1, context_tokens=64)
    broken = FakeExecutor(config, vocabulary=VOCABULARY, choose=bug)
    seen: list[threading.ExceptHookArgs] = []
    hook, threading.excepthook = threading.excepthook, seen.append
    try:
        with fake_server(broken) as server:
            assert server.request("POST", TEXT, LONG)[0] == 500
            assert len(server.failures) == 1
    finally:
        threading.excepthook = hook
    assert [str(item.exc_value) for item in seen] == ["'bug'"]


def assert_one_error_event(text: str) -> None:
    assert text.count("event: error\n") == 1
    last = text.rstrip("\n").rsplit("data: ", 1)[1]
    assert json.loads(last)["error"]["type"] == "server_error"
    assert "[DONE]" not in text


def test_r07_a_failure_inside_a_stream_is_one_last_error_event() -> None:
    gate = Gate()
    with fake_server(executor(gated_failure(gate, 1))) as server:
        with stream_at(gate, server) as response:
            assert response.status == 200
            gate.open()
            assert_one_error_event(response.read().decode())


def test_r07_a_rejection_after_the_headers_is_one_last_error_event() -> None:
    gate = Gate()
    limits = HttpLimits(silence_seconds=0.02)
    with fake_server(executor(gate), limits=limits) as server:
        too_generous(server)
        with send(server, {**LONG, "max_tokens": 1}) as first:
            gate.wait_until_a_step_is_due()  # the engine is busy: it will reject later
            with send(server, {**BEYOND, "stream": True}) as late:
                data = b""
                while b": keepalive" not in data:
                    data += late.recv(1000)
                gate.open()
                data += read_all(late)
            assert status_of(read_all(first)) == 200
    assert status_of(data) == 200
    assert data.count(b"event: error\n") == 1
    assert b"[DONE]" not in data


def test_r08_a_rejection_disturbs_no_other_request() -> None:
    expected = solo({**LONG, "seed": 1})
    gate = Gate()
    with fake_server(executor(gate, banks=2)) as server, ThreadPoolExecutor(1) as pool:
        too_generous(server)
        other = pool.submit(server.request, "POST", TEXT, {**LONG, "seed": 1})
        gate.wait_until_a_step_is_due()
        with send(server, BEYOND) as rejected:
            gate.open()
            assert status_of(read_all(rejected)) == 503
        assert other.result()[1]["choices"] == expected
        assert server.request("GET", "/health")[1]["status"] == "ok"
        assert server.failures == []
