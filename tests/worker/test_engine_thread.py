"""The engine's thread: what it does while nobody asks for anything."""

from __future__ import annotations

import threading
from typing import Any

from ds4_worker.engine.thread import Engine
from ds4_worker.executor.api import ExecutorConfig
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY
from helpers.fake_server import FakeServer, fake_server
from helpers.gate import Gate

TEXT = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def gated(gate: Gate) -> FakeExecutor:
    config = ExecutorConfig(banks=2, context_tokens=64)
    return FakeExecutor(config, vocabulary=VOCABULARY, before_step=gate)


def engine_of(server: FakeServer) -> Engine:
    assert server.app.service is not None
    engine = server.app.service.engine
    assert isinstance(engine, Engine)
    return engine


def test_an_idle_engine_warms_up_and_nobody_can_tell() -> None:
    with fake_server() as server:
        _, expected = server.request("POST", TEXT, BODY)
    gate = Gate()
    executor = gated(gate)
    with fake_server(executor) as server:
        engine = engine_of(server)
        engine.warm()
        gate.wait_until_a_step_is_due()
        gate.open()
        _, reply = server.request("POST", TEXT, BODY)
        assert [list(piece.tokens) for piece in executor.steps[0]] == [[0]]
        assert reply["choices"] == expected["choices"]
        assert reply["usage"] == expected["usage"]
        assert (engine.stats.submitted, engine.stats.steps) == (1, 4)


def test_a_request_that_is_there_first_does_not_wait_for_the_warming_up() -> None:
    gate = Gate()
    executor = gated(gate)
    with fake_server(executor) as server:
        client = threading.Thread(target=server.request, args=("POST", TEXT, BODY))
        client.start()
        gate.wait_until_a_step_is_due()
        engine_of(server).warm()
        gate.open()
        client.join()
        assert server.request("POST", TEXT, BODY)[0] == 200
        assert engine_of(server).stats.generated_tokens == 8
        assert len(executor.steps) == 8, "every step was somebody's"
