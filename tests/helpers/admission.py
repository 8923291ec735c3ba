"""A server whose steps a test permits one by one, and requests that wait in it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http.service import Service
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY, ByteTokenizer
from helpers.fake_server import FakeServer
from helpers.gate import Gate

TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 30, "ignore_eos": True}


def executor(before: Callable[[], None] | None = None, banks: int = 1) -> FakeExecutor:
    config = ExecutorConfig(banks=banks, context_tokens=64)
    return FakeExecutor(config, vocabulary=VOCABULARY, before_step=before)


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
