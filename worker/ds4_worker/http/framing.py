"""The bytes around a response: status line, headers, chunks.

Owns: what HTTP/1.1 wants of a response and nothing else. Header values come from this server, never
from a client, so they are written as they stand.
"""

from __future__ import annotations

import time

LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

Headers = tuple[tuple[str, str], ...]

BODILESS = (204, 304)
_REASONS = {
    200: "OK",
    204: "No Content",
    304: "Not Modified",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    414: "URI Too Long",
    415: "Unsupported Media Type",
    417: "Expectation Failed",
    422: "Unprocessable Content",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}


def response_head(status: int, content_type: str, headers: Headers, close: bool) -> bytes:
    """The status line and headers of a response, up to its body."""
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}", f"Date: {date}"]
    if status not in BODILESS:
        lines.append(f"Content-Type: {content_type}")
    lines += [f"{name}: {value}" for name, value in headers]
    if close:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    """`data` in chunked coding; it must not be empty, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
