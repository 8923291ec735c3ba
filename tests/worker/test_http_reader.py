"""Bytes to requests, without a socket: what is read, what is refused, and nothing in between.

h11, an independent reader, is the judge of what a stream of bytes says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4_common.errors import RequestError
from ds4_worker.http.limits import BodyBudget, BodyShare, HttpLimits
from ds4_worker.http.messages import Request
from ds4_worker.http.reader import RequestReader
from ds4_worker.http.targets import path_of

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Heard:
    """A receiver that remembers."""

    requests: list[Request] = field(default_factory=list)
    refusals: list[tuple[int, str]] = field(default_factory=list)
    continues: int = 0

    def request_read(self, request: Request) -> None:
        self.requests.append(request)

    def wants_continue(self) -> None:
        self.continues += 1

    def refused(self, error: RequestError, path: str) -> None:
        self.refusals.append((error.status, path))

    @property
    def statuses(self) -> list[int]:
        return [status for status, _ in self.refusals]

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]


def read(*pieces: bytes, limits: HttpLimits | None = None) -> Heard:
    heard = Heard()
    limits = limits or HttpLimits()
    share = BodyShare(BodyBudget(limits.all_bodies_bytes))
    reader = RequestReader(heard, limits, share, lambda: 0.0)
    for piece in pieces:
        reader.feed(piece)
    return heard


# --- targets


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/models?a=/b#c", "/v1/models"),
        ("http://host:80/v1/models?x", "/v1/models"),
        ("HTTPS://user@[::1]:8000/health", "/health"),
        ("http://host", "/"),
        ("http://host?x", "/"),
        ("*", "*"),
        ("/%76%31/%4Dodels%2d%7E", "/v1/Models-~"),
        ("/a%2Fb%20c%25", "/a%2Fb%20c%25"),  # encoded for a reason: left as it is
        ("/%", "/%"),
        ("//double", "//double"),
        ("/../up", "/../up"),
    ],
)
def test_every_form_of_a_target_leads_to_its_path(target: str, path: str) -> None:
    assert path_of(target) == path


@given(st.text(st.characters(max_codepoint=255), max_size=40))
def test_any_target_is_a_path_or_refused(target: str) -> None:
    try:
        assert path_of(target)[0] in "/*"
    except ValueError:
        return


def test_a_target_in_absolute_form_is_served_as_its_path() -> None:
    heard = read(b"GET http://elsewhere.example/health?q HTTP/1.1\r\nHost: x\r\n\r\n")
    assert heard.paths == ["/health"]


# --- smuggling: two readers of one stream must see the same requests, or one must refuse

CHUNKED = b"Transfer-Encoding: chunked\r\n"
SMUGGLING: dict[str, bytes] = {
    "length then chunked": b"Content-Length: 4\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "chunked then length": CHUNKED + b"Content-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "one length twice": b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "lengths in one header": b"Content-Length: 3, 3\r\n\r\nabc",
    "a signed length": b"Content-Length: +3\r\n\r\nabc",
    "a negative length": b"Content-Length: -3\r\n\r\nabc",
    "a hexadecimal length": b"Content-Length: 0x3\r\n\r\nabc",
    "a length with a tail": b"Content-Length: 3 x\r\n\r\nabc",
    "an empty length": b"Content-Length:\r\n\r\n",
    "a length that overflows": b"Content-Length: 18446744073709551619\r\n\r\nabc",
    "a space before the colon": b"Content-Length : 3\r\n\r\nabc",
    "a tab before the colon": b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "a folded header": b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded coding": b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a bare line feed": b"X: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bare carriage return": b"X: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a NUL in a value": b"X: a\0b\r\n\r\n",
    "a NUL in a name": b"X\0: a\r\n\r\n",
    "an empty name": b": a\r\n\r\n",
    "a name with a bracket": b"X[]: a\r\n\r\n",
    "a line without a colon": b"X\r\n\r\n",
    "a high byte in a name": b"X\xe9: a\r\n\r\n",
    "chunked twice": CHUNKED + CHUNKED + b"\r\n0\r\n\r\n",
    "chunked before another": b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "another before chunked": b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": b"Transfer-Encoding: identity\r\nContent-Length: 3\r\n\r\nabc",
    "nearly chunked": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked with a vertical tab": b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunked in quotes": b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "a chunk size with a sign": CHUNKED + b"\r\n+1\r\na\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"\r\n-1\r\na\r\n0\r\n\r\n",
    "a chunk size with a prefix": CHUNKED + b"\r\n0x1\r\na\r\n0\r\n\r\n",
    "a chunk size that overflows": CHUNKED + b"\r\n10000000000000001\r\na\r\n0\r\n\r\n",
    "a space after a chunk size": CHUNKED + b"\r\n1 \r\na\r\n0\r\n\r\n",
    "no chunk size": CHUNKED + b"\r\n\r\na\r\n0\r\n\r\n",
    "a chunk ended by a line feed": CHUNKED + b"\r\n1\na\r\n0\r\n\r\n",
    "a chunk longer than said": CHUNKED + b"\r\n1\r\nab\r\n0\r\n\r\n",
    "an extension with a line feed": CHUNKED + b"\r\n1;a\nb\r\na\r\n0\r\n\r\n",
    "two hosts": b"Host: y\r\n\r\n",
    "a host that names two": b"Host: a, b\r\n\r\n",
}


@pytest.mark.parametrize("rest", SMUGGLING.values(), ids=SMUGGLING.keys())
@pytest.mark.parametrize("step", [1, 5, 1 << 16])
def test_a_request_that_two_readers_could_read_differently_is_refused(
    rest: bytes, step: int
) -> None:
    data = HEAD + rest + NEXT
    heard = read(*(data[at : at + step] for at in range(0, len(data), step)))
    assert heard.requests == []
    assert heard.statuses in ([400], [501])


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET / HTTP/1.1\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1 \r\nHost: x\r\n\r\n", 400),
        (b"GET / \r\nHost: x\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 505),  # HTTP/0.9
        (b"GET / HTTP/0.9\r\n\r\n", 505),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET / HTTP/1.1x\r\nHost: x\r\n\r\n", 400),
        (b"get / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET nowhere HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET ftp://x/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    ],
)
def test_a_request_line_that_is_not_quite_one_is_refused(line: bytes, status: int) -> None:
    heard = read(line)
    assert ([], [status]) == (heard.requests, heard.statuses)


@pytest.mark.parametrize("blank", [b"\r\n", b"\r\n\r\n\r\n"])
def test_blank_lines_before_a_request_are_ignored(blank: bytes) -> None:
    assert read(blank + NEXT + blank + NEXT).paths == ["/next", "/next"]
    assert read(*(bytes([byte]) for byte in blank + NEXT)).paths == ["/next"]


@pytest.mark.parametrize("size", [b"3", b"003", b"0000000000000003", b"3;a=b", b'3;a="b;c"'])
def test_a_chunk_is_as_long_as_it_says(size: bytes) -> None:
    body = size + b"\r\nabc\r\n0\r\nTrailer: t\r\n\r\n"
    heard = read(HEAD + CHUNKED + b"\r\n" + body + NEXT)
    assert [(request.path, request.body) for request in heard.requests] == [
        ("/x", b"abc"),
        ("/next", b""),
    ]
    assert "trailer" not in heard.requests[0].headers


# --- codings, expectations, limits


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"identity, gzip", b"zstd"])
def test_a_compressed_body_is_refused_as_such(coding: bytes) -> None:
    heard = read(HEAD + b"Content-Encoding: " + coding + b"\r\nContent-Length: 3\r\n\r\nabc")
    assert heard.refusals == [(415, "/x")]
    assert read(HEAD + b"Content-Encoding: Identity\r\n\r\n").paths == ["/x"]


def test_leave_to_send_a_body_is_given_only_where_one_is_awaited() -> None:
    expect = b"Expect: 100-Continue\r\n"
    assert read(HEAD + expect + b"Content-Length: 3\r\n\r\n").continues == 1
    assert read(HEAD + expect + CHUNKED + b"\r\n").continues == 1
    assert read(HEAD + expect + b"Content-Length: 0\r\n\r\n").continues == 0
    old = b"POST /x HTTP/1.0\r\n" + expect + b"Content-Length: 3\r\n\r\n"
    assert read(old).continues == 0, "HTTP/1.0 clients do not understand it"
    assert read(HEAD + b"Expect: tea\r\n\r\n").refusals == [(417, "/x")]


@pytest.mark.parametrize(
    ("data", "limits", "status"),
    [
        (
            b"GET /" + b"a" * 100 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            HttpLimits(target_bytes=100),
            414,
        ),
        (b"GET /" + b"a" * 100, HttpLimits(target_bytes=100), 414),
        (HEAD + b"A: b\r\n" * 4 + b"\r\n", HttpLimits(headers=4), 431),
        (HEAD + b"A: " + b"b" * 100, HttpLimits(header_bytes=100), 431),
        (HEAD + b"A" * 100, HttpLimits(header_bytes=100), 431),
        (HEAD + b"A: b\r\n" * 20, HttpLimits(header_bytes=100), 431),
        (HEAD + b"Content-Length: 11\r\n\r\n", HttpLimits(body_bytes=10), 413),
        (HEAD + CHUNKED + b"\r\nb\r\n" + b"x" * 11, HttpLimits(body_bytes=10), 413),
    ],
)
def test_each_limit_is_refused_with_its_own_status(
    data: bytes, limits: HttpLimits, status: int
) -> None:
    heard = read(data, limits=limits)
    assert ([], [status]) == (heard.requests, heard.statuses)
    pieces = (data[at : at + 1] for at in range(len(data)))
    assert read(*pieces, limits=limits).statuses == [status]


def test_what_is_just_within_the_limits_is_read() -> None:
    limits = HttpLimits(target_bytes=2, headers=2, header_bytes=60, body_bytes=3)
    data = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    assert read(data * 3, limits=limits).paths == ["/x"] * 3


# --- any bytes


def judged(data: bytes) -> tuple[list[tuple[bytes, bytes, bytes]], bool]:
    """Method, target and body of the requests that h11 finds; whether it then refuses the rest."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    found: list[tuple[bytes, bytes, bytes]] = []
    method = target = body = b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                method, target, body = bytes(event.method), bytes(event.target), b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                found.append((method, target, body))
                connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    return found, False
                connection.start_next_cycle()
            else:
                return found, False
    except h11.RemoteProtocolError:
        return found, True


