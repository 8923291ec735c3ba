"""Sending an event stream: its pieces as they come, and a sign of life when none come.

Owns: the timer behind keepalives, which looks at what was sent and not at what anybody computes: a
long prompt, a slow step and a parser that holds text back look the same to a client that waits.
A stream's headers go out with its first piece or its first keepalive, whatever comes first, so a
failure before them gets an honest status.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ds4_common.errors import RequestError
from ds4_worker.http.framing import LAST_CHUNK, chunk
from ds4_worker.http.limits import Deadline
from ds4_worker.http.messages import EventStream


class Outlet(Protocol):
    """Where the bytes of one response go."""

    @property
    def writable(self) -> asyncio.Future[None] | None:
        """None, or what is to be waited for before more is written."""

    def begin_stream(self, reply: EventStream) -> bytes:
        """Announces the response; returns its head."""

    def write(self, data: bytes) -> None: ...

    def end_response(self, data: bytes) -> None:
        """Writes the last bytes of the response."""


class StreamSender:
    """One event stream on its way to one client."""

    def __init__(
        self, outlet: Outlet, reply: EventStream, *, chunked: bool, silence_seconds: float
    ) -> None:
        """`chunked`: else the body ends with the connection."""
        self._outlet = outlet
        self._reply = reply
        self._chunked = chunked
        self._silence_seconds = silence_seconds
        self._silence = Deadline(asyncio.get_running_loop(), self._keep_alive)
        self._begun = False
        self.keepalives = 0

    async def run(self) -> None:
        """Sends everything. Raises RequestError when the stream failed before its head was sent:
        then nothing was."""
        self._silence.set(self._silence_seconds)
        try:
            await self._send_pieces()
        finally:
            self._silence.cancel()
        if not self._begun:
            self._outlet.write(self._outlet.begin_stream(self._reply))
        self._outlet.end_response(LAST_CHUNK if self._chunked else b"")

    async def _send_pieces(self) -> None:
        pieces = self._reply.chunks
        try:
            async for piece in pieces:
                self._send(piece)
                while (writable := self._outlet.writable) is not None:
                    await writable
        except RequestError as error:
            if not self._begun:
                raise
            self._send(self._reply.failure(error))
        finally:
            await pieces.aclose()

    def _send(self, piece: bytes) -> None:
        if self._chunked:
            piece = chunk(piece)
        if not self._begun:
            self._begun = True
            piece = self._outlet.begin_stream(self._reply) + piece
        self._outlet.write(piece)
        self._silence.set(self._silence_seconds)

    def _keep_alive(self) -> None:
        if self._outlet.writable is None:
            self.keepalives += 1
            self._send(self._reply.keepalive)
        else:  # nobody reads: there is enough to read as it is
            self._silence.set(self._silence_seconds)
