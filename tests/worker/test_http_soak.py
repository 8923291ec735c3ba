"""200 clients at once, half of them rude: nothing leaks, nothing mixes, nobody waits for them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from ds4_worker.engine.thread import Engine
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http.limits import HttpLimits
from helpers import soak
from helpers.descriptors import open_fds
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY
from helpers.fake_server import FakeServer, fake_server

CLIENTS = 200
PATIENT = HttpLimits(silence_seconds=3600, linger_seconds=0.05)


def connect_to(server: FakeServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.setblocking(False)
    return connection


async def tasks() -> int:
    """Tasks of the server's loop besides this one."""
    return len(asyncio.all_tasks()) - 1


def until_quiet(server: FakeServer) -> None:
    """Returns when everything is as if nobody had ever come."""
    service = server.app.service
    assert service is not None
    engine = service.engine
    assert isinstance(engine, Engine)

    async def quiet() -> bool:
        stats = engine.stats
        return (
            not server.server.connections
            and service.admission.free == service.admission.total
            and (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
            and not engine._routes
            and server.server.bodies.used == 0
            and await tasks() == 0
        )

    while not server.call(quiet()):
        pass


def round_of(server: FakeServer, requests: list[bytes], seed: int) -> list[soak.Outcome]:
    visits = soak.swarm(requests, CLIENTS, seed)
    return asyncio.run(soak.run_swarm(lambda: connect_to(server), visits, CLIENTS))


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(30, marks=pytest.mark.slow)], ids=["once", "again and again"]
)
def test_200_clients_of_every_kind_leave_no_trace_and_get_what_they_get_alone(rounds: int) -> None:
    config = ExecutorConfig(banks=8, context_tokens=512)
    executor = FakeExecutor(config, vocabulary=VOCABULARY)
    # The long ones are more than a connection's buffers hold.
    requests = soak.requests_of_all_apis(20, 40) + soak.requests_of_all_apis(4, 400)
    with fake_server(executor, queue=64, limits=PATIENT) as server:
        polite = [soak.Visit("reads", request) for request in requests]
        alone = {
            outcome.visit.request: outcome.body
            for outcome in asyncio.run(
                soak.run_swarm(lambda: connect_to(server), polite, at_once=1)
            )
        }
        until_quiet(server)
        before = open_fds()
        for seed in range(rounds):
            seen = soak.check(round_of(server, requests, seed), alone)
            assert sum(seen.values()) == CLIENTS
            assert len(seen) == 5
            until_quiet(server)
            assert open_fds() <= before
            executor.steps.clear()
        assert server.failures == []
