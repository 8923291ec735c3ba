"""The next program of a reexec: rehearses it, or goes on where the last one stopped.

Owns what `resume` starts, with the owner's record in a descriptor. The program before serves on in
a child until this one has imported and made everything; attach requests wait from `interim.take`
to `Broker.resume`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from ds4_common.errors import Ds4Error, HandoverError
from ds4_common.paths import control_socket_path
from ds4_common.protocol import Reexeced
from ds4_owner import answers, cli, interim, serving, state
from ds4_owner.backends import Memory
from ds4_owner.broker import Broker
from ds4_owner.fdstore import Store
from ds4_owner.notify import notify
from ds4_owner.progress import log
from ds4_owner.resume import CHECKED, STATE_VARIABLE
from ds4_owner.state import State, Traffic
from ds4_owner.stop import Change, StopWatch


def refuse(handed: str) -> int:
    """Somebody else than an owner started this program."""
    log(f"{STATE_VARIABLE} is {handed!r}: this program is started by ds4-weight-server reexec")
    return HandoverError.exit_code


def run(fd: int, arguments: Sequence[str], *, rehearses: bool) -> int:
    """Returns the exit code of the owner whose record `fd` holds, or of the rehearsal."""
    try:
        if rehearses:
            return _rehearse(fd, arguments)
        record = state.read(fd)
        os.close(fd)
        return _go_on(record, arguments)
    except Ds4Error as error:
        log(str(error))
        return error.exit_code


def _traffic(record: State) -> Traffic:
    if record.traffic is None:
        raise HandoverError("the owner's state names no sockets")
    return record.traffic


def _rehearse(fd: int, arguments: Sequence[str]) -> int:
    """As `_go_on`, as far as that is possible without the descriptors."""
    from ds4_owner import supervisor
    from ds4_owner.leases import Phase

    record = state.read(fd)
    traffic = _traffic(record)
    cli.parse(arguments, os.environ)
    answers.offer_of(record, {piece.key: piece.fd for piece in record.memory})
    for connection in traffic.connections:
        if connection.kept.phase:
            Phase(connection.kept.phase)
    if traffic.metrics_fd >= 0:
        from ds4_owner import metrics

        del metrics
    del supervisor  # imported for nothing but to see that it can be
    print(CHECKED, flush=True)
    return 0


def _go_on(inherited: State, arguments: Sequence[str]) -> int:
    traffic = _traffic(inherited)
    with ExitStack() as cleanup:
        watch = StopWatch()
        cleanup.callback(watch.close)
        change = Change()
        cleanup.callback(change.close)
        for fd in state.descriptors(inherited):
            os.set_inheritable(fd, False)
        manifest = traffic.control.path.removesuffix(control_socket_path(""))
        broker = Broker(
            manifest, inherited.backend, inherited.owner_id,
            log=log, on_stop=watch.request, on_reexec=watch.request_reexec,
            on_change=change.raise_it, line_socket=traffic.line.path,
        )  # fmt: skip
        record = interim.take(inherited, traffic)
        traffic = _traffic(record)
        offer = answers.offer_of(record, {piece.key: piece.fd for piece in record.memory})
        broker.resume(traffic, record.listeners, offer)
        seconds = time.monotonic() - traffic.at
        broker.answer_reexec(Reexeced(round(seconds, 6)))
        log(
            f"reexec: took over {len(record.allocations)} allocations, {len(record.listeners)}"
            f" listening sockets and {len(traffic.connections)} connections;"
            f" requests waited {1000 * seconds:.0f} ms, python {sys.version.split()[0]}"
        )
        if traffic.stop:
            watch.request()
        _serve(record, broker, watch, change, manifest, arguments, cleanup)
    return 0


def _serve(
    record: State, broker: Broker, watch: StopWatch, change: Change, manifest: str,
    arguments: Sequence[str], cleanup: ExitStack,
) -> None:  # fmt: skip
    if record.lock_fd >= 0:
        cleanup.callback(os.close, record.lock_fd)
    memory = {
        p.key: Memory(p.label, p.n_bytes, -1, p.fd, uuid=p.uuid, sample=p.sample)
        for p in record.memory
    }
    for piece in memory.values():
        cleanup.callback(piece.close)
    cleanup.callback(broker.stop)
    cleanup.callback(serving.remove_manifest, manifest)
    watch.follow(cli.parse(arguments, os.environ).exit_on_parent_pid)
    watch.can_reexec = True
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    serving.watch_dog(watch, broker)
    owner = serving.Owner(
        tuple(arguments), record.load, broker, memory, record.lock_fd, change,
        Store(set(record.stored), record.generation), list(record.memory),
    )  # fmt: skip
    notify("READY=1")
    owner.keep()
    serving.serve(owner, watch)
