"""Requests that mean harm, or nothing: malformed, endless, arbitrary bytes. Real sockets."""

import re
import socket
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_worker.http.limits import HttpLimits
from helpers.fake_server import fake_server, read_all

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


def post(path: bytes, body: bytes, *headers: bytes) -> bytes:
    head = [b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", body])


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 99999999999999999999\r\n\r\n",
        # request smuggling: two lengths of any kind, or a coding that is not the last word
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        POST + b"Host: y\r\n\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\nab\r\n0\r\n\r\n",
    ],
)
def test_a_malformed_request_gets_400_and_a_closed_connection(data: bytes) -> None:
    with fake_server() as server:
        reply = server.raw(data + LAST_HEALTH)
        assert statuses(reply) == [400]
        assert b'"code":"bad_http_request"' in reply
        assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"identity, chunked", b"xchunked"])
def test_a_transfer_coding_that_is_not_understood_is_refused(coding: bytes) -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with fake_server() as server:
        data = server.raw(
            POST + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + chunk + LAST_HEALTH
        )
        assert statuses(data) == [501]


def test_requests_before_a_malformed_one_are_still_answered() -> None:
    with fake_server() as server:
        assert statuses(server.raw(HEALTH + b"nonsense\r\n\r\n")) == [200, 400]


def test_connect_is_refused() -> None:
    with fake_server() as server:
        assert statuses(server.raw(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\nxx")) == [405]


@pytest.mark.parametrize("header", [b"A: " + b"x" * 70000, b"A: b\r\n" * 12000, b"A" * 70000])
def test_headers_over_64_kib_get_431(header: bytes) -> None:
    with fake_server() as server:
        data = server.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n" + header)
        assert statuses(data) == [431]


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "endless", [b"1;" + b"e" * 200_000, b"0\r\nTrailer: " + b"x" * 200_000, b"0\r\nA: b" * 40_000]
)
def test_framing_without_a_body_does_not_go_on_for_ever(endless: bytes) -> None:
    with fake_server() as server:
        assert statuses(server.raw(CHUNKED + endless)) == [400]


def test_a_trailer_does_not_pass_for_a_header() -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    chunk = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    trailer = b"Authorization: Bearer k\r\n\r\n"
    with fake_server(api_key="k") as server:
        assert statuses(server.raw(head + b"\r\n" + chunk + trailer + LAST_HEALTH)) == [401, 200]


def test_connections_beyond_the_limit_are_turned_away() -> None:
    with fake_server(limits=HttpLimits(connections=2)) as server:
        with server.connect() as first, server.connect() as second:
            for connection in (first, second):
                connection.sendall(HEALTH)
                assert statuses(connection.recv(1000)) == [200]
            assert statuses(server.raw(b"")) == [503]
        assert server.request("GET", "/health")[0] == 200


# --- any bytes, any split

COMPLETION = post(b"/v1/completions", b'{"prompt":"a","max_tokens":2,"temperature":0}')
SAMPLES = (
    HEALTH,
    COMPLETION,
    CHUNKED + b"3\r\nabc\r\n0\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: y\r\n\r\n",
)


def test_any_split_of_a_pipeline_gives_the_same_answers() -> None:
    stream = b"".join((*SAMPLES, LAST_HEALTH))

    with fake_server() as server:

        @settings(max_examples=40, deadline=None)
        @given(st.lists(st.integers(1, len(stream) - 1), max_size=12))
        def check(cuts: list[int]) -> None:
            places = sorted({0, *cuts, len(stream)})
            with server.connect() as connection:
                for start, end in pairwise(places):
                    connection.sendall(stream[start:end])
                assert statuses(read_all(connection)) == [200, 200, 405, 404, 200]

        check()


def test_arbitrary_bytes_break_nothing() -> None:
    allowed = {200, 400, 404, 405, 415, 417, 431, 501, 505}

    @st.composite
    def mutated(draw: st.DrawFn) -> bytes:
        data = bytearray(b"".join(draw(st.lists(st.sampled_from(SAMPLES), max_size=3))))
        for _ in range(draw(st.integers(0, 4))):
            place = draw(st.integers(0, len(data)))
            data[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
        return bytes(data)

    with fake_server() as server:

        @settings(max_examples=150, deadline=None)
        @given(st.binary(max_size=200) | mutated())
        def check(data: bytes) -> None:
            with server.connect() as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                try:
                    reply = read_all(connection)
                except ConnectionResetError:
                    return
            assert set(statuses(reply)) <= allowed

        check()
        assert not server.failures
        assert server.request("GET", "/health")[0] == 200
