"""The service manager's descriptor store: what keeps the memory while no owner lives.

Owns: what is stored and under which names (`Store`), and what a start makes of the descriptors that
it is given (`take`, `adopt`). Stored are allocations, blobs, the listening sockets of workers with
their seats, and the owner's record (state.py), as `ds4.memory.<id or name>`, `ds4.listener.<hash>`,
`ds4.seat.<hash>.<number>` and `ds4.state.<generation>`. Not stored: the broker's own sockets, so
that an owner answers if and only if it lives. Protocol: sd_notify(3), sd_listen_fds(3).

Refuses, as HandoverError, to adopt anything unless the record is whole, the settings that decide
the bytes are the same, the model files on disk are those that were loaded, and every piece of
memory is proven (proof.py): then a normal load follows. Foreign descriptors are closed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from ds4_common.errors import HandoverError
from ds4_owner import answers, proof, state
from ds4_owner.backends import Memory
from ds4_owner.lending import Descriptor, lent
from ds4_owner.notify import barrier, notify
from ds4_owner.progress import log
from ds4_owner.state import HeldListener, Key, LoadValue, State

PREFIX = "ds4."
FIRST_FD = 3
_STATE_PREFIX = f"{PREFIX}state."


def memory_name(key: Key) -> str:
    return f"{PREFIX}memory.{key}"


def listener_name(held: HeldListener) -> str:
    return f"{PREFIX}listener.{_hash(held)}"


def seat_names(held: HeldListener) -> list[str]:
    return [f"{PREFIX}seat.{_hash(held)}.{number}" for number in range(len(held.seat))]


def _hash(held: HeldListener) -> str:
    """An address may hold characters that a name may not."""
    record = held.record
    words = (record.host, record.port, record.path, record.name)
    return xxhash.xxh3_64_hexdigest(repr(words).encode())


@dataclass(slots=True)
class Store:
    """What the manager keeps for this owner. Nothing without a manager."""

    names: set[str] = field(default_factory=set)
    generation: int = 0
    _last: bytes = b""

    @property
    def manager(self) -> bool:
        return bool(os.environ.get("NOTIFY_SOCKET"))

    def update(self, record: State, memory: Mapping[Key, Memory]) -> None:
        """Stores what is not stored yet, then a record that names it. A crash in between leaves the
        record before."""
        for piece in record.memory:
            self._keep(memory_name(piece.key), memory[piece.key].descriptor)
        for held in record.listeners:
            self._keep(listener_name(held), held.node.fd)
            for name, fd in zip(seat_names(held), held.seat, strict=True):
                self._keep(name, fd)
        stripped = _stripped(record)
        data = msgspec.json.encode(stripped)
        if data == self._last:
            return
        old = {name for name in self.names if name.startswith(_STATE_PREFIX)}
        self.generation += 1
        fd = state.write(msgspec.structs.replace(stripped, generation=self.generation))
        try:
            self._keep(f"{_STATE_PREFIX}{self.generation}", fd)
        finally:
            os.close(fd)
        self.remove(old)
        self._last = data
        self._warn()

    def _keep(self, name: str, descriptor: Descriptor) -> None:
        if name in self.names:
            return
        with lent([descriptor]) as fds:
            if notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fds):
                self.names.add(name)

    def _warn(self) -> None:
        limit = os.environ.get("FDSTORE", "")  # told by systemd 254 and later
        if limit.isdigit() and int(limit) < len(self.names) + 1:
            log(
                f"the service manager stores {limit} descriptors, {len(self.names) + 1} are needed:"
                " raise FileDescriptorStoreMax="
            )

    def remove(self, names: set[str]) -> None:
        for name in sorted(names):
            notify(f"FDSTOREREMOVE=1\nFDNAME={name}")
        self.names -= names

    def clear(self) -> None:
        """Removes everything, and waits until the manager has: then the memory is free."""
        if self.names:
            self.remove(set(self.names))
            barrier()


def _stripped(record: State) -> State:
    """Without what only this process knows."""
    return msgspec.structs.replace(
        record,
        memory=[msgspec.structs.replace(piece, fd=-1) for piece in record.memory],
        listeners=[
            msgspec.structs.replace(
                held, node=msgspec.structs.replace(held.node, fd=-1), seat=[-1] * len(held.seat)
            )
            for held in record.listeners
        ],
        lock_fd=-1, stored=[], generation=0, traffic=None,
    )  # fmt: skip


def take(environ: MutableMapping[str, str]) -> list[tuple[str, int]]:
    """(name, descriptor) of everything the manager passed to this process, close-on-exec."""
    count, names, pid = (environ.pop(f"LISTEN_{word}", "") for word in ("FDS", "FDNAMES", "PID"))
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    given = names.split(":")
    held = []
    for index in range(int(count)):
        fd = FIRST_FD + index
        os.set_inheritable(fd, False)
        held.append((given[index] if index < len(given) else "unknown", fd))
    return held


@dataclass(frozen=True, slots=True)
class Adopted:
    """What an owner that died left, proven."""

    record: State
    memory: Mapping[Key, Memory]
    listeners: Sequence[HeldListener]
    store: Store


def adopt(held: Sequence[tuple[str, int]], load: Mapping[str, LoadValue]) -> Adopted | None:
    """What can be taken over, or None, with one line about why not. Closes everything else."""
    if not held:
        return None
    named = dict(held)
    try:
        adopted = _adopt(named, load)
    except (HandoverError, OSError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else str(problem)
        log(f"not adopting what the service manager kept, loading: {reason}")
        adopted = None
    used: set[int] = set()
    names: set[str] = set()
    if adopted is not None:
        used = {m.export_fd for m in adopted.memory.values()}
        used |= {listener.node.fd for listener in adopted.listeners}
        used |= {fd for listener in adopted.listeners for fd in listener.seat}
        names = adopted.store.names
    foreign = [name for name, fd in held if fd not in used and not name.startswith(PREFIX)]
    if foreign:
        log(f"closing descriptors that are not the owner's: {', '.join(foreign[:8])}")
    for _, fd in held:
        if fd not in used:
            os.close(fd)
    stale = {name for name, _ in held if name.startswith(PREFIX)} - names
    if stale:
        Store(stale).clear()
    return adopted


def _adopt(named: Mapping[str, int], load: Mapping[str, LoadValue]) -> Adopted:
    record, state_name = _newest_record(named)
    differing = sorted(
        name for name in {*record.load, *load} if record.load.get(name) != load.get(name)
    )
    if differing:
        raise HandoverError(f"other settings than it was loaded with: {', '.join(differing)}")
    if changes := answers.changed_files(record.models):
        raise HandoverError(f"model files changed since they were loaded: {'; '.join(changes[:4])}")
    memory: dict[Key, Memory] = {}
    on_device: dict[Key, tuple[state.Piece, int]] = {}
    for piece in record.memory:
        fd = named.get(memory_name(piece.key))
        if fd is None:
            raise HandoverError(f"memory {piece.label} was not kept")
        if piece.uuid:
            on_device[piece.key] = (piece, fd)
        else:
            memory[piece.key] = proof.check(piece, fd)
    if on_device:
        memory |= _on_device(record, on_device)
    wanted = {*(a.id for a in record.allocations), *(b.name for b in record.blobs)}
    if wanted - memory.keys():
        raise HandoverError("the record names memory without a proof")
    listeners = [kept for held in record.listeners if (kept := _listener(held, named)) is not None]
    names = {memory_name(key) for key in memory} | {listener_name(held) for held in listeners}
    names |= {name for held in listeners for name in seat_names(held)}
    return Adopted(record, memory, listeners, Store({*names, state_name}, record.generation))


def _on_device(record: State, held: Mapping[Key, tuple[state.Piece, int]]) -> dict[Key, Memory]:
    from ds4_owner import device_proof

    sizes = {a.id: a.n_bytes for a in record.allocations}
    if record.device is None or held.keys() - sizes.keys():
        raise HandoverError("the record does not say what its device memory is")
    claims = [
        (device_proof.Claim(p.label, p.n_bytes, sizes[int(p.key)], p.sample), fd)
        for p, fd in held.values()
    ]
    device_proof.check(record.device, claims)
    return {
        key: Memory(piece.label, piece.n_bytes, -1, fd, uuid=piece.uuid, sample=piece.sample)
        for key, (piece, fd) in held.items()
    }


def _newest_record(named: Mapping[str, int]) -> tuple[State, str]:
    generations = sorted(
        (int(number), name)
        for name in named
        if name.startswith(_STATE_PREFIX) and (number := name.removeprefix(_STATE_PREFIX)).isdigit()
    )
    if not generations:
        raise HandoverError("there is no record of an owner")
    name = generations[-1][1]
    return state.read(named[name]), name


def _listener(held: HeldListener, named: Mapping[str, int]) -> HeldListener | None:
    """With its descriptor; None when it cannot be reached under its address any more."""
    fd = named.get(listener_name(held))
    node = held.node
    if fd is None:
        return None
    if node.path:
        try:
            there = os.lstat(node.path)
        except FileNotFoundError:
            return None
        if (there.st_dev, there.st_ino) != (node.device, node.inode):
            return None
    seat = [named.get(name, -1) for name in seat_names(held)]
    if -1 in seat:  # a seat is whole or it is made anew
        seat = []
    return msgspec.structs.replace(held, node=msgspec.structs.replace(node, fd=fd), seat=seat)
