"""Admission, failure and the end: the rules R1 to R14 of the serving contract, each by its number.

What they say is told in docs/http.md. Every test waits for what it claims, not for a time.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from ds4_worker.config import ServerConfig
from ds4_worker.engine.thread import Engine
from ds4_worker.executor.api import ExecutorConfig, Sampled, Slice
from ds4_worker.http.limits import HttpLimits
from ds4_worker.http.service import FRONTEND_WORKERS, Service
from helpers.fake_executor import FakeExecutor, failing_after
from helpers.fake_model import VOCABULARY, ByteTokenizer
from helpers.fake_server import FakeServer, fake_server, read_all
from helpers.gate import Gate

TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 30, "ignore_eos": True}
PATIENT = HttpLimits(silence_seconds=3600)


def executor(before: Callable[[], None] | None = None, banks: int = 1) -> FakeExecutor:
    config = ExecutorConfig(banks=banks, context_tokens=64)
    return FakeExecutor(config, vocabulary=VOCABULARY, before_step=before)


def gated_failure(gate: Gate, steps: int) -> Callable[[], None]:
    """Passes the gate, and fails at step `steps`."""
    check = failing_after(steps)

    def before() -> None:
        gate()
        check()

    return before


def service(server: FakeServer) -> Service:
    assert server.app.service is not None
    return server.app.service


def until(server: FakeServer, condition: Callable[[], bool]) -> None:
    """Turns of the server's loop until something holds between two of them."""

    async def holds() -> bool:
        return condition()

    while not server.call(holds()):
        pass


def send(server: FakeServer, body: dict[str, Any], path: str = TEXT) -> socket.socket:
    """A request on a connection of its own; the answer is not read."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    connection = server.connect()
    connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + data)
    return connection


def status_of(data: bytes) -> int:
    return int(data.split(b" ", 2)[1])


@contextmanager
def stream_at(gate: Gate, server: FakeServer) -> Iterator[http.client.HTTPResponse]:
    """A stream whose first token has arrived and whose next step waits at the gate."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    gate.allow()
    # Observed, so that every token sends something even when it completes no character.
    body = {**LONG, "stream": True, "return_token_ids": True}
    connection.request("POST", TEXT, json.dumps(body))
    gate.wait_until_a_step_is_due()
    gate.wait_until_a_step_is_due()
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def solo(body: dict[str, Any]) -> Any:
    """The choices of a request that nothing disturbs."""
    with fake_server(executor()) as server:
        status, answer = server.request("POST", TEXT, body)
        assert status == 200
        return answer["choices"]


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


