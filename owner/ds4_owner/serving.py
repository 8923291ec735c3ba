"""A ready owner, from READY=1 to its end.

Owns what such an owner holds (`Owner`), the record of it for the next program, and the loop in
which it sleeps: for a stop, a reexec, a change that the service manager's store must learn of, or
the end of the loader, which only relieves the page cache by then.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ds4_common import paths
from ds4_common.errors import HandoverError
from ds4_owner import answers, handover, proof, state
from ds4_owner.backends import Memory
from ds4_owner.broker import Broker
from ds4_owner.fdstore import Store
from ds4_owner.lending import Lender
from ds4_owner.notify import monotonic_usec, notify, watchdog_seconds
from ds4_owner.progress import log
from ds4_owner.state import Key, LoadValue, State
from ds4_owner.stop import Change, Stopped, StopWatch

if TYPE_CHECKING:
    from ds4_owner.child import LoaderChild


@dataclass(slots=True)
class Owner:
    """All that a ready owner holds. `pieces` prove its memory."""

    arguments: tuple[str, ...]
    load: Mapping[str, LoadValue]  # what decides the bytes (config.load_key)
    broker: Broker
    memory: Mapping[Key, Memory]
    lock_fd: int  # -1: no lock
    change: Change
    store: Store = field(default_factory=Store)
    pieces: list[state.Piece] = field(default_factory=list)

    def prove(self, checked: Sequence[state.Piece] = ()) -> None:
        """Takes the proofs of all memory that is handed out. Once, when it is sealed. `checked`:
        those that adopted memory was just compared with."""
        proofs = {piece.key: piece for piece in checked}
        for key, memory in self.memory.items():
            if memory.closed:
                continue
            known = proofs.get(key)
            self.pieces.append(
                proof.capture(key, memory)
                if known is None
                else msgspec.structs.replace(known, fd=memory.export_fd)
            )

    def hold(self) -> None:
        """Makes a descriptor of all device memory, for a program that inherits it."""
        for lender in self._lenders():
            lender.hold()

    def let_go(self) -> None:
        """That program does not come. While nothing is sent."""
        for lender in self._lenders():
            lender.let_go()

    def _lenders(self) -> list[Lender]:
        return [memory.lender for memory in self.memory.values() if memory.lender is not None]

    def record(self, traffic: state.Traffic | None = None) -> State:
        """For the next program. In the broker's thread (`Broker.ask`), or while it is paused."""
        facts = self.broker.facts
        offer = facts.offer
        return State(
            version=state.STATE_VERSION,
            owner_id=facts.owner_id,
            arguments=list(self.arguments),
            load=dict(self.load),
            backend=facts.backend,
            allocations=list(offer.allocations.values()),
            models=list(offer.models),
            blobs=[answers.blob_record(name, blob) for name, blob in offer.blobs.items()],
            memory=[self._piece(piece) for piece in self.pieces],
            listeners=self.broker.listeners(),
            lock_fd=self.lock_fd,
            stored=sorted(self.store.names),
            generation=self.store.generation,
            traffic=traffic,
            device=offer.device,
        )

    def _piece(self, piece: state.Piece) -> state.Piece:
        lender = self.memory[piece.key].lender
        return piece if lender is None else msgspec.structs.replace(piece, fd=lender.held_fd)

    def keep(self) -> None:
        """Brings the service manager's store up to date."""
        if self.store.manager:
            self.store.update(self.broker.ask(self.record), self.memory)


def remove_manifest(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_leavings(manifest: str) -> None:
    """Removes what the command that started a private owner left: its log, where this process ends
    as it should, and its lock, where it was interrupted. Nothing happens where the log of this
    process is another file."""
    if not paths.is_private_manifest(manifest):
        return
    path = paths.log_path(manifest)
    with suppress(OSError):  # there is none
        if os.path.samestat(os.stat(path), os.fstat(sys.stderr.fileno())):
            os.unlink(path)
            _remove_free_lock(paths.start_path(manifest))


def _remove_free_lock(path: str) -> None:
    with open(path, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # somebody starts an owner: it is theirs
        if os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
            os.unlink(path)


def serve(owner: Owner, watch: StopWatch, child: LoaderChild | None = None) -> None:
    """Sleeps until it is time to stop."""
    try:
        while True:
            loader = [] if child is None else [child.sock.fileno()]
            ready = watch.wait([watch.reexec_fd, owner.change.fd, *loader])
            if child is not None and ready != [owner.change.fd]:
                child.close()  # it only relieved the page cache any more
                child = None
            if owner.change.fd in ready:
                owner.change.lower()
                owner.keep()
            if watch.reexec_fd in ready:
                os.eventfd_read(watch.reexec_fd)
                _reexec(owner, watch)
    except Stopped:
        pass
    notify("STOPPING=1")
    owner.store.clear()
    log(f"shutting down broker_requests={owner.broker.line_requests}")
    if owner.broker.lives:
        remove_leavings(owner.broker.manifest_path)


def _reexec(owner: Owner, watch: StopWatch) -> None:
    """Returns when the old program goes on: the next one could not take over."""
    try:
        owner.broker.begin_reexec()
        handover.rehearse(owner, watch)
        notify(f"RELOADING=1\nMONOTONIC_USEC={monotonic_usec()}")
        handover.replace_program(owner)
    except HandoverError as error:
        log(f"reexec failed, this program goes on: {error}")
        owner.broker.answer_reexec(answers.error("handover", str(error)))
        notify("READY=1")


def watch_dog(watch: StopWatch, broker: Broker) -> None:
    """Serves the service manager's watchdog, if there is one. The owner says that it lives from the
    broker's loop, woken by the supervisor's: when either hangs, it is silent."""
    interval = watchdog_seconds(os.environ)
    if interval is not None:
        watch.beat_every(interval / 2, lambda: broker.call(_say_alive))


def _say_alive() -> None:
    notify("WATCHDOG=1", wait=False)
