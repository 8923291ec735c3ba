"""One thread that serves Unix sockets and never waits for a client.

Owns: accepting, reading, queues of unsent packets, deadlines. A slow, silent or dead client costs
one table entry until its deadline; nobody else waits for it. Who is let in and what is answered is
the business of a `Handler`. Descriptors that go out are borrowed, or made for the moment of
sending (`lending`): an outbox holds none, so nothing can leak. Running out of descriptors turns
newcomers away and never spins.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ds4_common import fdpass
from ds4_common.errors import BackendError, ProtocolError
from ds4_owner.leases import Peer
from ds4_owner.lending import Descriptor, lent, number
from ds4_owner.state import Connection, Desk, Kept

SENDING_SECONDS = 10.0  # for a client to take what was sent to it
_ACCEPTS_PER_TURN = 32
_SEND_RETRY_SECONDS = 0.05  # after the kernel had too many descriptors in flight
_ACCEPT_RETRY_SECONDS = 0.5  # after nothing could be accepted, not even to be turned away
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(slots=True, eq=False)
class Client:
    """One connection. `deadline` is the handler's; `sending_deadline` counts while the outbox is
    not empty, and no further request is read before it is."""

    sock: socket.socket
    peer: Peer
    handler: Handler
    deadline: float | None = None
    sending_deadline: float | None = None
    retry_at: float | None = None
    leaving: bool = False  # closed as soon as the outbox is empty
    closed: bool = False
    interest: int = 0  # what the selector watches; 0: not registered
    outbox: deque[tuple[bytes, tuple[Descriptor, ...]]] = field(default_factory=deque)


class Handler(Protocol):
    """The rules of one listening socket. Called in the transport's thread only."""

    max_request_bytes: int
    desk: Desk  # its name

    def opened(self, client: Client) -> bool:
        """A newcomer. False: it was turned away and must go when its outbox is empty."""

    def received(self, client: Client, data: bytes, intact: bool) -> None:
        """Bytes came (b"": the peer sends no more). Not intact: cut, or with descriptors."""

    def expired(self, client: Client) -> None:
        """Its deadline passed."""

    def closed(self, client: Client) -> None:
        """It is gone."""

    def exhausted(self) -> bytes:
        """The last word to a newcomer for whom there is no file descriptor."""

    def keep(self, client: Client) -> Kept:
        """What the next program must know of a client."""

    def take(self, client: Client, kept: Kept) -> None:
        """A client as the program before left it."""


