"""The life of a server process: load, take the place, serve, make room, drain.

Owns: the event loop, signals, and the exit code. A first SIGTERM or SIGINT stops accepting (clients
wait in the owner's backlog for the next worker) and lets running streams finish within the drain
time. Only a later SIGINT - somebody at a terminal - ends the process at once: SIGTERM comes twice
from `timeout`, process groups and supervisors, which have SIGKILL for what they mean by more. A
worker that takes over has the effect of a first signal, and gets the clients that are left
(docs/restart.md).

    0    drained (or cut off after the drain time), as asked or because another worker took over
    1    could not start
    3    the engine failed while serving; start a new worker
    4x   the same, because a CUDA device failed (docs/gpu.md)
    130  stopped at once by a later SIGINT
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import uvloop

from ds4_common.client import OwnerConnection
from ds4_common.errors import Ds4Error, ExecutorFailure, OwnerUnavailable
from ds4_common.log import write_line
from ds4_common.protocol import Welcome
from ds4_common.seat import CLAIM, SERVING, Seat
from ds4_worker import address, loading, notify, place
from ds4_worker.config import ServerConfig
from ds4_worker.engine.thread import Engine
from ds4_worker.http.admission import Admission
from ds4_worker.http.app import App
from ds4_worker.http.parking import Parking
from ds4_worker.http.replay import CallMemory
from ds4_worker.http.server import HttpServer
from ds4_worker.http.service import Service, Weights
from ds4_worker.loading import LoadedModel, Phases
from ds4_worker.registration import Registration

EXIT_STOPPED_AT_ONCE = 130
_ECHO_SECONDS = 0.5  # a SIGINT so soon after a signal is the same one, sent on by a wrapper
# The engine thread waits for the interpreter lock at most this long while the loop computes; the
# default of 5 ms would be half a decode step.
_SWITCH_SECONDS = 0.0005
_REPORT_SECONDS = 5.0
_WARM_SECONDS = 0.25  # clients that have waited for this worker come first, and need no warming up


def log(text: str) -> None:
    write_line(f"ds4-server: {text}")


def run(
    config: ServerConfig,
    connection: OwnerConnection,
    phases: Phases,
    tell: Callable[[str], None],
) -> int:
    """Serves until told to stop; the exit code. `tell` hears "serving" and "yielded"."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    listener, seat_fds = connection.listener_and_seat(
        config.host, config.port, config.name, path=config.socket_path
    )
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    worker = Worker(config, connection, phases, loop, listener, Seat(seat_fds), tell)
    try:
        # The loop does not run yet: the main thread may block, and the locks are this thread's.
        worker.prepare()
        worker.take_place()
        return loop.run_until_complete(worker.serve())
    finally:
        loop.close()


