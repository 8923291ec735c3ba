"""The transport: grammar, limits, deadlines, pipelining, disconnects. Real sockets, fake model."""

import json
import re
import socket
import struct
from typing import Any

import pytest

from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http.limits import HttpLimits
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY
from helpers.fake_server import fake_server, read_all
from helpers.gate import Gate

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
OBSERVED = {"return_token_ids": True}
LAST_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


def post(path: bytes, body: bytes, *headers: bytes) -> bytes:
    head = [b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", body])


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


# --- every response, whoever makes it


def test_cors_headers_are_on_every_response_also_on_those_of_the_transport() -> None:
    stream = b'{"prompt":"a","max_tokens":1,"stream":true}'
    requests = [
        (HEALTH, 200),
        (b"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\n\r\n", 204),
        (post(b"/v1/completions", stream), 200),
        (post(b"/v1/completions", b"{"), 400),
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"nonsense\r\n\r\n", 400),
        (post(b"/v1/completions", b"", b"Expect: tea"), 417),
        (b"GET /" + b"x" * 9000, 414),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200, 431),
        (b"GET", 408),
    ]
    limits = HttpLimits(read_seconds=0.2, idle_seconds=0.2)
    with fake_server(cors=True, limits=limits) as server:
        for request, status in requests:
            reply = server.raw(request)
            assert statuses(reply) == [status]
            assert reply.count(b"Access-Control-Allow-Origin: *\r\n") == 1
        seen = server.app.counters.responses
        assert seen == {200: 2, 204: 1, 400: 2, 404: 1, 408: 1, 414: 1, 417: 1, 431: 1}


@pytest.mark.parametrize(
    ("options", "site", "origin", "status"),
    [
        ({}, "cross-site", "http://evil.example", 403),
        ({}, "cross-site", None, 403),
        ({}, "same-origin", "https://chat.example", 200),  # a proxy with a certificate of its own
        ({}, "none", None, 200),
        # A browser says nothing of the site to a server it does not trust: a rebound name.
        ({}, None, "http://evil.example:8000", 403),
        ({}, None, "http://localhost.evil.example", 403),
        ({}, None, "http://127.0.0.1.evil.example", 403),
        ({}, None, "http://[::1].evil.example", 403),
        ({}, None, "http://127.0.0.1@evil.example", 403),
        ({}, None, "http://", 403),
        ({}, None, "null", 403),
        ({}, None, "http://localhost:8000", 200),
        ({}, None, "http://ui.localhost", 200),
        ({}, None, f"http://{socket.gethostname()}:8000", 200),
        ({}, None, "http://192.168.1.7:8000", 200),
        ({}, None, "http://[::1]:8000", 200),
        ({}, None, "tauri://localhost", 200),
        ({}, None, None, 200),
        ({"cors": True}, "cross-site", "http://evil.example", 200),
        ({"cors": True}, None, "http://evil.example", 200),
        ({"api_key": "k"}, "cross-site", "http://evil.example", 200),
    ],
)
def test_pages_of_other_origins_may_post_only_where_that_was_allowed(
    options: dict[str, Any], site: str | None, origin: str | None, status: int
) -> None:
    headers = [b"Authorization: Bearer k", b"Connection: close"]
    if site is not None:
        headers.append(b"Sec-Fetch-Site: " + site.encode())
    if origin is not None:
        headers.append(b"Origin: " + origin.encode())
    with fake_server(**options) as server:
        reply = server.raw(post(b"/v1/completions", b'{"prompt":"a","max_tokens":1}', *headers))
    assert statuses(reply) == [status]
    assert (b'"foreign_page"' in reply) == (status == 403)


def test_without_the_flag_there_are_no_cors_headers() -> None:
    with fake_server() as server:
        assert b"Access-Control" not in server.raw(
            HEALTH.replace(b"\r\n\r\n", b"\r\nOrigin: a\r\n\r\n") + b"x"
        )


def test_a_compressed_body_is_told_apart_from_broken_json() -> None:
    with fake_server() as server:
        body = b"\x1f\x8b\x08\x00"
        reply = server.raw(post(b"/v1/completions", body, b"Content-Encoding: gzip"))
        assert statuses(reply) == [415]
        assert b"send the body as it is" in reply


@pytest.mark.parametrize("target", [b"http://any.host:1/health", b"/%68ealth", b"/health?key=v"])
def test_every_spelling_of_a_path_finds_its_route(target: bytes) -> None:
    with fake_server() as server:
        reply = server.raw(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
        assert statuses(reply) == [200]


@pytest.mark.parametrize(
    "target", [b"*", b"//health", b"/health/", b"/%00", b"/v1/models/%FF", b"/v1/../health"]
)
def test_an_odd_path_is_not_found_and_nothing_worse(target: bytes) -> None:
    with fake_server() as server:
        reply = server.raw(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
        assert statuses(reply) == [404]
        assert not server.failures


@pytest.mark.parametrize("key", ["k", "\u00e9", "x" * 1000])
def test_the_key_is_compared_as_bytes_in_either_header(key: str) -> None:
    sent = key.encode()
    with fake_server(api_key=key) as server:
        for header, status in (
            (b"Authorization: Bearer " + sent, 200),
            (b"authorization: bearer  " + sent, 200),
            (b"X-Api-Key: " + sent, 200),
            (b"Authorization: Basic " + sent, 401),
            (b"Authorization: Bearer " + sent + b"x", 401),
            (b"Authorization: Bearer", 401),
            (b"X-Other: " + sent, 401),
        ):
            head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            assert statuses(server.raw(head + header + b"\r\n\r\n")) == [status]


def test_a_refusal_has_the_form_of_the_api_that_was_asked() -> None:
    with fake_server() as server:
        for target, anthropic in (
            (b"/v1/messages", True),
            (b"http://any.host/v1/messages?beta=true", True),
            (b"/v1/completions", False),
        ):
            reply = server.raw(post(target, b"", b"Content-Encoding: gzip"))
            assert statuses(reply) == [415]
            assert (b'{"type":"error","error":{' in reply) == anthropic
