"""One connection after the other and many at once: order, bodies, deadlines, readers."""

import json
import socket
import struct

import pytest

from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http.limits import HttpLimits
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY
from helpers.fake_server import fake_server, read_all
from helpers.gate import Gate
from helpers.raw_http import HEALTH, post, statuses

POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
OBSERVED = {"return_token_ids": True}
LAST_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def gated(gate: Gate, banks: int = 1) -> FakeExecutor:
    config = ExecutorConfig(banks=banks, context_tokens=64)
    return FakeExecutor(config, vocabulary=VOCABULARY, before_step=gate)


# --- keep-alive and pipelining


def test_pipelined_requests_are_answered_in_order_on_one_connection() -> None:
    with fake_server() as server:
        missing = b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"
        data = server.raw(HEALTH + missing + HEALTH + LAST_HEALTH)
        assert statuses(data) == [200, 404, 200, 200]


def test_a_request_may_arrive_byte_by_byte() -> None:
    with fake_server() as server, server.connect() as connection:
        for byte in LAST_HEALTH:
            connection.sendall(bytes([byte]))
        assert statuses(read_all(connection)) == [200]


def test_http_1_0_gets_an_answer_that_ends_with_the_connection() -> None:
    with fake_server() as server:
        data = server.raw(b"GET /health HTTP/1.0\r\n\r\n")
        assert statuses(data) == [200]
        assert b"Connection: close" in data


def test_a_stream_to_http_1_0_is_not_chunked() -> None:
    with fake_server() as server:
        body = b'{"prompt":"a","stream":true,"max_tokens":2}'
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        data = server.raw(head + body)
        assert b"Transfer-Encoding" not in data
        assert data.endswith(b"data: [DONE]\n\n")


def test_an_upgrade_offer_is_ignored_and_the_connection_goes_on() -> None:
    offer = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with fake_server() as server:
        assert statuses(server.raw(offer * 3 + LAST_HEALTH)) == [200, 200, 200, 200]


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_body_of_an_upgrade_offer_is_a_body_and_no_request(chunked: bool, step: int) -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAA")

    def request(content: bytes) -> bytes:
        if not chunked:
            return post(b"/v1/completions", content, *offer, b"Expect: 100-continue")
        coding = (b"Transfer-Encoding: chunked", *offer)
        lines = (b"POST /v1/completions HTTP/1.1", b"Host: x", *coding, b"", b"%x" % len(content))
        return b"\r\n".join((*lines, content, b"0", b"", b""))

    data = request(body) + request(smuggled) + LAST_HEALTH
    with fake_server() as server, server.connect() as connection:
        for at in range(0, len(data), step):
            connection.sendall(data[at : at + step])
        reply = read_all(connection)
    assert [status for status in statuses(reply) if status != 100] == [200, 400, 200]
    assert reply.count(b"100 Continue") <= 2 * (not chunked)


def test_more_pipelined_requests_than_allowed_are_refused() -> None:
    gate = Gate()
    limits = HttpLimits(pipelined_requests=3)
    with fake_server(gated(gate), limits=limits) as server, server.connect() as connection:
        connection.sendall(post(b"/v1/completions", b'{"prompt":"a","max_tokens":1}') + HEALTH * 5)
        gate.wait_until_a_step_is_due()
        gate.open()
        assert statuses(read_all(connection)) == [200, 200, 200, 200, 400]


def test_head_is_get_without_a_body_and_options_lists_nothing() -> None:
    with fake_server() as server:
        status, headers, body = server.exchange("HEAD", "/health")
        assert (status, body) == (200, "")
        assert int(headers["content-length"]) > 0
        assert server.exchange("OPTIONS", "/v1/models")[0] == 204


# --- bodies


