"""Clients that go away or do not read, and the end: the rules R11 to R14 of the serving contract.

Every test waits for what it claims, not for a time.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest

from ds4_worker.config import ServerConfig
from ds4_worker.engine.thread import Engine
from ds4_worker.executor.api import ExecutorConfig, Sampled, Slice
from helpers.admission import (
    LONG,
    TEXT,
    SlowTokenizer,
    executor,
    send,
    service,
    stream_at,
    until,
)
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY
from helpers.fake_server import FakeServer, fake_server, read_all
from helpers.gate import Gate

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
