"""The HTTP side of a worker over a `FakeExecutor`, in this process, on a real socket."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop

from ds4_worker.engine.api import Speculate
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.thread import Engine
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http.admission import Admission
from ds4_worker.http.app import App
from ds4_worker.http.limits import HttpLimits
from ds4_worker.http.model import ServedModel
from ds4_worker.http.parking import Parking
from ds4_worker.http.server import HttpServer
from ds4_worker.http.service import Service
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY, ByteDetokenizer, served_model

DEADLINE_SECONDS = 10.0
T = TypeVar("T")


@dataclass
class FakeServer:
    """A running server, at `("127.0.0.1", port)` or a path. `failures` collects what the engine and
    the handlers reported."""

    address: tuple[str, int] | str
    executor: FakeExecutor
    app: App
    server: HttpServer
    loop: asyncio.AbstractEventLoop
    failures: list[BaseException] = field(default_factory=list)

    @property
    def port(self) -> int:
        assert isinstance(self.address, tuple), f"a server at {self.address} has no port"
        return self.address[1]

    def connect(self) -> socket.socket:
        client = socket.socket(
            socket.AF_INET if isinstance(self.address, tuple) else socket.AF_UNIX
        )
        client.settimeout(DEADLINE_SECONDS)
        client.connect(self.address)
        return client

    def raw(self, data: bytes) -> bytes:
        """Everything the server sends for these bytes until it closes the connection."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_all(connection)

    def request(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, Any]:
        """One request; (status, decoded JSON or text)."""
        status, _, payload = self.exchange(method, path, body, **headers)
        return status, payload

    def exchange(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("localhost", timeout=DEADLINE_SECONDS)
        connection.sock = self.connect()
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            payload = response.read().decode()
            found = {name.lower(): value for name, value in response.getheaders()}
            if "json" in found.get("content-type", "") and payload:
                return response.status, found, json.loads(payload)
            return response.status, found, payload
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of every server-sent event; comments are dropped, [DONE] is a string."""
        status, text = self.request("POST", path, {**body, "stream": True})
        assert status == 200, text
        data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the server's loop."""
        return self.start(coroutine).result(DEADLINE_SECONDS)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


@contextmanager
def fake_server(
    executor: FakeExecutor | None = None,
    *,
    queue: int = 4,
    ready: bool = True,
    limits: HttpLimits | None = None,
    template: str | None = "default",
    prefill_chunk: int = 512,
    listener: socket.socket | None = None,
    parking: Parking | None = None,
    model: ServedModel | None = None,
    speculate: Speculate = "off",
    **options: Any,
) -> Iterator[FakeServer]:
    """Starts a server in a thread; stops it, and fails on anything left running. `options` go to
    `App`."""
    executor = executor or FakeExecutor(
        ExecutorConfig(banks=2, context_tokens=64), vocabulary=VOCABULARY
    )
    loop = uvloop.new_event_loop()
    failures: list[BaseException] = []
    core = EngineCore(executor, ByteDetokenizer, prefill_chunk=prefill_chunk, speculate=speculate)
    engine = Engine(core, loop, failures.append)
    chosen = {} if template == "default" else {"template": template}
    if model is None:
        model = served_model(
            banks=executor.config.banks, context_tokens=executor.config.context_tokens, **chosen
        )
    app = App(**options)
    admission = Admission(executor.config.banks, queue)
    if ready:
        app.service = Service(model=model, engine=engine, admission=admission)
    server = HttpServer(app, failures.append, limits)
    if listener is None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    listener.setblocking(False)
    # Small, so that a reader who stalls is felt by the server and not hidden by the kernel.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    address = listener.getsockname()
    thread = threading.Thread(target=loop.run_forever, name="loop", daemon=True)
    thread.start()
    engine.start()
    fake = FakeServer(address, executor, app, server, loop, failures)
    fake.call(server.start(listener, parking))
    try:
        yield fake
    finally:
        fake.call(server.drain(5))
        engine.stop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_SECONDS)
        loop.close()
        assert executor.closed
        assert admission.free == admission.total, "a permit leaked"