def test_a_chunked_body_is_joined() -> None:
    body = b'{"prompt":"ab","max_tokens":1}'
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, body[i : i + 1]) for i in range(len(body)))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    with fake_server() as server:
        data = server.raw(head + b"Connection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert statuses(data) == [200]


def test_expect_100_continue_is_answered_before_the_body_is_sent() -> None:
    body = b'{"prompt":"ab","max_tokens":1}'
    request = post(b"/v1/completions", body, b"Expect: 100-continue", b"Connection: close")
    head, _, _ = request.partition(b"\r\n\r\n")
    with fake_server() as server, server.connect() as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert statuses(read_all(connection)) == [200]


def test_an_unknown_expectation_is_refused() -> None:
    with fake_server() as server:
        assert statuses(server.raw(post(b"/v1/completions", b"", b"Expect: tea"))) == [417]


def test_a_declared_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 67108865\r\n\r\n"
    with fake_server() as server:
        data = server.raw(head)
        assert statuses(data) == [413]
        assert b"limited to 67108864 bytes" in data


def test_a_64_mb_body_is_read_and_one_byte_more_is_not() -> None:
    with fake_server() as server:
        body = b'{"prompt":"' + b"a" * ((64 << 20) - 13) + b'"}'
        assert len(body) == 64 << 20
        status, answer = server.request("POST", "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        with server.connect() as connection:
            connection.sendall(head)
            for _ in range(64):
                connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
            connection.sendall(b"1\r\na\r\n")
            assert statuses(read_all(connection)) == [413]
        assert server.request("GET", "/health")[0] == 200
        assert server.server.bodies.used == 0


def test_all_bodies_together_are_bounded() -> None:
    limits = HttpLimits(all_bodies_bytes=1000)
    with fake_server(limits=limits) as server, server.connect() as first:
        first.sendall(post(b"/v1/completions", b"x" * 2000)[:1000])
        assert statuses(server.raw(post(b"/v1/completions", b"x" * 900))) == [503]
        first.close()


# --- deadlines


@pytest.mark.parametrize(
    "start",
    [b"G", b"GET /health HTTP/1.1\r\nHost", post(b"/v1/completions", b"12345")[:-1]],
)
def test_a_client_that_falls_silent_inside_a_request_gets_408(start: bytes) -> None:
    with fake_server(limits=HttpLimits(read_seconds=0.05)) as server:
        assert statuses(server.raw(start)) == [408]


def test_headers_that_trickle_in_are_cut_off() -> None:
    limits = HttpLimits(read_seconds=10, header_seconds=0.2)
    with fake_server(limits=limits) as server, server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        data = b""
        while not data:
            connection.sendall(b"A: b\r\n")
            connection.settimeout(0.01)
            try:
                data = connection.recv(1000)
            except TimeoutError:
                continue
        assert statuses(data) == [408]


def test_an_idle_connection_is_closed_without_a_word() -> None:
    with fake_server(limits=HttpLimits(idle_seconds=0.05)) as server:
        assert server.raw(b"") == b""
        assert statuses(server.raw(HEALTH)) == [200]


def test_a_slow_answer_is_not_a_silent_client() -> None:
    gate = Gate()
    limits = HttpLimits(read_seconds=0.02, idle_seconds=0.02, header_seconds=0.02)
    with fake_server(gated(gate), limits=limits) as server, server.connect() as connection:
        connection.sendall(post(b"/v1/completions", b'{"prompt":"a","max_tokens":1}'))
        gate.wait_until_a_step_is_due()
        with server.connect() as silent:  # came later, and its time is over when this returns
            read_all(silent)
        gate.open()
        assert statuses(connection.recv(10000)) == [200]


# --- readers


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_bank_within_a_step(stream: bool) -> None:
    gate = Gate()
    with fake_server(gated(gate), queue=1) as server:
        # Whatever is drawn, the end of the text must not be the reason.
        body = b'{"prompt":"a","ignore_eos":true,"max_tokens":60,"stream":%b}'
        body %= b"true" if stream else b"false"
        connection = server.connect()
        connection.sendall(post(b"/v1/completions", body))
        gate.wait_until_a_step_is_due()
        gate.allow()
        gate.wait_until_a_step_is_due()
        connection.close()
        while server.app.service and server.app.service.admission.free != 2:
            server.call(_turn())
        gate.open()
        status, _ = server.request("POST", "/v1/completions", {"prompt": "b", "max_tokens": 1})
        assert status == 200
        steps = [[(piece.start, len(piece.tokens)) for piece in s] for s in server.executor.steps]
        assert steps == [[(0, 2)], [(2, 1)], [(0, 2)]]
        assert server.app.service
        assert server.app.service.engine.stats.finished["cancelled"] == 1


async def _turn() -> None:
    """One turn of the server's loop."""


def test_a_reader_that_stalls_loses_nothing_and_delays_nobody() -> None:
    config = ExecutorConfig(banks=2, context_tokens=8192)
    executor = FakeExecutor(config, vocabulary=VOCABULARY, choose=lambda history: 97)
    with fake_server(executor) as server:
        with server.connect() as stalled:
            body = {"prompt": "a", "stream": True, "max_tokens": 2000, "ignore_eos": True}
            stalled.sendall(post(b"/v1/completions", json.dumps({**body, **OBSERVED}).encode()))
            # While nobody reads that stream, others are served, and it runs to its end.
            assert server.app.service
            while not server.app.service.engine.stats.finished["length"]:
                other = {"prompt": "b", "max_tokens": 1, "stop_token_ids": list(range(VOCABULARY))}
                assert server.request("POST", "/v1/completions", other)[0] == 200
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += stalled.recv(1 << 16)
        assert data.count(b'"token_ids":[') == 2000


@pytest.mark.parametrize("after_bytes", [0, 10, 100])
def test_a_client_that_vanishes_while_sending_leaves_nothing_behind(after_bytes: int) -> None:
    request = post(b"/v1/completions", b'{"prompt":"a","max_tokens":1}' + b" " * 100)
    with fake_server() as server:
        with server.connect() as connection:
            connection.sendall(request[: len(request) - 110 + after_bytes])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert server.request("GET", "/health")[0] == 200
        while server.server.bodies.used:  # its end may be noticed a turn later
            assert server.request("GET", "/health")[0] == 200
