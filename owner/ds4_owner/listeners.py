"""Listening sockets that outlive the workers that serve them.

Owns: one socket per address, created at the first request and held until the owner stops, so that
clients of a dead worker wait in the backlog instead of being refused. Refuses addresses that
somebody else listens on, and host names: the broker must not wait for a name server.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from ds4_common.errors import AddressError
from ds4_common.protocol import GetListener, ListenerRecord
from ds4_owner.claim import BoundSocket, bind_unix, refusal
from ds4_owner.seats import Seat, make_seat
from ds4_owner.state import HeldListener, Node

BACKLOG = 4096  # how many clients may wait while no worker lives; the kernel caps it at somaxconn
MAX_LISTENERS = 256


@dataclass(frozen=True, slots=True)
class _Held:
    sock: socket.socket
    record: ListenerRecord
    bound: BoundSocket | None = None  # for a Unix socket
    asked_port: int = 0


class Listeners:
    """The sockets by address. Used by the broker's thread only."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, str], _Held] = {}
        self._seats: dict[ListenerRecord, Seat] = {}
        self.changed = False  # something was made that the next program must know of

    def get(self, request: GetListener) -> tuple[int, ListenerRecord]:
        """(borrowed descriptor, record) of the socket for an address, made if there is none yet.

        Raises AddressInUse or AddressError."""
        if bool(request.host) == bool(request.path) or "\0" in request.host + request.path:
            raise AddressError("listener: give either a host or a path")
        if request.path and not os.path.isabs(request.path):
            raise AddressError(f"listener: path {request.path} is not absolute")
        key = _key(request.host, request.port, request.path, request.name)
        held = self._held.get(key) or self._bound_to(request)
        if held is not None and held.bound is not None and not held.bound.in_place:
            held.sock.close()  # somebody cleaned up: no client can find it any more
            held = None
        if held is None:
            if key not in self._held and len(self._held) >= MAX_LISTENERS:
                raise AddressError(f"listener: the owner holds {MAX_LISTENERS} already; restart it")
            held = _listen_unix(request) if request.path else _listen_tcp(request)
            self._held[key] = held
            self.changed = True
        return held.sock.fileno(), held.record

    def seat(self, record: ListenerRecord) -> tuple[int, ...]:
        """Borrowed descriptors of what the workers of a socket share, made if there are none yet.

        Raises AddressError when no descriptors are left."""
        seat = self._seats.get(record)
        if seat is None:
            try:
                seat = self._seats[record] = make_seat()
            except OSError as error:
                raise AddressError(
                    f"seat of {record.path or f'port {record.port}'}: {error.strerror}"
                ) from error
            self.changed = True
        return seat.fds

    def records(self) -> list[ListenerRecord]:
        return [held.record for held in self._held.values()]

    def held(self) -> list[HeldListener]:
        """The sockets as the next program gets them."""
        listeners = []
        for h in self._held.values():
            node = h.bound.node() if h.bound else Node(h.sock.fileno())
            seat = self._seats.get(h.record)
            fds = [] if seat is None else list(seat.fds)
            listeners.append(HeldListener(h.record, h.asked_port, node, fds))
        return listeners

    def take(self, held: HeldListener) -> None:
        """A socket that the program before held, and its seat."""
        record, node = held.record, held.node
        bound = BoundSocket.of(node) if node.path else None
        sock = socket.socket(fileno=node.fd) if bound is None else bound.sock
        sock.setblocking(False)
        key = _key(record.host, held.asked_port, record.path, record.name)
        self._held[key] = _Held(sock, record, bound, held.asked_port)
        if held.seat:
            self._seats[record] = Seat(tuple(held.seat))

    def close(self) -> None:
        for held in self._held.values():
            (held.bound or held.sock).close()
        self._held.clear()
        for seat in self._seats.values():
            seat.close()
        self._seats.clear()

    def _bound_to(self, request: GetListener) -> _Held | None:
        """A socket that got this very port when it asked for any."""
        for held in self._held.values():
            record = held.record
            if request.port and (record.host, record.port) == (request.host, request.port):
                return held
        return None


def _key(host: str, port: int, path: str, name: str) -> tuple[str, int, str]:
    """Any free port is one socket per name: a restarted worker finds its own again."""
    return host, port, path or ("" if port else name)


def _listen_tcp(request: GetListener) -> _Held:
    where = f"listen address {request.host} port {request.port}"
    try:
        flags = socket.AI_NUMERICHOST | socket.AI_PASSIVE
        found = socket.getaddrinfo(
            request.host.encode(), request.port, type=socket.SOCK_STREAM, flags=flags
        )
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(f"{where}: not a numeric address") from error
    family, kind, number, _, address = found[0]
    sock = socket.socket(family, kind, number)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" serves IPv4 too; a specific address cannot.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(request.host != "::"))
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise refusal(where, error) from error
    port = int(sock.getsockname()[1])
    record = ListenerRecord(host=request.host, port=port, path="", name=request.name)
    return _Held(sock, record, asked_port=request.port)


def _listen_unix(request: GetListener) -> _Held:
    bound = bind_unix(request.path, socket.SOCK_STREAM, BACKLOG)
    record = ListenerRecord(host="", port=0, path=request.path, name=request.name)
    return _Held(bound.sock, record, bound)
