"""The engine thread: the only caller of the executor.

One turn of its loop: take what callers asked for, run one step, hand all events of that step to
the event loop in a single call. Idle, it blocks on its inbox and costs nothing. When the executor
fails, every sequence gets one `Failed`, later ones get it at once, and `on_failure` is called in
the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

from ds4_common.errors import ExecutorFailure
from ds4_worker.engine.api import EngineState, Event, Failed, Generation, Output
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.sequence import Sequence
from ds4_worker.engine.stats import EngineStats

ENGINE_FAILED = Failed(500, "the engine failed; this worker is ending", "engine_failure")


class _WarmUp:
    """A message to the engine thread."""


class LoopStream:
    """The events of one request's sequences, delivered in the event loop's thread."""

    __slots__ = ("_engine", "_events", "_open", "_waiter", "sequences")

    def __init__(self, engine: Engine, sequences: list[Sequence]) -> None:
        self._engine = engine
        self.sequences = sequences
        self._open = len(sequences)
        self._events: list[tuple[int, Event]] = []
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, index: int, event: Event) -> None:
        self._events.append((index, event))
        if not isinstance(event, Output):
            self._open -= 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self) -> None:
        for index in range(len(self.sequences)):
            self.deliver(index, ENGINE_FAILED)

    async def take(self) -> list[tuple[int, Event]]:
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        if self._open > 0:
            self._open = 0
            self._engine.cancel(self)


class Engine:
    """Handle for the event loop's side; every method but `_run` is called in the loop's thread."""

    def __init__(
        self,
        core: EngineCore,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._loop = loop
        self._on_failure = on_failure
        # A stream to start, a stream to cancel, a wish to warm up, or None to leave.
        self._inbox: SimpleQueue[tuple[LoopStream, bool] | _WarmUp | None] = SimpleQueue()
        # Where the events of a sequence go; used by the engine thread only.
        self._routes: dict[Sequence, tuple[LoopStream, int]] = {}
        self._state: EngineState = "ok"
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    def start(self) -> None:
        self._thread.start()

    def warm(self) -> None:
        """Runs a token for nobody, unless somebody has asked for one by then: reading weights for
        the first time takes longer than a step."""
        self._inbox.put(_WarmUp())

    def submit(self, generations: Iterable[Generation]) -> LoopStream:
        """Queues sequences. After a failure their stream holds one `Failed` each, nothing else."""
        stream = LoopStream(self, [self._core.sequence(item) for item in generations])
        if self._state == "failed":
            stream.fail()
        else:
            self._inbox.put((stream, True))
        return stream

    def cancel(self, stream: LoopStream) -> None:
        self._inbox.put((stream, False))

    def stop(self) -> None:
        """Cancels everything, ends the thread and closes the executor. Blocks for one step."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        failure: BaseException | None = RuntimeError("the engine thread ended unexpectedly")
        try:
            self._serve()
            failure = None
        except ExecutorFailure as error:
            failure = error
        finally:
            # Also on the way out of a programming error, which threading.excepthook then reports.
            self._post(self._core.fail_all(ENGINE_FAILED), failure)
            self._core.close()

    def _serve(self) -> None:
        core, inbox = self._core, self._inbox
        busy = False
        while True:
            try:
                message = inbox.get(block=not busy)
            except Empty:
                events = core.step()
                busy = events is not None
                if events:
                    self._post(events, None)
                continue
            if message is None:
                return
            if isinstance(message, _WarmUp):
                if inbox.empty() and not core.stats.submitted:
                    core.warm()
                continue
            stream, start = message
            for index, sequence in enumerate(stream.sequences):
                if start:
                    self._start(stream, index, sequence)
                elif self._routes.pop(sequence, None) is not None:
                    core.cancel(sequence)
            busy = True

    def _start(self, stream: LoopStream, index: int, sequence: Sequence) -> None:
        self._routes[sequence] = (stream, index)
        try:
            self._core.submit(sequence)
        except ValueError as error:  # it could never run: nobody else has to suffer for it
            self._core.stats.rejected += 1
            self._post([(sequence, Failed(503, str(error), "admission_rejected"))], None)

    def _post(self, events: list[tuple[Sequence, Event]], failure: BaseException | None) -> None:
        routes = self._routes
        batch: list[tuple[LoopStream, int, Event]] = []
        for sequence, event in events:
            stream, index = routes[sequence]
            if not isinstance(event, Output):
                del routes[sequence]
            batch.append((stream, index, event))
        self._loop.call_soon_threadsafe(self._deliver, batch, failure)

    def _deliver(
        self, batch: list[tuple[LoopStream, int, Event]], failure: BaseException | None
    ) -> None:
        for stream, index, event in batch:
            stream.deliver(index, event)
        if failure is not None:
            self._state = "failed"
            self._fail_late_arrivals()
            self._on_failure(failure)

    def _fail_late_arrivals(self) -> None:
        """Streams that were queued while the engine was failing: nobody else will answer them."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(message, tuple) and message[1]:
                message[0].fail()
