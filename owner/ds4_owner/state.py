"""What an owner is, written down for the program that comes after it in the same place.

Owns the record (`State`), its versions, and its form: JSON in a sealed memfd. It serves two ways
on: `reexec`, where all descriptors stay open under their numbers and `traffic` says what they are,
and the service manager's descriptor store, where they come back by name and there is no traffic.
Refuses, as HandoverError, what is not sealed, too large, malformed or of another version.

Unknown fields are skipped and new ones have defaults, so programs of one `STATE_VERSION` read each
other's records in both directions. Raise it when the meaning of a field changes - or when the
layouts of the memory itself do.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from ds4_common import protocol
from ds4_common.errors import HandoverError
from ds4_common.protocol import (
    AllocationRecord,
    BlobRecord,
    DeviceRecord,
    ListenerRecord,
    ModelRecord,
)

STATE_VERSION = 2
_READABLE = (1, STATE_VERSION)  # 1: all connections were inherited
MAX_STATE_BYTES = 64 << 20
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

LoadValue: TypeAlias = str | int | bool | list[str] | None  # of config.load_key
Key: TypeAlias = int | str  # an allocation by id, a blob by name
Desk: TypeAlias = Literal["native", "line", "metrics"]


class Piece(Struct, frozen=True):
    """One piece of memory and what proves that a descriptor is it (proof.py, device_proof.py).
    `seals` is -1 for memory that cannot be sealed; `uuid` is of the device that has the memory."""

    key: Key
    label: str
    n_bytes: int
    device: int
    inode: int
    seals: int
    sample: str
    fd: int = -1  # where the memory is open (reexec only)
    uuid: str = ""


class Node(Struct, frozen=True):
    """A listening socket. Of a Unix one also its node in the file system."""

    fd: int
    path: str = ""
    device: int = 0
    inode: int = 0


class HeldListener(Struct, frozen=True):
    """A listening socket that workers got. `asked_port` 0: any free port, by name. `seat`: the
    descriptors of its seat (seats.py), if it has one."""

    record: ListenerRecord
    asked_port: int
    node: Node
    seat: list[int] = []


class Kept(Struct, frozen=True):
    """What a desk knows of a connection: the part of a request that came (line, metrics), or its
    place in the book (native). `asks`: it waits for the end of the reexec."""

    text: bytes = b""
    phase: str = ""
    since: float = 0.0
    hello: protocol.Hello | None = None
    asks: bool = False


class Connection(Struct, frozen=True):
    """An open connection. Times are CLOCK_MONOTONIC, which does not care who reads it."""

    fd: int
    desk: Desk
    kept: Kept
    deadline: float | None = None
    sending_deadline: float | None = None
    retry_at: float | None = None
    leaving: bool = False
    outbox: list[tuple[bytes, list[int]]] = []


class Traffic(Struct, frozen=True):
    """What goes on at the sockets; requests wait since `at`. `interim_fd` leads to the process that
    serves meanwhile and has the rest (interim.py). `stop`: somebody asked for one."""

    at: float
    started: float
    control: Node
    line: Node
    metrics_fd: int = -1
    line_requests: int = 0
    native_requests: int = 0
    identity_refusals: int = 0
    connections: list[Connection] = []  # oldest first
    interim_fd: int = -1
    interim_pid: int = 0
    stop: bool = False


class State(Struct, frozen=True):
    """A ready owner. `arguments` are its flags, which the next program parses by its own rules;
    `load` is what decides the bytes."""

    version: int
    owner_id: str
    arguments: list[str]
    load: dict[str, LoadValue]
    backend: str
    allocations: list[AllocationRecord]
    models: list[ModelRecord]
    blobs: list[BlobRecord]
    memory: list[Piece]
    listeners: list[HeldListener] = []
    lock_fd: int = -1
    stored: list[str] = []  # names in the service manager's store
    generation: int = 0  # of the record there
    traffic: Traffic | None = None
    device: DeviceRecord | None = None


class _Version(Struct):
    version: int


def descriptors(state: State) -> list[int]:
    """Every descriptor that the next program needs, under the numbers they have."""
    fds = [piece.fd for piece in state.memory]
    fds += [held.node.fd for held in state.listeners]
    fds += [fd for held in state.listeners for fd in held.seat]
    fds.append(state.lock_fd)
    if state.traffic is not None:
        traffic = state.traffic
        fds += [traffic.control.fd, traffic.line.fd, traffic.metrics_fd, traffic.interim_fd]
        fds += [connection.fd for connection in traffic.connections]
    return [fd for fd in fds if fd >= 0]


def renumbered(state: State, numbers: Mapping[int, int]) -> State:
    """The same with other numbers of listeners, seats and connections, where they changed."""
    replace = msgspec.structs.replace

    def new(fd: int) -> int:
        return numbers.get(fd, fd)

    listeners = [
        replace(held, node=replace(held.node, fd=new(held.node.fd)), seat=[*map(new, held.seat)])
        for held in state.listeners
    ]
    traffic = state.traffic
    if traffic is not None:
        connections = [
            replace(
                connection,
                fd=new(connection.fd),
                outbox=[(data, [*map(new, fds)]) for data, fds in connection.outbox],
            )
            for connection in traffic.connections
        ]
        traffic = replace(traffic, connections=connections)
    return replace(state, listeners=listeners, traffic=traffic)


def write(state: State) -> int:
    """A sealed memfd with the record, close-on-exec. Raises HandoverError."""
    data = msgspec.json.encode(state)
    if len(data) > MAX_STATE_BYTES:
        raise HandoverError(f"the owner's state has {len(data)} bytes, at most {MAX_STATE_BYTES}")
    fd = -1
    try:
        fd = os.memfd_create("ds4-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], done)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise HandoverError(f"cannot write the owner's state: {error.strerror}") from error
    return fd


def read(fd: int) -> State:
    """The record in a memfd, which stays open. Raises HandoverError."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise HandoverError("the owner's state is not sealed: it could have been changed")
        n_bytes = os.fstat(fd).st_size
        if n_bytes > MAX_STATE_BYTES:
            raise HandoverError(f"the owner's state has {n_bytes} bytes, at most {MAX_STATE_BYTES}")
        data = os.pread(fd, n_bytes, 0)
    except OSError as error:
        raise HandoverError(f"cannot read the owner's state: {error.strerror}") from error
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version not in _READABLE:
            raise HandoverError(
                f"the owner's state has version {version}, this program reads {STATE_VERSION};"
                " stop the owner and start it again"
            )
        return msgspec.json.decode(data, type=State)
    except msgspec.DecodeError as error:
        raise HandoverError(f"the owner's state is malformed: {error}") from error