class Transport:
    """The loop. Methods belong to its thread, except `call` and `stop`."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reserve = _spare_descriptor()
        self._calls: deque[Callable[[], None]] = deque()
        self._listening: list[tuple[socket.socket, Handler]] = []
        self._clients: dict[Client, None] = {}  # in order of age
        self._paused_until: float | None = None
        self._stopping = False
        self._selector.register(self._wake, _READ, self._on_wake)

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` in the loop's thread, soon. From any thread."""
        self._calls.append(function)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Makes `run` return. From any thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def again(self) -> None:
        """Lets `run` be called once more, after it returned."""
        self._stopping = False

    def when_readable(self, fd: int, function: Callable[[], None]) -> None:
        """Calls `function` in every turn in which a descriptor of somebody else's is readable."""
        self._selector.register(fd, _READ, function)

    def run(self) -> None:
        while not self._stopping:
            self._turn()
        self._run_calls()  # those that were made before `stop` count

    def connections(self) -> list[Connection]:
        """All clients, oldest first. In the loop's thread, or after `run`."""
        return [
            Connection(
                fd=client.sock.fileno(),
                desk=client.handler.desk,
                kept=client.handler.keep(client),
                deadline=client.deadline,
                sending_deadline=client.sending_deadline,
                retry_at=client.retry_at,
                leaving=client.leaving,
                outbox=[(data, [*map(number, fds)]) for data, fds in client.outbox],
            )
            for client in self._clients
        ]

    def adopt(self, connection: Connection, handler: Handler) -> None:
        """Goes on with a client of the program before. Before `run`."""
        sock = socket.socket(fileno=connection.fd)
        sock.setblocking(False)
        client = Client(
            sock, Peer(*fdpass.peer(sock)), handler,
            deadline=connection.deadline, sending_deadline=connection.sending_deadline,
            retry_at=connection.retry_at, leaving=connection.leaving,
            outbox=deque((data, tuple(fds)) for data, fds in connection.outbox),
        )  # fmt: skip
        self._clients[client] = None
        handler.take(client, connection.kept)
        if client.retry_at is None:
            self._watch(client, _WRITE if client.outbox else _READ)

    def close(self) -> None:
        """Drops every client. Listening sockets are their owner's. After `run`."""
        for client in list(self._clients):
            self.drop(client)
        self._selector.close()
        if self._reserve >= 0:
            os.close(self._reserve)

    def release(self) -> None:
        """The end of the object. When no thread can `call` or `stop` any more."""
        os.close(self._wake)

    def listen(self, sock: socket.socket, handler: Handler) -> None:
        """Serves a non-blocking listening socket."""
        self._listening.append((sock, handler))
        if self._paused_until is None:
            self._selector.register(sock, _READ, partial(self._accept, sock, handler))

    def send(self, client: Client, data: bytes, borrowed_fds: tuple[Descriptor, ...] = ()) -> None:
        """Queues a packet and sends what the peer takes now."""
        if client.closed:
            return
        client.outbox.append((data, borrowed_fds))
        if len(client.outbox) == 1:
            self._flush(client)

    def leave(self, client: Client) -> None:
        """Closes a client as soon as it has taken what was sent to it."""
        client.leaving = True
        client.deadline = None
        if not client.outbox:
            self.drop(client)

    def drop(self, client: Client) -> None:
        if client.closed:
            return
        client.closed = True
        self._watch(client, 0)
        client.sock.close()
        self._clients.pop(client, None)
        client.handler.closed(client)

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._timeout()):
            key.data()
        now = time.monotonic()
        for client in list(self._clients):
            if client.retry_at is not None and client.retry_at <= now:
                client.retry_at = None
                self._flush(client)
            elif client.sending_deadline is not None and client.sending_deadline <= now:
                self.drop(client)
            elif client.deadline is not None and client.deadline <= now:
                client.handler.expired(client)
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            for sock, handler in self._listening:
                self._selector.register(sock, _READ, partial(self._accept, sock, handler))

    def _timeout(self) -> float | None:
        moments = [] if self._paused_until is None else [self._paused_until]
        for client in self._clients:
            times = (client.deadline, client.sending_deadline, client.retry_at)
            moments += [moment for moment in times if moment is not None]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _on_wake(self) -> None:
        os.eventfd_read(self._wake)
        self._run_calls()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _accept(self, listener: socket.socket, handler: Handler) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                if self._reserve < 0:  # a descriptor that became free is the reserve's first
                    self._reserve = _spare_descriptor()
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away(listener, handler)
                else:
                    self._pause(error)
                return
            sock.setblocking(False)
            client = Client(sock, Peer(*fdpass.peer(sock)), handler)
            self._clients[client] = None
            if handler.opened(client):
                self._read(client)  # the request is usually there already
                self._watch(client, _READ if not client.outbox else client.interest)
            else:
                self.leave(client)

    def _turn_away(self, listener: socket.socket, handler: Handler) -> None:
        """No descriptor for a newcomer, and its connection would stay readable. With the descriptor
        in reserve it is told so; when even that is lost, accepting pauses."""
        try:
            if self._reserve >= 0:
                os.close(self._reserve)
                self._reserve = -1
                self._dismiss(listener, handler.exhausted())
            self._reserve = _spare_descriptor()
        except OSError as error:
            self._pause(error)

    def _dismiss(self, listener: socket.socket, last_word: bytes) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return  # nobody: the kernel looks for a descriptor before it looks for a newcomer
        with sock:
            sock.setblocking(False)
            _try_send(sock, last_word)

    def _pause(self, error: OSError) -> None:
        if self._paused_until is not None:
            return
        self._log(f"broker pauses accepting: {error.strerror}")
        for sock, _ in self._listening:
            self._selector.unregister(sock)
        self._paused_until = time.monotonic() + _ACCEPT_RETRY_SECONDS

    def _on_event(self, client: Client) -> None:
        if client.closed:
            return
        if client.outbox:
            self._flush(client)
        else:
            self._read(client)

    def _read(self, client: Client) -> None:
        try:
            # No room for ancillary data: the kernel drops descriptors that a client sends us.
            size = client.handler.max_request_bytes + 1
            data, _, flags, _ = client.sock.recvmsg(size)
        except BlockingIOError:
            return
        except OSError:
            self.drop(client)
            return
        cut = flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) >= size
        client.handler.received(client, data, not cut)

    def _flush(self, client: Client) -> None:
        while client.outbox:
            try:
                data, descriptors = client.outbox[0]
                with lent(descriptors) as fds:
                    fdpass.send(client.sock, data, fds)
            except BlockingIOError:
                self._wait_to_send(client, _WRITE)
                return
            except (BrokenPipeError, ConnectionResetError):
                self.drop(client)
                return
            except (OSError, ProtocolError, BackendError) as error:
                if not isinstance(error, OSError) or error.errno != errno.ETOOMANYREFS:
                    self._log(f"broker drops pid {client.peer.pid}: cannot send to it: {error}")
                    self.drop(client)
                    return
                # Descriptors in flight, of all clients of this user together: try again soon.
                client.retry_at = time.monotonic() + _SEND_RETRY_SECONDS
                self._wait_to_send(client, 0)
                return
            client.outbox.popleft()
        client.sending_deadline = None
        if client.leaving:
            self.drop(client)
        else:
            self._watch(client, _READ)

    def _wait_to_send(self, client: Client, interest: int) -> None:
        if client.sending_deadline is None:
            client.sending_deadline = time.monotonic() + SENDING_SECONDS
        self._watch(client, interest)

    def _watch(self, client: Client, interest: int) -> None:
        if client.closed:
            interest = 0
        if interest == client.interest:
            return
        if not interest:
            self._selector.unregister(client.sock)
        elif client.interest:
            self._selector.modify(client.sock, interest, partial(self._on_event, client))
        else:
            self._selector.register(client.sock, interest, partial(self._on_event, client))
        client.interest = interest


def _spare_descriptor() -> int:
    """One to give up when a newcomer must be told that there is none. OSError: there is none."""
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def _try_send(sock: socket.socket, data: bytes) -> None:
    """A word that the peer may miss: it is on its way out."""
    try:
        fdpass.send(sock, data)
    except OSError:
        return
