"""Event streams on their way to a client: signs of life, and failures before and after the head."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from ds4_common.errors import RequestError
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http.limits import HttpLimits
from ds4_worker.http.messages import KEEPALIVE, EventStream, error_event
from ds4_worker.http.streaming import StreamSender
from helpers.fake_executor import FakeExecutor, failing_after
from helpers.fake_model import VOCABULARY
from helpers.fake_server import fake_server, read_all
from helpers.gate import Gate

IMPATIENT = HttpLimits(silence_seconds=0.02)
PATIENT = HttpLimits(silence_seconds=3600)
BODY = {"prompt": "a", "stream": True, "max_tokens": 3, "ignore_eos": True}


def gated(gate: Gate) -> FakeExecutor:
    config = ExecutorConfig(banks=1, context_tokens=64)
    # The answer is "aaa": every token completes a character.
    return FakeExecutor(config, vocabulary=VOCABULARY, before_step=gate, choose=lambda history: 97)


def post(body: object, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + data


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = connection.recv(1 << 16)
        assert piece, f"the stream ended without {mark!r}: {data!r}"
        data += piece
    return data


def test_a_prompt_that_waits_gets_keepalives_before_its_first_event() -> None:
    gate = Gate()
    with fake_server(gated(gate), limits=IMPATIENT) as server, server.connect() as connection:
        connection.sendall(post(BODY))
        gate.wait_until_a_step_is_due()
        data = read_until(connection, KEEPALIVE)
        assert b"data:" not in data
        gate.open()
        data += read_all(connection)
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"data: [DONE]\n\n" in data


USER = [{"role": "user", "content": "a"}]
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 3}, KEEPALIVE),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 3}, KEEPALIVE),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3}, KEEPALIVE),
        ("/v1/messages", {"messages": USER, "max_tokens": 3, "model": "fake"}, PING),
    ],
)
def test_each_api_has_its_own_sign_of_life(path: str, body: dict[str, Any], sign: bytes) -> None:
    gate = Gate()
    with fake_server(gated(gate), limits=IMPATIENT) as server, server.connect() as connection:
        connection.sendall(post({**body, "stream": True}, path))
        gate.wait_until_a_step_is_due()
        data = read_until(connection, sign)
        gate.open()
        data += read_all(connection)
    assert data.startswith(b"HTTP/1.1 200 ")
    assert data.index(sign) < data.index(b"data: {", data.index(sign) + len(sign))


def test_a_stall_between_two_tokens_is_bridged_by_keepalives() -> None:
    gate = Gate()
    with fake_server(gated(gate), limits=IMPATIENT) as server, server.connect() as connection:
        connection.sendall(post(BODY))
        gate.allow()
        _, _, after = read_until(connection, b'"text":"a"').partition(b'"text":"a"')
        if KEEPALIVE not in after:
            read_until(connection, KEEPALIVE)
        gate.open()
        assert b"data: [DONE]\n\n" in read_all(connection)


def test_text_that_is_held_back_for_a_stop_is_bridged_by_keepalives() -> None:
    gate = Gate()
    body = {**BODY, "max_tokens": 20, "stop": "a" * 10 + "b"}
    with fake_server(gated(gate), limits=IMPATIENT) as server, server.connect() as connection:
        connection.sendall(post(body))
        for _ in range(8):  # eight tokens, all of which may belong to the stop
            gate.allow()
            gate.wait_until_a_step_is_due()
        assert b'"text":"a' not in read_until(connection, KEEPALIVE)
        gate.open()
        assert b"data: [DONE]\n\n" in read_all(connection)


def test_a_lively_stream_carries_no_keepalive() -> None:
    gate = Gate()
    gate.open()
    with fake_server(gated(gate), limits=PATIENT) as server:
        assert b": keepalive" not in server.raw(post(BODY))
        assert server.app.counters.keepalives == 0


def broken(gate: Gate) -> FakeExecutor:
    check = failing_after(0)

    def before() -> None:
        gate()
        check()

    config = ExecutorConfig(banks=1, context_tokens=64)
    return FakeExecutor(config, vocabulary=VOCABULARY, before_step=before)


def test_a_stream_that_fails_before_anything_was_sent_gets_an_honest_status() -> None:
    gate = Gate()
    gate.open()
    with fake_server(broken(gate), limits=PATIENT) as server:
        data = server.raw(post(BODY))
    assert data.startswith(b"HTTP/1.1 500 ")
    assert b"text/event-stream" not in data


def test_a_stream_that_fails_after_a_keepalive_ends_with_one_error_event() -> None:
    gate = Gate()
    with fake_server(broken(gate), limits=IMPATIENT) as server, server.connect() as connection:
        connection.sendall(post(BODY))
        data = read_until(connection, KEEPALIVE)
        gate.open()
        data += read_all(connection)
    assert data.startswith(b"HTTP/1.1 200 ")
    assert data.count(b"event: error\n") == 1
    assert b"[DONE]" not in data
    assert data.endswith(b"0\r\n\r\n")


class Broken(FakeExecutor):
    """Says "aa" and fails; `over` is set when the engine has given everything away."""

    def __init__(self, gate: Gate) -> None:
        check = failing_after(2)

        def before() -> None:
            gate()
            check()

        config = ExecutorConfig(banks=1, context_tokens=64)
        super().__init__(
            config, vocabulary=VOCABULARY, before_step=before, choose=lambda history: 97
        )
        self.over = threading.Event()

    def close(self) -> None:
        super().close()
        self.over.set()


@pytest.mark.parametrize(
    ("path", "body", "failure"),
    [
        ("/v1/completions", {"prompt": "a"}, b"event: error\n"),
        ("/v1/chat/completions", {"messages": USER}, b"event: error\n"),
        ("/v1/responses", {"input": "a"}, b"event: response.failed\n"),
        ("/v1/messages", {"messages": USER, "max_tokens": 9, "model": "fake"}, b"event: error\n"),
    ],
)
def test_what_arrives_together_with_a_failure_is_delivered_before_the_error(
    path: str, body: dict[str, Any], failure: bytes
) -> None:
    gate, blocked = Gate(), threading.Event()
    executor = Broken(gate)

    def block() -> None:  # everything that the engine gives meanwhile comes in one piece
        blocked.set()
        assert executor.over.wait(10), "the engine did not fail"

    with fake_server(executor, limits=PATIENT) as server, server.connect() as connection:
        connection.sendall(post({**body, "stream": True}, path))
        gate.wait_until_a_step_is_due()
        server.loop.call_soon_threadsafe(block)
        assert blocked.wait(10)
        gate.open()
        data = read_all(connection)
    assert data.startswith(b"HTTP/1.1 200 ")
    assert data.count(b'"a"') == 2
    assert data.rindex(b'"a"') < data.index(failure)
    assert data.count(failure) == 1
    assert b"[DONE]" not in data


# --- the sender alone


class Sink:
    """An outlet that remembers. `writable` is set by the test."""

    def __init__(self) -> None:
        self.writable: asyncio.Future[None] | None = None
        self.pieces: list[bytes] = []
        self.ended = False

    def begin_stream(self, reply: EventStream) -> bytes:
        return b"HEAD "

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def end_response(self, data: bytes) -> None:
        self.pieces.append(data)
        self.ended = True


def send(sink: Sink, chunks: AsyncGenerator[bytes, None], *, silence: float = 3600) -> None:
    async def run() -> None:
        reply = EventStream(chunks, failure=error_event)
        await StreamSender(sink, reply, chunked=False, silence_seconds=silence).run()

    asyncio.run(run())


def test_a_client_that_does_not_read_gets_no_keepalives_on_top() -> None:
    sink = Sink()

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"one"
        sink.writable = asyncio.get_running_loop().create_future()
        await asyncio.sleep(0.05)
        sink.writable.set_result(None)
        sink.writable = None
        yield b"two"

    send(sink, chunks(), silence=0.01)
    assert sink.pieces == [b"HEAD one", b"two", b""]


def test_a_stream_without_pieces_still_has_a_head() -> None:
    sink = Sink()

    async def chunks() -> AsyncGenerator[bytes, None]:
        return
        yield b""

    send(sink, chunks())
    assert (sink.pieces, sink.ended) == ([b"HEAD ", b""], True)


def test_a_stream_closes_its_source_when_the_client_goes_away() -> None:
    closed: list[bool] = []
    sink = Sink()

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0)
        finally:
            closed.append(True)

    async def run() -> None:
        reply = EventStream(chunks(), failure=error_event)
        task = asyncio.ensure_future(
            StreamSender(sink, reply, chunked=False, silence_seconds=1).run()
        )
        while not sink.pieces:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert closed == [True]
    assert not sink.ended


def test_a_failure_before_the_first_piece_is_left_to_the_caller() -> None:
    sink = Sink()

    async def chunks() -> AsyncGenerator[bytes, None]:
        raise RequestError("no", status=503)
        yield b""

    with pytest.raises(RequestError, match="no"):
        send(sink, chunks())
    assert sink.pieces == []
