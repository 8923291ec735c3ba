"""`--metrics-port`: the owner's figures in Prometheus' text format, on the loopback interface.

Owns: the exposition text and a handler of the broker's loop that answers `GET /metrics`, nothing
else of HTTP: one request per connection, a head of at most 8 KiB within 5 s, 16 connections. Labels
are fixed words; no path, command or model file is told. Written by hand, because the client library
would double the memory of a process that must stay small.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ds4_common.allocation import ArtifactKind
from ds4_common.errors import AddressError, AddressInUse
from ds4_common.protocol import AllocationRecord, LeaseRecord
from ds4_owner.answers import OwnerFacts
from ds4_owner.leases import LEASE_ROLES
from ds4_owner.resident import resident
from ds4_owner.state import Desk, Kept
from ds4_owner.transport import Client, Transport

HOST = "127.0.0.1"
MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 16
REQUEST_SECONDS = 5.0
_BACKLOG = 64
_SEND_BUFFER_BYTES = 128 << 10  # a whole reply fits, so the loop never sends half of one
_STATES = ("loading", "ready", "failed")
_TEXT = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[dict[str, str], float]  # labels, value
_W = TypeVar("_W", bound=str)


@dataclass(frozen=True, slots=True)
class Observed:
    """What the broker knows at the moment of a scrape."""

    facts: OwnerFacts
    leases: Sequence[LeaseRecord]
    connections: int
    line_requests: int
    native_requests: int
    identity_refusals: int
    uptime_seconds: float


# The text


def render(seen: Observed) -> str:
    """All metrics. `kind` is raw or that of an artifact."""
    facts, progress = seen.facts, seen.facts.progress
    held = list(facts.offer.allocations.values())
    kinds = {kind: [a for a in held if _kind(a) == kind] for kind in sorted({*map(_kind, held)})}
    blob_bytes = sum(blob.n_bytes for blob in facts.offer.blobs.values())
    roles = {role: sum(x.role == role for x in seen.leases) for role in sorted(LEASE_ROLES)}
    requests = {"line": seen.line_requests, "native": seen.native_requests}
    ended = {"ok": facts.state == "ready", "failed": facts.state == "failed"}
    stored = {kind: sum(a.alloc_bytes for a in found) for kind, found in kinds.items()}
    families = (
        _family("info", "gauge", "Constant 1.",
                [({"backend": facts.backend}, 1)]),
        _family("state", "gauge", "1 for the state the owner is in.",
                _by("state", {state: facts.state == state for state in _STATES})),
        _family("uptime_seconds", "gauge", "Since the broker began to answer.",
                [({}, round(seen.uptime_seconds, 3))]),
        _family("loads_total", "counter", "Loads that ended.", _by("result", ended)),
        _family("load_done_bytes", "gauge", "Written by the load so far.",
                [({}, progress.done_bytes)]),
        _family("load_bytes", "gauge", "To be written by the load; 0: not planned yet.",
                [({}, progress.total_bytes)]),
        _family("bytes", "gauge", "Memory handed out.",
                _by("kind", stored | {"blob": blob_bytes})),
        _family("allocations", "gauge", "Allocations handed out.",
                _by("kind", {kind: len(found) for kind, found in kinds.items()})),
        _family("leases", "gauge", "Processes that hold a lease.", _by("role", roles)),
        _family("connections", "gauge", "Open native connections.", [({}, seen.connections)]),
        _family("broker_requests_total", "counter", "Requests answered.",
                _by("protocol", requests)),
        _family("identity_refusals_total", "counter",
                "Attachments refused because a model file had changed.",
                [({}, seen.identity_refusals)]),
        _family("memory_bytes", "gauge", "Resident memory of the process; private is its own.",
                _by("part", resident())),
    )  # fmt: skip
    return "".join(families)


def _kind(record: AllocationRecord) -> str:
    return "raw" if record.artifact is None else ArtifactKind(record.artifact.kind).name.lower()


def _by(label: str, values: Mapping[_W, int]) -> list[Sample]:
    return [({label: word}, int(value)) for word, value in values.items()]


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP ds4_owner_{name} {text}", f"# TYPE ds4_owner_{name} {kind}"]
    for labels, value in samples:
        shown = ",".join(f'{key}="{word}"' for key, word in labels.items())
        lines.append(f"ds4_owner_{name}" + (f"{{{shown}}} {value}" if shown else f" {value}"))
    return "\n".join(lines) + "\n"


# The port


def listen(port: int) -> socket.socket:
    """A non-blocking listening socket on the loopback interface; port 0: any free one.

    Raises AddressInUse or AddressError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        sock.setblocking(False)
        sock.bind((HOST, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        kind = AddressInUse if error.errno == errno.EADDRINUSE else AddressError
        where = f"--metrics-port {port} at {HOST}"
        raise kind(f"{where}: {error.strerror}; choose another port") from error
    return sock


class MetricsDesk:
    """Answers scrapes in the transport's thread."""

    max_request_bytes = MAX_HEAD_BYTES
    desk: Desk = "metrics"

    def __init__(self, transport: Transport, observe: Callable[[], Observed]) -> None:
        self._transport, self._observe = transport, observe
        self._heads: dict[Client, bytes] = {}  # what came so far, in order of age

    def opened(self, client: Client) -> bool:
        if len(self._heads) >= MAX_CONNECTIONS:
            self._transport.drop(next(iter(self._heads)))
        self._heads[client] = b""
        client.deadline = time.monotonic() + REQUEST_SECONDS
        return True

    def received(self, client: Client, data: bytes, intact: bool) -> None:
        head = self._heads[client] = self._heads[client] + data
        if b"\r\n\r\n" in head:
            self._transport.send(client, answer(head, self._observe))
            self._transport.leave(client)
        elif not intact or len(head) > MAX_HEAD_BYTES:
            self._transport.send(
                client, _reply("431 Request Header Fields Too Large", "at most 8 KiB\n")
            )
            self._transport.leave(client)
        elif not data:
            self._transport.drop(client)

    def expired(self, client: Client) -> None:
        self._transport.drop(client)

    def closed(self, client: Client) -> None:
        self._heads.pop(client, None)

    def exhausted(self) -> bytes:
        return _reply("503 Service Unavailable", "no file descriptors left\n")

    def keep(self, client: Client) -> Kept:
        return Kept(text=self._heads.get(client, b""))

    def take(self, client: Client, kept: Kept) -> None:
        self._heads[client] = kept.text


def answer(head: bytes, observe: Callable[[], Observed]) -> bytes:
    """The reply to a request head."""
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _reply("400 Bad Request", "expected GET /metrics HTTP/1.1\n")
    method, target = words[0], words[1].split(b"?", 1)[0]
    if target != b"/metrics":
        return _reply("404 Not Found", "there is only /metrics\n")
    if method not in (b"GET", b"HEAD"):
        return _reply("405 Method Not Allowed", "only GET and HEAD\n", "Allow: GET, HEAD\r\n")
    return _reply("200 OK", render(observe()), head_only=method == b"HEAD")


def _reply(status: str, text: str, more: str = "", *, head_only: bool = False) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_TEXT}\r\nContent-Length: {len(body)}\r\n"
        f"{more}Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)