class SlowTokenizer(ByteTokenizer):
    """Counts who is in it, and keeps them until it is told."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.leave = threading.Event()
        self.inside = self.most = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.entered.release()
        assert self.leave.wait(10)
        with self._lock:
            self.inside -= 1
        return super().encode(text, add_special=add_special, parse_special=parse_special)


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


# --- R5 to R8: rejections and failures


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


# --- R11: clients that go away


def leave(server: FakeServer, connection: socket.socket) -> None:
    """Closes a connection and returns when its permit is free again."""
    connection.close()
    until(server, lambda: service(server).admission.free == service(server).admission.total)


@pytest.mark.parametrize("stream", [False, True])
def test_r11_a_client_that_goes_away_while_it_decodes_costs_no_further_step(stream: bool) -> None:
    gate = Gate()
    with fake_server(executor(gate)) as server:
        connection = send(server, {**LONG, "prompt": [97], "stream": stream})
        gate.allow()
        gate.wait_until_a_step_is_due()
        gate.wait_until_a_step_is_due()
        leave(server, connection)
        gate.open()
        assert server.request("POST", TEXT, {"prompt": [98, 98], "max_tokens": 1})[0] == 200
        steps = [[(piece.start, len(piece.tokens)) for piece in s] for s in server.executor.steps]
        assert steps == [[(0, 1)], [(1, 1)], [(0, 2)]], "the step that ran, and nothing after it"
        assert service(server).engine.stats.finished["cancelled"] == 1


def test_r11_a_client_that_goes_away_during_its_prompt_costs_no_further_chunk() -> None:
    gate = Gate()
    with fake_server(executor(gate), prefill_chunk=8) as server:
        connection = send(server, {**LONG, "prompt": [97] * 40, "stream": True})
        gate.allow()
        gate.wait_until_a_step_is_due()
        gate.wait_until_a_step_is_due()
        leave(server, connection)
        gate.open()
        assert server.request("POST", TEXT, {"prompt": [98, 98], "max_tokens": 1})[0] == 200
        steps = [[(piece.start, len(piece.tokens)) for piece in s] for s in server.executor.steps]
        assert steps == [[(0, 8)], [(8, 8)], [(0, 2)]]


def test_r11_a_client_that_goes_away_while_it_waits_never_runs() -> None:
    gate = Gate()
    with fake_server(executor(gate), queue=2) as server, ThreadPoolExecutor(1) as pool:
        runs = pool.submit(server.request, "POST", TEXT, {"prompt": [97, 97], "max_tokens": 2})
        gate.wait_until_a_step_is_due()
        waits = send(server, {"prompt": [98] * 4, "max_tokens": 2})
        until(server, lambda: service(server).admission.free == 1)
        waits.close()
        until(server, lambda: service(server).admission.free == 2)
        gate.open()
        assert runs.result()[0] == 200
        assert all(len(piece.tokens) != 4 for step in server.executor.steps for piece in step)


def test_r11_a_client_that_goes_away_while_its_prompt_is_prepared_is_never_queued() -> None:
    slow = SlowTokenizer()
    with fake_server(executor()) as server:
        held = service(server)
        held.model = msgspec.structs.replace(held.model, tokenizer=slow)
        chat = {"messages": [{"role": "user", "content": "a"}]}
        connection = send(server, chat, "/v1/chat/completions")
        assert slow.entered.acquire(timeout=10)
        leave(server, connection)
        slow.leave.set()
        assert held.engine.stats.submitted == 0


# --- R12, R13: readers that do not read


class Plenty(FakeExecutor):
    """Says "a" for as long as it is asked; tells when a sequence ends."""

    def __init__(self, banks: int) -> None:
        config = ExecutorConfig(banks=banks, context_tokens=8192)
        super().__init__(config, vocabulary=VOCABULARY, choose=lambda history: 97)

    def step(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        results = super().step(slices)
        self.steps.clear()  # thousands of them
        return results


OBSERVED = {"stream": True, "return_token_ids": True, "ignore_eos": True}


def test_r12_a_paused_reader_holds_up_neither_the_engine_nor_the_others() -> None:
    with fake_server(Plenty(banks=2)) as server:
        with send(server, {"prompt": "a", "max_tokens": 2000, **OBSERVED}) as paused:
            stats = service(server).engine.stats
            while not stats.finished["length"]:
                other = {"prompt": "b", "max_tokens": 1, "stop_token_ids": list(range(VOCABULARY))}
                assert server.request("POST", TEXT, other)[0] == 200
            data = read_all(paused)
        assert data.count(b'"token_ids":[') == 2000, "nothing was lost"


def test_r13_a_finished_answer_frees_its_bank_and_keeps_its_permit_until_it_is_read() -> None:
    with fake_server(Plenty(banks=1), queue=0) as server:
        with send(server, {"prompt": "a", "max_tokens": 2000, **OBSERVED}) as paused:
            held = service(server)
            until(server, lambda: bool(held.engine.stats.finished["length"]))
            assert (held.engine.stats.running, held.admission.free) == (0, 0)
            assert server.request("POST", TEXT, LONG)[0] == 429
            assert read_all(paused).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        until(server, lambda: held.admission.free == 1)
        assert server.request("POST", TEXT, LONG)[0] == 200


def test_r13_a_whole_answer_keeps_its_permit_until_it_is_read_too() -> None:
    # 400 kB: what the connection's buffers hold counts as read.
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "logprobs": 20}
    with fake_server(Plenty(banks=1), queue=0) as server:
        held = service(server)
        with send(server, body) as paused:
            until(server, lambda: bool(held.engine.stats.finished["length"]))
            assert server.request("POST", TEXT, LONG)[0] == 429
            assert len(read_all(paused)) > 400_000
        until(server, lambda: held.admission.free == 1)
        leave(server, send(server, body))


def test_r13_a_reader_that_drops_a_finished_answer_gives_its_permit_back() -> None:
    with fake_server(Plenty(banks=1), queue=0) as server:
        connection = send(server, {"prompt": "a", "max_tokens": 2000, **OBSERVED})
        until(server, lambda: bool(service(server).engine.stats.finished["length"]))
        leave(server, connection)
        assert service(server).engine.stats.finished["cancelled"] == 0


# --- R14: the end


def test_r14_the_drain_takes_five_seconds_unless_told_otherwise() -> None:
    assert ServerConfig().drain_seconds == 5.0


def test_r14_draining_finishes_streams_and_closes_idle_connections() -> None:
    gate = Gate()
    with fake_server(executor(gate)) as server, server.connect() as idle:
        server.request("GET", "/health")
        with stream_at(gate, server) as response:
            finished = server.start(server.server.drain(10))
            assert idle.recv(1) == b""
            gate.open()
            assert response.read().endswith(b"data: [DONE]\n\n")
        assert finished.result() == 0


def test_r14_a_drain_that_takes_too_long_cuts_the_rest() -> None:
    gate = Gate()
    with fake_server(executor(gate)) as server:
        with stream_at(gate, server) as response:
            assert server.start(server.server.drain(0.05)).result() == 1
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                response.read()
        gate.open()


def test_r14_the_executor_lives_until_its_own_last_step_is_over() -> None:
    gate = Gate()
    with fake_server(executor(gate)) as server, ThreadPoolExecutor(1) as pool:
        engine = service(server).engine
        assert isinstance(engine, Engine)
        with send(server, {**LONG, "stream": True}):
            gate.wait_until_a_step_is_due()  # inside a step
            assert server.start(server.server.drain(0.0)).result() == 1
            stopped: Future[None] = pool.submit(engine.stop)
            assert not server.executor.closed
            assert not stopped.done()
            gate.open()
            stopped.result()
            assert server.executor.closed


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
