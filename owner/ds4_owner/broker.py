"""The owner's two sockets.

Owns: `<manifest>.ctl` (native protocol, from the first moment, so that a worker can see loading go
on) and the published line socket (once there is something to hand out), the thread that serves
them, what is known of the owner's state, and handing all of it to the next program. Bytes move in
`transport`, what is said is the business of the desks. Refuses a manifest path that another owner
or another file has.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ds4_common import protocol
from ds4_common.errors import AddressError, HandoverError, UsageError
from ds4_common.paths import check_socket_path, control_socket_path, line_socket_path
from ds4_common.protocol import Error, LeaseRecord, Progress
from ds4_owner.answers import Offer, OwnerFacts
from ds4_owner.claim import BoundSocket, bind_unix, remove_dead_socket, remove_stale_manifest
from ds4_owner.line_desk import LineDesk
from ds4_owner.native_desk import NativeDesk
from ds4_owner.state import Desk, HeldListener, Traffic
from ds4_owner.transport import Handler, Transport

if TYPE_CHECKING:
    from ds4_owner.metrics import Observed

_T = TypeVar("_T")
BACKLOG = 512


class Broker:
    """Serves one owner. Methods are for the supervisor's thread; the callbacks are called in the
    broker's, when a client asks (or, `on_stop`, when the broker breaks), and must only set a flag.
    """

    def __init__(
        self,
        manifest_path: str,
        backend: str,
        owner_id: str,
        *,
        log: Callable[[str], None],
        on_stop: Callable[[], None],
        on_reexec: Callable[[], None] | None = None,
        on_change: Callable[[], None] = lambda: None,
        line_socket: str | None = None,
        metrics_port: int | None = None,
    ) -> None:
        """`on_change`: what the next program must know has changed."""
        self.manifest_path = manifest_path
        self.line_path = line_socket or line_socket_path(manifest_path)
        self.facts = OwnerFacts(backend=backend, owner_id=owner_id)
        self.log, self.on_stop = log, on_stop
        self.on_reexec, self.on_change = on_reexec, on_change
        self._metrics_port = metrics_port  # None: off
        self._bound: list[BoundSocket | socket.socket] = []
        self._stopping = False

    @property
    def line_requests(self) -> int:
        """Allocations handed out by the line protocol so far."""
        return self._line.requests

    @property
    def lives(self) -> bool:
        """Whether its loop runs: it ends by itself for a defect only."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Claims both sockets and the manifest path, and answers natively from now on.

        Raises AddressInUse when another owner serves them, AddressError or UsageError when they
        cannot be used."""
        check_socket_path(self.line_path, "--broker-socket")
        control_path = control_socket_path(self.manifest_path)
        control = bind_unix(control_path, socket.SOCK_SEQPACKET, BACKLOG)
        try:
            remove_dead_socket(self.line_path, socket.SOCK_STREAM)
            remove_stale_manifest(self.manifest_path, self.log)
            scraped = self._listen_for_scrapes()
        except (AddressError, UsageError):
            control.close()
            raise
        self._open(control)
        if scraped is not None:
            self._serve_metrics(scraped)
            host, port = scraped.getsockname()
            self.log(f"metrics http://{host}:{port}/metrics")
        self._start_thread()

    def _open(self, control: BoundSocket) -> None:
        self._bound.append(control)
        self._transport = Transport(self.log)
        self._native = NativeDesk(self, self._transport)
        self._line = LineDesk(self, self._transport)
        self._transport.listen(control.sock, self._native)

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)
        # The thread inherits the mask: a signal that the kernel gave to it would not wake the main
        # thread, which alone runs Python's handlers. (It does so after SIGSTOP and SIGCONT.)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _listen_for_scrapes(self) -> socket.socket | None:
        if self._metrics_port is None:
            return None
        from ds4_owner import metrics

        return metrics.listen(self._metrics_port)

    def _serve_metrics(self, sock: socket.socket) -> None:
        from ds4_owner import metrics  # only here: the next program of a reexec is in a hurry

        self._bound.append(sock)
        self._metrics = metrics.MetricsDesk(self._transport, self._observe)
        self._transport.listen(sock, self._metrics)

    def _observe(self) -> Observed:
        from ds4_owner.metrics import Observed

        native, now = self._native, time.monotonic()
        return Observed(
            self.facts, native.book.leases(now), len(native.book), self.line_requests,
            native.requests, native.identity_refusals, now - native.started,
        )  # fmt: skip

    def set_progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        progress = Progress(phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)
        self.facts = replace(self.facts, progress=progress)

    def ready(self, offer: Offer) -> None:
        """Hands out from now on, on both sockets. Descriptors stay the caller's and must live until
        `stop` has returned. Raises AddressError when the line socket cannot be bound."""
        line = bind_unix(self.line_path, socket.SOCK_STREAM, BACKLOG)
        self._bound.append(line)
        self.facts = replace(self.facts, state="ready", offer=offer)
        self._transport.call(lambda: self._transport.listen(line.sock, self._line))
        self._transport.call(self._native.loading_ended)
        self.log(f"broker listening {self.line_path}")

    def failed(self, reason: str) -> None:
        """Tells everybody who waits, and whoever asks later, that loading failed."""
        self.facts = replace(self.facts, state="failed", reason=reason)
        self._transport.call(self._native.loading_ended)

    def leases(self) -> list[LeaseRecord]:
        return self._native.book.leases(time.monotonic())

    def stop(self) -> None:
        """Ends all connections, removes both sockets, joins the thread."""
        if not self._stopping:
            self.pause()
            for bound in self._bound:
                bound.close()
            self._transport.close()
            self._native.listeners.close()
            self._transport.release()

    def _run(self) -> None:
        try:
            self._transport.run()
        finally:
            if not self._stopping:  # a defect: an owner that nobody can reach must not stay
                self.on_stop()

    # The next program (docs/operations.md, "Upgrading the owner")

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` in the broker's thread, soon."""
        self._transport.call(function)

    def ask(self, question: Callable[[], _T]) -> _T:
        """The answer of a function that runs in the broker's thread. Raises HandoverError when that
        thread has ended."""
        answer: list[_T] = []
        done = threading.Event()

        def run() -> None:
            answer.append(question())
            done.set()

        self._transport.call(run)
        while not done.wait(1.0):
            if not self._thread.is_alive():
                raise HandoverError("the owner's broker has ended")
        return answer[0]

    def pause(self) -> None:
        """Stops the loop between two turns. Everything stays open; whoever comes, waits."""
        self._stopping = True
        self._transport.stop()
        self._thread.join()

    def serve_until(self, fd: int) -> None:
        """After `pause`: serves in this thread, until a descriptor is readable."""
        self._transport.again()
        self._transport.when_readable(fd, self._transport.stop)
        self._transport.run()

    def go_on(self) -> None:
        """After `pause`."""
        self._transport.again()
        self._stopping = False
        self._start_thread()

    def traffic(self, at: float) -> Traffic:
        """What goes on since `at`. Paused, or in the broker's thread (`ask`)."""
        nodes = [bound.node() for bound in self._bound if isinstance(bound, BoundSocket)]
        others = [bound.fileno() for bound in self._bound if isinstance(bound, socket.socket)]
        return Traffic(
            at=at,
            started=self._native.started,
            control=nodes[0],
            line=nodes[1],
            metrics_fd=others[0] if others else -1,
            line_requests=self._line.requests,
            native_requests=self._native.requests,
            identity_refusals=self._native.identity_refusals,
            connections=self._transport.connections(),
        )

    def listeners(self) -> list[HeldListener]:
        """Likewise."""
        return self._native.listeners.held()

    def take_listeners(self, held: Sequence[HeldListener]) -> None:
        """Goes on with listening sockets of an owner that is gone."""

        def take() -> None:
            for listener in held:
                self._native.listeners.take(listener)

        self.ask(take)

    def resume(self, traffic: Traffic, listeners: Sequence[HeldListener], offer: Offer) -> None:
        """In place of `start` and `ready`: goes on where the program before stopped."""
        self._open(BoundSocket.of(traffic.control))
        line = BoundSocket.of(traffic.line)
        self._bound.append(line)
        self._transport.listen(line.sock, self._line)
        desks: dict[Desk, Handler] = {"native": self._native, "line": self._line}
        if traffic.metrics_fd >= 0:
            self._serve_metrics(socket.socket(fileno=traffic.metrics_fd))
            desks["metrics"] = self._metrics
        self._native.started = traffic.started
        self._native.requests = traffic.native_requests
        self._native.identity_refusals = traffic.identity_refusals
        self._line.requests = traffic.line_requests
        self.facts = replace(self.facts, state="ready", offer=offer)
        for listener in listeners:
            self._native.listeners.take(listener)
        for connection in traffic.connections:
            self._transport.adopt(connection, desks[connection.desk])
        self._start_thread()

    def begin_reexec(self) -> None:
        """Says that a reexec begins: whoever asks from now on means the next one. Raises
        HandoverError when the broker has ended."""
        self.ask(self._native.begin_reexec)

    def answer_reexec(self, reply: protocol.Reexeced | Error) -> None:
        """Tells the operator who asked for the reexec how it ended, if somebody did."""
        self._transport.call(lambda: self._native.answer_reexec(reply))
