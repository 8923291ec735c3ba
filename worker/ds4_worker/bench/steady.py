"""A constant load of HTTP requests, and what became of each of them.

Owns: a client that never retries, so that whatever a server loses is seen. Half of the requests are
streams; half of them share a few connections that are kept alive. A request is lost when its
connection ended before the first byte of its response; it is cut when it ended later.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

ANSWER_SECONDS = 300.0  # more than a queue takes that a busy machine let grow
_KEPT_CONNECTIONS = 4


class Outcome(msgspec.Struct, frozen=True):
    """`status` 0: no response began. `seconds`: to the end of the response."""

    status: int
    complete: bool
    seconds: float
    problem: str = ""


class Tally(msgspec.Struct):
    """Everything that was asked so far."""

    outcomes: list[Outcome] = []

    @property
    def lost(self) -> list[Outcome]:
        return [o for o in self.outcomes if not o.status]

    @property
    def unanswered(self) -> list[Outcome]:
        """Those of the lost whose connection still stood: forgotten, or the machine is too slow."""
        return [o for o in self.lost if o.seconds >= ANSWER_SECONDS]

    @property
    def cut(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.status and not o.complete]

    @property
    def refused(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.status > 0 and o.status != 200]

    @property
    def answered(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.status == 200 and o.complete]


class _Kept:
    """A connection that is used for one request after the other, and opened again when it ends."""

    def __init__(self) -> None:
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.lock = asyncio.Lock()


def _request(stream: bool, number: int, keep: bool) -> bytes:
    body = json.dumps(
        {"prompt": f"Number {number}:", "max_tokens": 3, "temperature": 0, "stream": stream}
    ).encode()
    connection = "keep-alive" if keep else "close"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: load\r\nConnection: {connection}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bool, bool]:
    """(status, complete, whether the connection goes on). Raises what the connection raises before
    the first byte."""
    first = await reader.readexactly(1)
    status, complete, goes_on = -1, False, False
    try:
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(head.split()[1])
        goes_on = "connection: close" not in head
        if "transfer-encoding: chunked" in head:
            while size := int((await reader.readuntil(b"\r\n")), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        else:
            await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
        complete = True
    except (asyncio.IncompleteReadError, ConnectionError):
        goes_on = False
    return status, complete, goes_on


class _Load:
    def __init__(self, port: int, tally: Tally) -> None:
        self._port = port
        self._tally = tally
        self._kept = [_Kept() for _ in range(_KEPT_CONNECTIONS)]
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, per_second: float, stop: asyncio.Event) -> None:
        start = time.perf_counter()
        for number in itertools.count():
            if stop.is_set():
                break
            task = asyncio.create_task(self._one(number))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            late = start + (number + 1) / per_second - time.perf_counter()
            await asyncio.sleep(max(0.0, late))
        if self._running:
            await asyncio.wait(self._running)
        for kept in self._kept:
            if kept.streams is not None:
                kept.streams[1].close()

    async def _one(self, number: int) -> None:
        start = time.perf_counter()
        status, complete, problem = 0, False, ""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if number % 2:
                    kept = self._kept[number // 2 % _KEPT_CONNECTIONS]
                    async with kept.lock:
                        start = time.perf_counter()
                        status, complete = await self._on_kept(kept, number)
                else:
                    status, complete = await self._alone(number)
        except (OSError, EOFError, TimeoutError) as error:
            problem = repr(error)
        seconds = time.perf_counter() - start
        self._tally.outcomes.append(Outcome(status, complete, seconds, problem))

    async def _alone(self, number: int) -> tuple[int, bool]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(_request(number % 4 == 0, number, keep=False))
            status, complete, _ = await _answer(reader)
            return status, complete
        finally:
            writer.close()

    async def _on_kept(self, kept: _Kept, number: int) -> tuple[int, bool]:
        if kept.streams is None:
            kept.streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = kept.streams
        goes_on = False
        try:
            writer.write(_request(number % 4 == 1, number, keep=True))
            status, complete, goes_on = await _answer(reader)
            return status, complete
        finally:
            if not goes_on:
                kept.streams = None
                writer.close()


@contextmanager
def steady_load(port: int, per_second: float) -> Iterator[Tally]:
    """Asks at a constant rate, in a thread, until the end of the block; then waits for what is
    still unanswered."""
    tally = Tally()
    stop, loop = asyncio.Event(), asyncio.new_event_loop()

    def work() -> None:
        try:
            loop.run_until_complete(_Load(port, tally).run(per_second, stop))
        finally:
            loop.close()

    thread = threading.Thread(target=work, name="load", daemon=True)
    thread.start()
    try:
        yield tally
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