NAMES = (b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"X-Y")
VALUES = (b"x", b"0", b"3", b"03", b"chunked", b"close", b"keep-alive", b"100-continue", b"")
BODIES = (b"", b"abc", b"3\r\nabc\r\n0\r\n\r\n", b"0\r\n\r\n", b"1;e\r\na\r\n0\r\nT: t\r\n\r\n")
SEPARATORS = (b": ", b":", b" : ", b":\t")
ENDS = (b"\r\n",) * 6 + (b"\n", b"\r", b"\r\n ")


@st.composite
def request_bytes(draw: st.DrawFn) -> bytes:
    """Something close to a request."""
    method = draw(st.sampled_from((b"GET", b"POST", b"HEAD", b"OPTIONS", b"BREW")))
    target = draw(st.sampled_from((b"/", b"/x?y", b"*", b"http://h/p", b"/%2e", b"x")))
    version = draw(st.sampled_from((b"1.1", b"1.1", b"1.1", b"1.0", b"2.0")))
    lines = [b"%b %b HTTP/%b" % (method, target, version), b"Host: h"]
    for _ in range(draw(st.integers(0, 3))):
        name, value = draw(st.sampled_from(NAMES)), draw(st.sampled_from(VALUES))
        lines.append(name + draw(st.sampled_from(SEPARATORS)) + value)
    end: bytes = draw(st.sampled_from(ENDS))
    body: bytes = draw(st.sampled_from(BODIES))
    return end.join(lines) + end + b"\r\n" + body


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    data = bytearray(b"".join(draw(st.lists(request_bytes(), max_size=3))))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


@settings(max_examples=200)
@given(st.binary(max_size=100) | streams(), st.lists(st.integers(0, 300), max_size=5))
@example(HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc" + NEXT, [60])
def test_what_is_read_is_what_another_reader_reads(data: bytes, cuts: list[int]) -> None:
    places = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    heard = read(*(data[start:end] for start, end in pairwise(places)))
    whole = read(data)
    assert (heard.requests, heard.statuses) == (whole.requests, whole.statuses)
    assert len(heard.refusals) <= 1
    found, refused = judged(data)
    if not refused:
        assert len(heard.requests) <= len(found)
    for request, (method, target, body) in zip(heard.requests, found, strict=False):
        assert (request.method.encode(), request.body) == (method, body)
        assert request.path == path_of(target.decode("latin-1"))
