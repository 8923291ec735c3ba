"""The published line protocol (docs/protocol.md): one line in, one line and one descriptor out.

Owns the half lines of its clients. Refuses other users, and makes room for a newcomer at the cost
of whoever came first.
"""

from __future__ import annotations

import time

from ds4_common import protocol
from ds4_owner import answers, desks
from ds4_owner.desks import House, is_foreign
from ds4_owner.state import Desk, Kept
from ds4_owner.transport import Client, Transport

MAX_CONNECTIONS = 64
_REQUEST_LOG_INTERVAL = 64


class LineDesk:
    """The published protocol: one line in, one line and one descriptor out, closed."""

    max_request_bytes = protocol.MAX_LINE_BYTES
    desk: Desk = "line"

    def __init__(self, house: House, transport: Transport) -> None:
        self._house, self._transport = house, transport
        self._lines: dict[Client, bytes] = {}  # what came so far, in order of age
        self.requests = 0

    def opened(self, client: Client) -> bool:
        if is_foreign(client.peer, self._house.log):
            return False
        if len(self._lines) >= MAX_CONNECTIONS:
            self._transport.drop(next(iter(self._lines)))
        self._lines[client] = b""
        client.deadline = time.monotonic() + desks.GREETING_SECONDS
        return True

    def received(self, client: Client, data: bytes, intact: bool) -> None:
        line = self._lines[client] + data
        self._lines[client] = line
        end = line.find(b"\n") + 1
        if not end and data and len(line) <= protocol.MAX_LINE_BYTES:
            return  # half a line: the rest is due before the deadline
        if not line:
            self._transport.drop(client)
            return
        reply, fd, allocation = answers.line_reply(self._house.facts.offer, line[:end])
        if allocation is not None:
            self._count(allocation)
        self._transport.send(client, reply, () if fd is None else (fd,))
        self._transport.leave(client)

    def _count(self, allocation: int) -> None:
        self.requests += 1
        last = len(self._house.facts.offer.allocations) - 1
        if self.requests == 1 or self.requests % _REQUEST_LOG_INTERVAL == 0 or allocation == last:
            self._house.log(f"broker request {self.requests} id={allocation}")

    def expired(self, client: Client) -> None:
        self._transport.drop(client)

    def closed(self, client: Client) -> None:
        self._lines.pop(client, None)

    def exhausted(self) -> bytes:
        return protocol.LINE_ERROR

    def keep(self, client: Client) -> Kept:
        return Kept(text=self._lines.get(client, b""))

    def take(self, client: Client, kept: Kept) -> None:
        self._lines[client] = kept.text