class Worker:
    """One server process. Everything runs in the event loop's thread."""

    def __init__(
        self,
        config: ServerConfig,
        connection: OwnerConnection,
        phases: Phases,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        seat: Seat,
        tell: Callable[[str], None],
    ) -> None:
        self._config = config
        self._connection = connection
        self._phases = phases
        self._loop = loop
        self._listener = listener
        self._seat = seat
        self._tell = tell
        self._serving = False  # holds the seat
        self._address = address.url_of(listener)
        self._registration = Registration(connection, config.name, loop, log)
        self._app = App(
            api_key=config.api_key, cors=config.cors, pid=os.getpid(), owner=self._registration
        )
        self._server = HttpServer(self._app, self._report)
        self._engine: Engine | None = None
        self._signalled: float | None = None  # when it was told to stop, on the monotonic clock
        self._next_report = 0.0  # of an owner that is loading, on the monotonic clock
        self._stop: asyncio.Future[int] = loop.create_future()

    # --- the place --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Loads, if the owner has: a worker that takes over is ready first."""
        config = self._config
        if config.standby == "hot" and self._connection.welcome.state == "loading":
            self._wait_for_owner()
        if self._connection.welcome.state == "ready":
            self._install(loading.load(self._connection, config.engine, self._phases))

    def take_place(self) -> None:
        """Returns when this process is the one to accept connections."""
        if self._config.standby == "off":
            place.take(self._seat, self._address, takeover=self._config.takeover)
        else:
            if self._app.service is not None and self._app.service.model.template is not None:
                self._app.service.model.template.warm().join()
            log(f"standby for {self._address} pid={os.getpid()}")
            place.wait(self._seat)
            log(f"taking over {self._address} pid={os.getpid()}")
        self._serving = True
        self._tell("serving")
        self._phases.end("wait")

    async def serve(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._loop.add_reader(self._seat.bell, self._on_bell)
        parking = Parking(self._seat) if self._config.park else None
        # After loading: a client in the backlog is answered by a worker that is ready.
        await self._server.start(self._listener, parking)
        if self._app.service is not None:
            self._announce()
        else:
            log(f"listening {self._address}; the owner is still loading")
            # A daemon: a worker that is told to stop does not wait for the owner.
            threading.Thread(target=self._load_later, name="loading", daemon=True).start()
        try:
            return await self._stop
        finally:
            await self._drain()

    def _on_bell(self) -> None:
        """Somebody wants this place, or left clients behind."""
        self._seat.hear()
        if self._stop.done():
            return
        if self._seat.held(CLAIM):
            log("another worker takes over; finishing what runs")
            self._tell("yielded")
            self._end(0)
        else:
            self._server.look()

    def _make_room(self) -> None:
        """Lets the next worker accept."""
        self._loop.remove_reader(self._seat.bell)
        if self._serving:
            self._serving = False
            self._seat.unlock(SERVING)

    # --- loading ----------------------------------------------------------------------------

    def _load_later(self) -> None:
        """In a thread of its own: the only user of the connection meanwhile."""
        config = self._config
        outcome: LoadedModel | Ds4Error = OwnerUnavailable("loading ended unexpectedly")
        try:
            self._wait_for_owner()
            outcome = loading.load(self._connection, config.engine, self._phases)
        except Ds4Error as error:
            outcome = error
        finally:
            # Also on the way out of a programming error, which threading.excepthook then reports.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._loaded_later, outcome)

    def _wait_for_owner(self) -> None:
        loading.wait_until_ready(
            self._connection,
            self._config.model,
            check_fingerprint=self._config.check_fingerprint,
            progress=self._show_progress,
        )
        self._phases.end("owner")

    def _show_progress(self, welcome: Welcome) -> None:
        done, total = welcome.progress.done_bytes, welcome.progress.total_bytes
        percent = 100 * done // total if total else 0
        self._app.loading_detail = f"{welcome.progress.phase}, {percent} %"
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + _REPORT_SECONDS
            log(f"the owner is loading: {self._app.loading_detail}")

    def _loaded_later(self, outcome: LoadedModel | Ds4Error) -> None:
        if self._stop.done():
            return
        if isinstance(outcome, Ds4Error):
            self._stop.set_exception(outcome)
        else:
            self._install(outcome)
            self._announce()

    def _install(self, model: LoadedModel) -> None:
        config = self._config
        self._model = model  # its mappings must outlive the engine
        if config.standby == "hot":
            model.core.warm()
        self._engine = Engine(model.core, self._loop, self._engine_failed)
        self._engine.start()
        self._app.service = Service(
            model=loading.served_model(
                model,
                config.names,
                config.max_tokens,
                ignore_eos=config.ignore_eos,
                ignore_eos_in_reasoning=config.ignore_eos_in_reasoning,
            ),
            engine=self._engine,
            admission=Admission(config.engine.banks, config.max_queue),
            calls=CallMemory(config.tool_memory_ids),
            weights=Weights(len(model.weights), sum(w.n_bytes for w in model.weights)),
        )
        if model.relowered:
            log("the owner's image is of another build: lowered again from its contract")
        if model.undrafted:
            log("no drafts of next tokens: this model keeps state that cannot be taken back")

    def _announce(self) -> None:
        self._registration.start(renew=self._config.standby != "off")
        self._phases.end("listen")
        log(f"start-up ms: {self._phases}")
        service = self._app.service
        if service is None:
            return
        model = service.model
        log(
            f"ready {self._address} model={model.names[0]} ctx={model.context_tokens} "
            f"max-seqs={model.banks} pid={os.getpid()}"
        )
        notify.ready(log)
        if model.template is not None:
            model.template.warm()
        if self._engine is not None and self._config.standby != "hot":
            self._loop.call_later(_WARM_SECONDS, self._engine.warm)

    # --- the end ----------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._signalled is None:
            self._signalled = now
        elif number == signal.SIGINT and now - self._signalled >= _ECHO_SECONDS:
            log("stopped at once by a second Ctrl-C")
            os._exit(EXIT_STOPPED_AT_ONCE)
        self._end(0)

    def _engine_failed(self, error: BaseException) -> None:
        log(f"the engine failed: {error}")
        known = error if isinstance(error, ExecutorFailure) else ExecutorFailure
        self._end(known.exit_code)

    def _end(self, code: int) -> None:
        if not self._stop.done():
            self._stop.set_result(code)

    async def _drain(self) -> None:
        self._registration.stop()
        successor = place.succession(self._seat)
        self._server.stop_accepting(successor=successor)
        self._make_room()
        if self._signalled is not None and self._server.connections:
            log(f"stopping: at most {self._config.drain_seconds:g} s for running requests")
        if cut := await self._server.drain(self._config.drain_seconds, successor=successor):
            log(f"drain time is over: {cut} running requests were cut off")
        self._seat.ring()  # the next one looks for the clients that were left
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)

    def _report(self, error: BaseException) -> None:
        """An exception that no handler should let out: the request got a 500, we get the trace."""
        log("internal error\n" + "".join(traceback.format_exception(error)))
