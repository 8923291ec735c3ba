"""The HTTP server: one listening socket, its connections, and an orderly end.

Owns: accepting, parking, draining, and what becomes of connections that another worker accepted.
Bytes are `connection.py`'s business, meaning is the application's: one async function from a
request to a response.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

import msgspec

from ds4_worker.http.connection import Connection
from ds4_worker.http.journal import Inheritance, Ticket
from ds4_worker.http.limits import (
    TURNED_AWAY,
    BodyBudget,
    HttpLimits,
    connections_that_fit,
)
from ds4_worker.http.messages import Application
from ds4_worker.http.parking import Inherited, Parking

_ACCEPTS_PER_TURN = 32
_ACCEPT_RETRY_SECONDS = 0.5  # while there is no room for one client more
_LOOK_SECONDS = 0.25  # between two looks for lanes of workers that died while they drained
_SCRATCH_BYTES = 64 << 10
_WANTING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HttpServer:
    """Accepts on one listening socket and hands requests to one application."""

    def __init__(
        self,
        app: Application,
        on_error: Callable[[BaseException], None],
        limits: HttpLimits | None = None,
    ) -> None:
        """`on_error` is told about exceptions that no handler should let out."""
        self.app = app
        self.on_error = on_error
        self.limits = limits or HttpLimits()
        self.draining = False
        self.successor = False  # while draining: there is one
        self.bodies = BodyBudget(self.limits.all_bodies_bytes)
        self.connections: set[Connection] = set()
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.inherited = 0  # connections that another worker had accepted, so far
        self._listener: socket.socket | None = None
        self._paused = False  # new clients are left in the backlog
        self._parking: Parking | None = None
        self._opening: set[asyncio.Task[object]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._drained: asyncio.Future[None] | None = None

    async def start(self, sock: socket.socket, parking: Parking | None = None) -> None:
        """Takes over a listening socket (closed by `stop_accepting`), and the clients of workers
        before this one."""
        self._loop = asyncio.get_running_loop()
        self._listener, self._parking = sock, parking
        fitting = connections_that_fit(self.limits.connections)
        self.limits = msgspec.structs.replace(self.limits, connections=fitting)
        self._watch()
        self._look_again()

    def _watch(self) -> None:
        if self._listener is not None:
            self._paused = False
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _pause(self) -> None:
        """Leaves clients in the backlog until one is gone, or for a moment."""
        if self._listener is not None:
            self._paused = True
            self._loop.remove_reader(self._listener.fileno())
            self._later(_ACCEPT_RETRY_SECONDS, self._watch)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._listener is None:
                return
            if len(self.connections) + len(self._opening) >= self.limits.connections + TURNED_AWAY:
                self._pause()
                return
            try:
                if self._parking is None:
                    connection, ticket = self._listener.accept()[0], None
                else:
                    connection, ticket = self._parking.accept(self._listener)
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _WANTING:
                    raise
                self._pause()
                return
            self._open(connection, ticket, None)

    def _open(
        self, sock: socket.socket, ticket: Ticket | None, inheritance: Inheritance | None
    ) -> None:
        opening = self._loop.connect_accepted_socket(
            lambda: Connection(self, self._loop, sock, ticket, inheritance), sock
        )
        task: asyncio.Task[object] = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def look(self) -> None:
        """Takes in the clients of workers that are gone."""
        if self._parking is None or self.draining:
            return
        inherited: list[Inherited] = self._parking.inherit()
        self.inherited += len(inherited)
        for one in inherited:
            self._open(one.connection, one.ticket, one.inheritance)

    def _look_again(self) -> None:
        self.look()
        if self._parking is not None and not self.draining:
            self._later(_LOOK_SECONDS, self._look_again)

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        now = self._loop.time()
        self._timers = [timer for timer in self._timers if timer.when() > now]
        self._timers.append(self._loop.call_later(seconds, function))

    def stop_accepting(self, *, successor: bool = False) -> None:
        """Leaves new clients in the backlog; running requests finish. Idle connections are closed,
        unless a successor takes them."""
        self.draining = True
        for timer in self._timers:
            timer.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        self.successor = successor
        for connection in list(self.connections):
            connection.close_if_idle()

    async def drain(self, seconds: float, *, successor: bool = False) -> int:
        """Waits until every request is answered, at most `seconds`. The successor gets what is left
        and has not begun; the rest is cut. Returns how many connections that were."""
        self.stop_accepting(successor=successor)
        if self._opening:
            await asyncio.wait(self._opening)
        if not self._quiet():
            self._drained = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._drained,), timeout=seconds)
        cut = 0
        for connection in list(self.connections):
            if not (successor and connection.hand_over()):
                connection.abort()
                cut += 1
        while self.connections:  # the ends of transports come in the next turn
            await asyncio.sleep(0)
        if self._parking is not None:
            self._parking.close()
        return cut

    def _quiet(self) -> bool:
        """Whether nothing is left, or only idle connections for the successor."""
        return not self.connections or (
            self.successor and all(connection.idle for connection in self.connections)
        )

    def opened(self, connection: Connection) -> bool:
        self.connections.add(connection)
        self.app.counters.connections = len(self.connections)
        return len(self.connections) <= self.limits.connections

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.app.counters.connections = len(self.connections)
        if self._paused:
            self._watch()
        self.rested()

    def rested(self) -> None:
        if self._drained is not None and not self._drained.done() and self._quiet():
            self._drained.set_result(None)
