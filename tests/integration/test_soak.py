"""200 clients at once against a real worker and a real model: no trace, no mixture."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from pathlib import Path

import pytest

from helpers import soak, stack

CLIENTS = 200
IDLE = ("ds4_sequences_running", "ds4_sequences_waiting", "ds4_kv_pages_used")


def metric(port: int, name: str) -> float:
    text = stack.request(port, "GET", "/metrics")[1]
    found = re.search(rf"^{name} ([0-9.e+]+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def until_quiet(port: int) -> None:
    """Returns when only the one who asks is connected, and nothing runs."""
    while (
        metric(port, "ds4_http_connections") != 1
        or metric(port, "ds4_permits_free") != metric(port, "ds4_permits")
        or any(metric(port, name) for name in IDLE)
    ):
        pass


def connect_to(port: int) -> socket.socket:
    connection = stack.connected(port)
    connection.setblocking(False)
    return connection


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_clients_of_a_real_worker_get_what_they_get_alone(manifest: Path) -> None:
    port = stack.free_port()
    requests = soak.requests_of_all_apis(16, 24)
    polite = [soak.Visit("reads", request) for request in requests]
    flags = ("--max-seqs", "8", "--max-queue", "64", "--ctx", "512")
    with stack.worker(manifest, port, *flags) as worker:
        folder = f"/proc/{worker.process.pid}/fd"

        def run(visits: list[soak.Visit], at_once: int) -> list[soak.Outcome]:
            return asyncio.run(soak.run_swarm(lambda: connect_to(port), visits, at_once))

        alone = {outcome.visit.request: outcome.body for outcome in run(polite, 1)}
        until_quiet(port)
        before = len(os.listdir(folder))
        for seed in range(3):
            seen = soak.check(run(soak.swarm(requests, CLIENTS, seed), CLIENTS), alone)
            assert sum(seen.values()) == CLIENTS
            until_quiet(port)
            assert len(os.listdir(folder)) == before
        assert worker.stop() == 0
        assert "internal error" not in worker.text
