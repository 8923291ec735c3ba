"""The page at `/`: a fixed table of files, nothing of the file system beyond it.

Owns: which paths exist, their types, and the headers that keep the page to itself: it may load and
call nothing but this server, and no markup of its own or of a model can run as a script. Files are
read by the first request for them. The page needs no key: it asks for one when the API does.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import xxhash

from ds4_common.errors import RequestError
from ds4_worker.http.messages import Request, Response

FOLDER = Path(__file__).parents[1] / "page"
_SCRIPTS = (
    *("api", "app", "blocks", "chat", "conversation", "dom", "inline", "markdown", "settings"),
    *("status", "stream"),
)
FILES = {
    "/": "index.html",
    "/page/style.css": "style.css",
    "/page/icon.svg": "icon.svg",
    **{f"/page/{script}.js": f"{script}.js" for script in _SCRIPTS},
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),  # asked for again each time, answered 304 while it is the same
)


class File(msgspec.Struct, frozen=True):
    body: bytes
    content_type: str
    etag: str


@cache
def load(name: str) -> File:
    """One of the page's files."""
    body = (FOLDER / name).read_bytes()
    return File(body, _TYPES[name.rpartition(".")[2]], f'"{xxhash.xxh3_128_hexdigest(body)}"')


def answer(request: Request) -> Response:
    """The file at the path, or 304 when the client has it. Raises RequestError (404)."""
    name = FILES.get(request.path)
    if name is None:
        raise RequestError(
            f"no such file of the page: {request.path}", status=404, code="unknown_endpoint"
        )
    file = load(name)
    headers = (("ETag", file.etag), *_HEADERS)
    known = [tag.strip().removeprefix("W/") for tag in _known_tags(request)]
    if file.etag in known or "*" in known:
        return Response(304, b"", file.content_type, headers)
    return Response(200, file.body, file.content_type, headers)


def _known_tags(request: Request) -> list[str]:
    return request.headers.get("if-none-match", "").split(",")
