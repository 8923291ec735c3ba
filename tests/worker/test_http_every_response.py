"""What holds for every response, whoever makes it: origins, keys, paths, forms."""

import socket
from typing import Any

import pytest

from ds4_worker.http.limits import HttpLimits
from helpers.fake_server import fake_server
from helpers.raw_http import HEALTH, post, statuses


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
