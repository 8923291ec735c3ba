"""Bytes of one connection to requests.

The grammar is llhttp's (httptools) in its strict mode, which refuses what request smuggling needs:
both lengths, two lengths, folded headers, bare line feeds. Owns: what is refused besides, and every
limit on what a request may hold. Knows no socket and no clock but the one it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import httptools

from ds4_common.errors import RequestError
from ds4_worker.http.limits import BodyShare, HttpLimits
from ds4_worker.http.messages import Request
from ds4_worker.http.targets import path_of

# Chunked coding may spend this many bytes of framing per byte of body, and 64 KiB besides.
_FRAMING_BYTES = 16


class Receiver(Protocol):
    """Who hears of what was read."""

    def request_read(self, request: Request) -> None: ...

    def wants_continue(self) -> None:
        """The client waits for leave to send a body."""

    def refused(self, error: RequestError, path: str) -> None:
        """Nothing more is read; `path` as far as it is known."""


class RequestReader:
    """Reads until a refusal, or a request that asks to close the connection (`last`). What follows
    either of them is ignored."""

    def __init__(
        self,
        receiver: Receiver,
        limits: HttpLimits,
        bodies: BodyShare,
        clock: Callable[[], float],
    ) -> None:
        self._receiver = receiver
        self._limits = limits
        self._bodies = bodies
        self._clock = clock
        self._parser = httptools.HttpRequestParser(self)
        self._again = b""  # a head to be read once more
        self.last = False
        self._ended = False
        self.started = 0.0  # when the first byte of the request being read arrived
        self._begin_request()

    def _begin_request(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._header_count = 0
        self._head_bytes = 0
        self.state: Literal["idle", "head", "body"] = "idle"
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._framing_bytes = 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. Everything about them is told to the receiver meanwhile."""
        if self.state == "idle":
            while data.startswith(b"\r\n"):  # some clients end a body with one
                data = data[2:]
            if data:
                self.state, self.started = "head", self._clock()
        while data and not self._ended:
            piece, data = data, b""
            if self.state != "body":
                # llhttp keeps an unfinished header for as long as it grows, so count raw bytes.
                room = self._limits.header_bytes - self._head_bytes
                piece, data = piece[:room], piece[room:]
                self._head_bytes += len(piece)
            self._framing_bytes += len(piece)
            while piece and not self._ended:
                piece = self._parse(piece)
            self._check_growth()

    def _check_growth(self) -> None:
        """Bounds what is neither an accepted header nor body: endless headers, chunk extensions
        and trailers, which llhttp would go on reading."""
        limit = self._limits.header_bytes
        if self.state == "head" and self._head_bytes >= limit:
            self._refuse(431, f"request headers exceed {limit} bytes")
        elif self._framing_bytes > 2 * limit + _FRAMING_BYTES * self._body_bytes:
            self._refuse(400, "chunked coding: too much framing for too little body")

    def _parse(self, piece: bytes) -> bytes:
        """Parses `piece`; returns what is left of it for a fresh parser."""
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            # An offer (h2c, websocket) that we do not take up: the request itself stands.
            self._parser = httptools.HttpRequestParser(self)
            again, self._again = self._again, b""
            return again + piece[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            if not self._ended:
                raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            self._refuse(400, f"malformed HTTP request: {error}")
        return b""

    def _refuse(self, status: int, message: str, code: str = "bad_http_request") -> None:
        if not self._ended:
            self._ended = True
            self._body = []
            try:
                path = path_of(self._url.decode("latin-1"))
            except ValueError:
                path = ""
            self._receiver.refused(RequestError(message, status=status, code=code), path)

    def _offers_upgrade_of_body(self) -> bool:
        """Whether httptools will take the body for another protocol, and so for no body at all."""
        length = self._headers.get("content-length", "0").strip("0")
        return self._parser.should_upgrade() and bool(
            length or "transfer-encoding" in self._headers
        )

    def _head_without_offer(self) -> bytes:
        method, version = self._parser.get_method(), self._parser.get_http_version()
        lines = [b"%b %b HTTP/%b" % (method, self._url, version.encode())]
        for name, text in self._headers.items():
            if name != "upgrade":
                lines.append(f"{name}: {text}".encode("latin-1"))
        return b"\r\n".join([*lines, b"", b""])

    # --- parser events ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.state = "head"
        self.started = self._clock()

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.target_bytes:
            self._refuse(414, f"request targets are limited to {self._limits.target_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.state == "body":
            return  # a trailer: never allowed to pass for a header
        self._header_count += 1
        if self._header_count > self._limits.headers:
            self._refuse(431, f"requests are limited to {self._limits.headers} headers")
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        known = self._headers.get(key)
        self._headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        if self._ended:
            return
        self.state = "body"
        if self._offers_upgrade_of_body():
            return
        fault = self._fault_of_head()
        if fault is not None:
            self._refuse(*fault)
        elif "expect" in self._headers and self._parser.get_http_version() != "1.0":
            if self._headers.get("content-length", "").strip("0") or self._is_chunked():
                self._receiver.wants_continue()

    def _is_chunked(self) -> bool:
        return "transfer-encoding" in self._headers

    def _fault_of_head(self) -> tuple[int, str] | None:
        """Status and message for a head that llhttp accepts and this server does not."""
        headers, version = self._headers, self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return 505, f"HTTP/{version} is not supported; use HTTP/1.1"
        if version == "1.1" and "host" not in headers:
            return 400, "HTTP/1.1 requests need a Host header"
        if "," in headers.get("host", ""):
            return 400, "a request has one Host header"
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            return 501, "the only transfer coding that is supported is chunked"
        if version == "1.0" and self._is_chunked():
            return 400, "HTTP/1.0 requests cannot use Transfer-Encoding"
        if self._parser.get_method() == b"CONNECT":
            return 405, "CONNECT is not supported"
        try:
            path_of(self._url.decode("latin-1"))
        except ValueError as error:
            return 400, str(error)
        return self._fault_of_body(headers, version)

    def _fault_of_body(self, headers: dict[str, str], version: str) -> tuple[int, str] | None:
        coding = headers.get("content-encoding", "identity").lower()
        if coding not in ("identity", ""):
            return 415, f"Content-Encoding: got {coding!r}; send the body as it is"
        if int(headers.get("content-length") or 0) > self._limits.body_bytes:
            return 413, f"request bodies are limited to {self._limits.body_bytes} bytes"
        expected = headers.get("expect", "100-continue").lower()
        if expected != "100-continue" and version != "1.0":
            return 417, f"Expect: got {expected!r}, expected 100-continue"
        return None

    def on_body(self, piece: bytes) -> None:
        if self._ended:
            return
        self._body_bytes += len(piece)
        fits = self._bodies.take(len(piece))
        if self._body_bytes > self._limits.body_bytes:
            self._refuse(413, f"request bodies are limited to {self._limits.body_bytes} bytes")
        elif not fits:
            self._refuse(503, "too many request bodies are in flight; retry later")
        else:
            self._body.append(piece)

    def on_message_complete(self) -> None:
        if self._ended:
            return
        if self._offers_upgrade_of_body():
            self._again = self._head_without_offer()
            self._begin_request()
            return
        version = self._parser.get_http_version()
        request = Request(
            self._parser.get_method().decode("ascii"),
            path_of(self._url.decode("latin-1")),
            self._headers,
            b"".join(self._body),
            version == "1.1",
            version == "1.1" and self._parser.should_keep_alive(),
        )
        self._begin_request()
        self.last = self._ended = not request.keep_alive
        self._receiver.request_read(request)
