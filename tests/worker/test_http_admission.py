"""Admission: the rules R1 to R4, R9 and R10 of the serving contract, each by its number.

What they say is told in docs/http.md. Every test waits for what it claims, not for a time.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http.service import FRONTEND_WORKERS
from helpers.admission import (
    LONG,
    TEXT,
    SlowTokenizer,
    executor,
    send,
    service,
    status_of,
    until,
)
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY
from helpers.fake_server import fake_server, read_all
from helpers.gate import Gate

# --- R1, R2, R3: permits, preparation, queues


def test_r01_a_full_server_answers_429_and_recovers() -> None:
    gate = Gate()
    with fake_server(executor(gate), queue=1) as server, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.request, "POST", TEXT, LONG) for _ in range(2)]
        gate.wait_until_a_step_is_due()
        until(server, lambda: not service(server).admission.free)
        status, headers, body = server.exchange("POST", TEXT, LONG)
        assert (status, headers["retry-after"]) == (429, "1")
        assert body["error"]["code"] == "queue_full"
        assert server.request("GET", "/health")[0] == 200
        gate.open()
        assert [job.result()[0] for job in running] == [200, 200]
        assert server.request("POST", TEXT, LONG)[0] == 200


def test_r01_the_permits_are_those_that_run_and_those_that_wait() -> None:
    with fake_server(executor(banks=2), queue=3) as server:
        assert service(server).admission.total == 5
        status, body = server.request("POST", TEXT, {"prompt": ["a"] * 6})
        assert (status, body["error"]["code"]) == (400, "too_many_sequences")
        assert server.request("POST", TEXT, {"prompt": ["a"] * 5})[0] == 200


def test_r01_a_permit_is_taken_before_the_prompt_is_prepared() -> None:
    with fake_server(executor(), queue=0) as server:
        gate = service(server).preparing
        for _ in range(FRONTEND_WORKERS):
            server.call(gate.acquire())
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        with send(server, chat, "/v1/chat/completions") as waiting:
            until(server, lambda: not service(server).admission.free)
            assert service(server).engine.stats.submitted == 0
            assert server.request("POST", TEXT, LONG)[0] == 429
            for _ in range(FRONTEND_WORKERS):
                server.loop.call_soon_threadsafe(gate.release)
            assert status_of(read_all(waiting)) == 200


def test_r02_few_prompts_are_prepared_at_once_and_nobody_else_is_held_up() -> None:
    slow = SlowTokenizer()
    with fake_server(executor(banks=4), queue=4) as server, ThreadPoolExecutor(6) as pool:
        held = service(server)
        held.model = msgspec.structs.replace(held.model, tokenizer=slow)
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        path = "/v1/chat/completions"
        jobs = [pool.submit(server.request, "POST", path, chat) for _ in range(6)]
        for _ in range(FRONTEND_WORKERS):
            assert slow.entered.acquire(timeout=10)
        until(server, lambda: held.admission.free == 2)
        assert slow.inside == FRONTEND_WORKERS
        # Token ids need no preparation: they overtake those that wait.
        assert server.request("POST", TEXT, {"prompt": [97], "max_tokens": 1})[0] == 200
        slow.leave.set()
        assert [job.result()[0] for job in jobs] == [200] * 6
        assert slow.most == FRONTEND_WORKERS


def test_r03_no_more_wait_for_a_bank_than_the_queue_holds() -> None:
    gate = Gate()
    with fake_server(executor(gate, banks=2), queue=3) as server, ThreadPoolExecutor(9) as pool:
        jobs = [pool.submit(server.request, "POST", TEXT, LONG) for _ in range(9)]
        until(server, lambda: sum(job.done() for job in jobs) == 4)
        stats = service(server).engine.stats
        gate.allow(2)
        for _ in range(3):
            gate.wait_until_a_step_is_due()
        assert (stats.running, stats.waiting) == (2, 3)
        gate.open()
        assert sorted(job.result()[0] for job in jobs) == [200] * 5 + [429] * 4


# --- R4: invalid requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": []}),
        (TEXT, {"prompt": [VOCABULARY]}),
        (TEXT, {"prompt": "a", "stop": ["", "b"]}),
        (TEXT, {"prompt": "a", "temperature": -1}),
        (TEXT, {"prompt": "a" * 64}),
        (TEXT, {"prompt": ["a", "a" * 64]}),
        (TEXT, {"prompt": "a", "n": 99}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 64}]}),
    ],
)
def test_r04_an_invalid_request_is_400_and_nothing_of_it_is_queued(path: str, body: object) -> None:
    with fake_server() as server:
        assert server.request("POST", path, body)[0] == 400
        assert service(server).engine.stats.submitted == 0
        assert service(server).admission.free == service(server).admission.total


# --- R9, R10: pages and extents


def test_r09_a_page_shortage_is_waited_out() -> None:
    config = ExecutorConfig(banks=4, context_tokens=64, pages=9)  # room for one such request
    small = FakeExecutor(config, vocabulary=VOCABULARY)
    with fake_server(small, queue=8) as server, ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(server.request, "POST", TEXT, LONG) for _ in range(6)]
        assert [job.result()[0] for job in jobs] == [200] * 6
        assert max(len(step) for step in small.steps) == 1


def test_r10_a_prompt_beyond_the_context_is_400_and_says_both_numbers() -> None:
    with fake_server() as server:
        status, body = server.request("POST", TEXT, {"prompt": [97] * 64})
        error = body["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (64, 64)
        assert server.request("POST", TEXT, {"prompt": [97] * 63})[0] == 200


# --- and what follows from them


def test_concurrent_requests_share_steps() -> None:
    gate = Gate()
    shared = executor(gate, banks=4)
    with fake_server(shared, queue=8) as server, ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(server.request, "POST", TEXT, LONG) for _ in range(4)]
        gate.wait_until_a_step_is_due()
        until(server, lambda: service(server).admission.free == 8)
        gate.open()
        assert [job.result()[0] for job in jobs] == [200] * 4
    assert max(len(step) for step in shared.steps) == 4
