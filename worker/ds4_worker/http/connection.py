"""One HTTP/1.1 connection: the order of answers, deadlines, and its end.

Requests come from `reader.py`, event streams leave through `streaming.py`. Owns: what happens
between them. Pipelined requests are answered one after the other. A request's task is cancelled the
moment its client is gone; one that half-closes counts as gone, as with most servers. A reader that
does not read holds up its own connection only. A connection that has a ticket is parked: bytes are
read into its journal, and every response is announced before the first of its bytes.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Protocol, cast

from ds4_common.errors import RequestError
from ds4_worker.http.framing import BODILESS, CONTINUE, response_head
from ds4_worker.http.journal import Inheritance, Ticket, shut
from ds4_worker.http.limits import BodyBudget, BodyShare, Deadline, HttpLimits
from ds4_worker.http.messages import Application, EventStream, Request, Response
from ds4_worker.http.reader import RequestReader
from ds4_worker.http.streaming import StreamSender

_SETTLE_SECONDS = 0.05  # between two looks at bytes that a Unix client has yet to read


class Host(Protocol):
    """What a connection needs of its server."""

    app: Application
    limits: HttpLimits
    draining: bool
    successor: bool  # while draining: another worker takes what is left
    bodies: BodyBudget
    scratch: memoryview  # to read into without a journal

    def opened(self, connection: Connection) -> bool:
        """False when there are too many."""

    def closed(self, connection: Connection) -> None: ...

    def rested(self) -> None:
        """A connection has become idle."""

    def on_error(self, error: BaseException) -> None:
        """Told about exceptions that no handler should let out."""


class Connection(asyncio.BufferedProtocol):
    """One client. Reading: `_reader` fills `_ready`. Writing: one task at a time empties it."""

    def __init__(
        self,
        server: Host,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        ticket: Ticket | None = None,
        inheritance: Inheritance | None = None,
    ) -> None:
        """`inheritance`: what another worker read from `sock` before."""
        self._server = server
        self._limits = server.limits
        self._loop = loop
        self._sock = sock
        self._ticket = ticket
        self._inheritance = inheritance
        self._skip = 0  # requests yet to be read that another worker has answered
        self._handed_over = False
        self._buffer = server.scratch
        self._bodies = BodyShare(server.bodies)
        self._reader = RequestReader(self, server.limits, self._bodies, loop.time)
        self._ready: deque[Request] = deque()
        # Sent once _ready is empty; then nothing is read.
        self._refusal: Response | None = None
        self._last = False  # after the response under way the connection is closed
        self._task: asyncio.Task[None] | None = None
        self._request: Request | None = None  # that is being answered
        self._head_sent = False
        self._closed = False
        self._unsettled = False  # the transport has bytes that are not counted
        self._deadline = Deadline(loop, self._expired)
        self.writable: asyncio.Future[None] | None = None  # while the client does not read

    # --- transport events -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        # A reader may pause as long as it likes; the kernel finds out whether it still lives.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._deadline.set(self._limits.idle_seconds)
        if not self._server.opened(self):
            self._refuse(503, f"more than {self._limits.connections} connections; retry later")
        elif self._inheritance is not None:
            self._go_on(self._inheritance)
            self._inheritance = None

    def _go_on(self, inheritance: Inheritance) -> None:
        """Takes in what another worker had read and not answered."""
        if inheritance.fatal:
            self._refuse(503, "several workers died over this request")
            return
        self._skip = inheritance.answered
        if inheritance.data:
            self._received(inheritance.data)
        if not self.idle:
            return
        if self._last:
            self._transport.close()  # all was answered; closing it was left to us
        elif self._ticket is not None:
            self._ticket.buffer(fresh=True)  # nobody can die over what is answered

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self._deadline.cancel()
        if self._task is not None:
            self._task.cancel()
            self._server.app.counters.disconnects += 1
        self.resume_writing()
        if not self._handed_over:
            shut(self._sock)
            self._unpark()
        self._bodies.close()
        self._server.closed(self)

    def pause_writing(self) -> None:
        self.writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self.writable is not None:
            if not self.writable.done():
                self.writable.set_result(None)
            self.writable = None

    @property
    def idle(self) -> bool:
        """Whether every request that was received is answered."""
        return self._task is None and self._reader.state == "idle" and self._refusal is None

    def get_buffer(self, sizehint: int) -> memoryview:
        self._buffer = self._server.scratch
        if self._ticket is not None:
            journal = self._ticket.buffer(fresh=self.idle)
            if journal is None:
                self._unpark()
            else:
                self._buffer = journal
        return self._buffer

    def buffer_updated(self, n_bytes: int) -> None:
        if self._ticket is not None:
            self._ticket.received(n_bytes)
        self._received(bytes(self._buffer[:n_bytes]))

    def _unpark(self) -> None:
        if self._ticket is not None:
            self._ticket.free()
            self._ticket = None

    def _received(self, data: bytes) -> None:
        if self._refusal is None and not self._last:
            self._reader.feed(data)
            if self._refusal is None:
                self._arm_for_reading()

    # --- what was read ----------------------------------------------------------------------

    def request_read(self, request: Request) -> None:
        self._last = self._reader.last
        if self._skip:
            self._skip -= 1
            self._bodies.give_back(len(request.body))
        elif len(self._ready) >= self._limits.pipelined_requests:
            self._refuse(400, f"more than {len(self._ready)} pipelined requests")
        else:
            self._server.app.counters.requests += 1
            self._ready.append(request)
            if self._task is None:
                self._next()

    def wants_continue(self) -> None:
        if self._task is None and not self._ready and not self._skip:
            if self._ticket is not None:
                self._ticket.interjects(len(CONTINUE))
            self._put(CONTINUE)

    def refused(self, error: RequestError, path: str) -> None:
        """Nothing more is read; requests before this point are still answered, in order."""
        if self._refusal is None:
            self._refusal = self._server.app.refuse(error, path)
            self._deadline.clear()
            if self._skip:
                self._transport.close()  # the other worker has said so already
            elif self._task is None:
                self._next()

    def _refuse(self, status: int, message: str) -> None:
        self.refused(RequestError(message, status=status, code="bad_http_request"), "")

    # --- deadlines --------------------------------------------------------------------------

    def _arm_for_reading(self) -> None:
        if self._reader.state != "idle":
            limit = self._reader.started + self._limits.header_seconds - self._loop.time()
            seconds = self._limits.read_seconds
            self._deadline.set(seconds if self._reader.state == "body" else min(seconds, limit))
        elif self._task is not None:
            self._deadline.clear()

    def _expired(self) -> None:
        if self._reader.state == "idle" or self._refusal is not None:
            self._transport.close()
        else:
            self._refuse(408, "the request did not arrive in time")

    # --- responses --------------------------------------------------------------------------

    def _next(self) -> None:
        """Starts the next request, or sends the refusal that is due, or waits for bytes."""
        self._head_sent = False
        if self._ready:
            request = self._request = self._ready.popleft()
            if self._reader.state == "idle":
                self._deadline.clear()
            self._task = self._loop.create_task(self._respond(request))
            self._task.add_done_callback(lambda task: self._finished(task, request))
        elif self._refusal is not None:
            self._request = None
            self._send(self._refusal, "GET")
            self._linger()
        elif self._last or (self._server.draining and not self._goes_on):
            self._transport.close()
        elif self._reader.state == "idle":
            self._deadline.set(self._limits.idle_seconds)
            self._server.rested()

    async def _respond(self, request: Request) -> None:
        reply = await self._server.app.handle(request)
        if isinstance(reply, EventStream):
            sender = StreamSender(
                self,
                reply,
                chunked=request.chunked,
                silence_seconds=self._limits.silence_seconds,
            )
            try:
                await sender.run()
            except RequestError as error:
                self._send(self._server.app.refuse(error, request.path), request.method)
            finally:
                self._server.app.counters.keepalives += sender.keepalives
            await self._written()
            return
        try:
            self._send(reply, request.method)
            await self._written()
        finally:
            if reply.release is not None:
                reply.release()

    async def _written(self) -> None:
        """Until little enough is left that the kernel and we may keep it."""
        while self.writable is not None:
            await self.writable

    def _send(self, reply: Response, method: str) -> None:
        headers = reply.headers
        if reply.status not in BODILESS:
            headers = (*headers, ("Content-Length", str(len(reply.body))))
        head = self._begin(reply.status, reply.content_type, headers)
        self.end_response(head if method == "HEAD" else head + reply.body)

    def begin_stream(self, reply: EventStream) -> bytes:
        headers = reply.headers
        if self._request is not None and self._request.chunked:
            headers = (*headers, ("Transfer-Encoding", "chunked"))
        return self._begin(200, reply.content_type, headers)

    def _begin(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...]) -> bytes:
        """Announces a response whose head this is."""
        keeps = self._request is not None and self._request.keep_alive
        close = not keeps or self._server.draining
        self._last = self._last or close
        self._head_sent = True
        self._server.app.counters.responded(status)
        if self._ticket is not None:
            self._ticket.begins()
        return response_head(status, content_type, headers, close)

    def write(self, data: bytes) -> None:
        if self._ticket is not None:
            self._ticket.queues(len(data))
        self._put(data)

    def end_response(self, data: bytes) -> None:
        """Writes the last bytes. They are announced as the last before the client can have them."""
        if self._ticket is not None:
            self._ticket.ends(len(data))
        if data:
            self._put(data)

    def _put(self, data: bytes) -> None:
        """Sends bytes that are announced."""
        counts = None if self._ticket is None else self._ticket.counts
        if counts is not None and not self._transport.get_write_buffer_size():
            data = data[counts.send(data) :]
            if not data:
                return
        if counts is not None:
            counts.leave()
            if not self._unsettled:
                self._unsettled = True
                self._loop.call_later(_SETTLE_SECONDS, self._look_again)
        self._transport.write(data)

    def _look_again(self) -> None:
        if not self._closed and not self._settle():
            self._loop.call_later(_SETTLE_SECONDS, self._look_again)

    def _settle(self) -> bool:
        """Whether the transport has sent what could not be sent at once."""
        if self._unsettled and not self._transport.get_write_buffer_size():
            self._unsettled = False
            if self._ticket is not None and self._ticket.counts is not None:
                self._ticket.counts.settle()
        return not self._unsettled

    def _finished(self, task: asyncio.Task[None], request: Request) -> None:
        self._task = None
        self._bodies.give_back(len(request.body))
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._server.on_error(error)
        if self._closed:
            return
        if task.cancelled() or error is not None:
            if self._head_sent:
                self._transport.abort()  # the only way left to say that the body is not complete
                return
            failure = RequestError("internal error", status=500, code="internal_error")
            self._refusal = self._server.app.refuse(failure, request.path)
            self._ready.clear()
        self._next()

    def _linger(self) -> None:
        """Half-closes and reads on for a moment: closing with unread bytes would reset the
        connection, and the client would never see the answer."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._deadline.set(self._limits.linger_seconds)

    # --- its end ----------------------------------------------------------------------------

    @property
    def _goes_on(self) -> bool:
        """Whether the next worker can take this connection when it is idle."""
        flushed = not self._transport.get_write_buffer_size()
        return self._server.successor and self._ticket is not None and flushed

    def close_if_idle(self) -> None:
        if self._task is None and self._reader.state == "idle" and not self._goes_on:
            self._transport.close()

    def hand_over(self) -> bool:
        """Leaves the client to the next worker. False: it cannot go on there."""
        self._settle()
        ticket = self._ticket
        if ticket is None or ticket.begun or self._refusal is not None:
            return False
        if self._last and self._task is None:  # it is closing
            return False
        self._handed_over = True
        self._transport.abort()
        return True

    def abort(self) -> None:
        self._transport.abort()
