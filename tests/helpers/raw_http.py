"""Requests as bytes, and the statuses among the bytes that come back."""

from __future__ import annotations

import re

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


def post(path: bytes, body: bytes, *headers: bytes) -> bytes:
    head = [b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", body])
