"""The client side of an owner: connect, map, take a listening socket.

Owns: the connection, which is the lease: keep it open for as long as the memory is used. Mappings
outlive it, so a worker goes on serving when its owner dies. Refuses memory that could still
change, sizes that disagree with the descriptor, replies that do not fit the request. On the
start-up path of every worker: imports only what the first mapping needs.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import TypeVar

from ds4_common import fdpass, mapping, paths, protocol
from ds4_common.closing import Closing
from ds4_common.errors import (
    AddressError,
    AddressInUse,
    BackendError,
    Ds4Error,
    HandoverError,
    IdentityError,
    OwnerUnavailable,
    ProtocolError,
)
from ds4_common.mapping import Mapping
from ds4_common.protocol import AllocationRecord, BlobRecord, Reply, Request, Role, Welcome

DEADLINE_SECONDS = 10.0
REEXEC_SECONDS = 90.0  # the owner tries the next program first
_MEMORY_ROLES = ("worker", "standby", "reader", "inspect")
_RETRY_SECONDS = 0.02  # between attempts to reach an owner that has not bound its socket yet
_R = TypeVar("_R", bound=Reply)

_ERRORS: dict[str, type[Ds4Error]] = {
    "identity": IdentityError,
    "address_in_use": AddressInUse,
    "address": AddressError,
    "loading": OwnerUnavailable,
    "failed": OwnerUnavailable,
    "busy": OwnerUnavailable,
    "forbidden": OwnerUnavailable,
    "handover": HandoverError,
}


class OwnerConnection(Closing):
    """An open lease. Not for several threads at once. A context manager that closes the lease."""

    def __init__(self, sock: socket.socket, manifest_path: str, welcome: Welcome) -> None:
        self._sock = sock
        self.manifest_path = manifest_path
        self.welcome = welcome

    def fileno(self) -> int:
        """For an event loop: readable without a request in flight means that the owner is gone."""
        return self._sock.fileno()

    def close(self) -> None:
        """Ends the lease. Mappings and listening sockets stay."""
        self._sock.close()

    @property
    def owner_pid(self) -> int:
        """The owner's pid as the kernel knows it here, not as the owner says."""
        return fdpass.peer(self._sock)[0]

    def owner_alive(self) -> bool:
        """Whether the owner still holds its end. False from the moment its process is torn down."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def wait_ready(self, seconds: float) -> Welcome:
        """Waits at most `seconds` for loading to end; returns the newest welcome in any state.

        Raises IdentityError when a model file changed meanwhile."""
        self._set_deadline(seconds + DEADLINE_SECONDS)
        self.welcome = self._ask(protocol.WaitReady(seconds), Welcome)
        self._set_deadline(DEADLINE_SECONDS)
        return self.welcome

    def describe_allocations(self) -> list[AllocationRecord]:
        """The records of all allocations, without their descriptors."""
        return [record for record, _ in self._fetch(None, with_fds=False)]

    def fetch_allocations(
        self, ids: Sequence[int] | None = None
    ) -> list[tuple[AllocationRecord, int]]:
        """Records with descriptors that the caller owns: of `ids`, in that order, or of all."""
        return self._fetch(ids, with_fds=True)

    def map_allocations(self, ids: Sequence[int] | None = None) -> dict[int, Mapping]:
        """Maps allocations (None: all) read-only; id -> mapping of `n_bytes`.

        Raises BackendError when the memory is a device's (`cuda.ranges` maps that), when a
        descriptor is not sealed, is not the memory that the record declares, or cannot be mapped;
        nothing stays mapped then."""
        if self.welcome.device is not None:
            raise BackendError(
                f"owner of {self.manifest_path} holds its weights on {self.welcome.device.name},"
                " not in host memory"
            )
        fetched = self.fetch_allocations(ids)
        try:
            for record, fd in fetched:
                what = f"allocation {record.id}"
                self._check_memory(fd, record.alloc_bytes, what)
                mapping.check_object(fd, record.device, record.inode, what)
            mapped = mapping.map_read_only([(fd, r.n_bytes, r.alloc_bytes) for r, fd in fetched])
        finally:
            fdpass.close_all(fd for _, fd in fetched)
        return {record.id: m for (record, _), m in zip(fetched, mapped, strict=True)}

    def map_blobs(self, names: Sequence[str]) -> dict[str, Mapping]:
        """Maps blobs read-only; name -> mapping. ProtocolError for a name the owner lacks."""
        records, fds = self.fetch_blobs(names)
        try:
            for record, fd in zip(records, fds, strict=True):
                self._check_memory(fd, record.n_bytes, f"blob {record.name}")
            sizes = [(fd, r.n_bytes, r.n_bytes) for r, fd in zip(records, fds, strict=True)]
            mapped = mapping.map_read_only(sizes)
        finally:
            fdpass.close_all(fds)
        return dict(zip(names, mapped, strict=True))

    def fetch_blobs(self, names: Sequence[str]) -> tuple[list[BlobRecord], list[int]]:
        """Records of blobs with descriptors that the caller owns. ProtocolError for a name the
        owner lacks."""
        reply, fds = self._exchange(protocol.GetBlobs(list(names)))
        try:
            records = _expect(reply, protocol.Blobs).records
            if [r.name for r in records] != list(names) or len(fds) != len(names):
                raise ProtocolError(f"asked for blobs {names}, got {records}, {len(fds)} fds")
        except Ds4Error:
            fdpass.close_all(fds)
            raise
        return records, fds

    def blob(self, name: str) -> Mapping:
        return self.map_blobs([name])[name]

    def blob_record(self, name: str) -> BlobRecord | None:
        """What the owner said about a blob, or None when it has none of that name."""
        return next((b for b in self.welcome.blobs if b.name == name), None)

    def listener(self, host: str, port: int, name: str = "") -> socket.socket:
        """The owner's listening TCP socket for an address, non-blocking. Created at the first
        request, kept by the owner when we die. Port 0: any free one, the same for the same `name`.

        Raises AddressInUse when another program has the address, AddressError when nobody can."""
        return self._take(protocol.GetListener(host=_numeric(host, port), port=port, name=name))[0]

    def unix_listener(self, path: str, name: str = "") -> socket.socket:
        """The same for a Unix socket at `path`."""
        return self._take(protocol.GetListener(path=os.path.abspath(path), name=name))[0]

    def listener_and_seat(
        self, host: str, port: int, name: str = "", *, path: str = ""
    ) -> tuple[socket.socket, list[int]]:
        """As `listener`, or `unix_listener` where there is a `path`, with the descriptors of its
        seat (`ds4_common.seat`), which the caller owns."""
        if path:
            path = os.path.abspath(path)
            return self._take(protocol.GetListener(path=path, name=name, seat=True))
        host = _numeric(host, port)
        return self._take(protocol.GetListener(host=host, port=port, name=name, seat=True))

    def status(self) -> protocol.Status:
        return self._ask(protocol.GetStatus(), protocol.Status)

    def request_stop(self, *, unless_used: bool = False) -> None:
        """Asks the owner to stop. Returns when it has begun to. Raises OwnerUnavailable when it
        goes on, `unless_used`, for another process that holds a lease."""
        self._ask(protocol.Stop(unless_used), protocol.Stopping)

    def request_reexec(self) -> float:
        """Asks the owner to replace its program by the one that is installed now. Returns how many
        seconds requests waited. Raises HandoverError when the old program goes on."""
        self._set_deadline(REEXEC_SECONDS)
        reply = self._ask(protocol.Reexec(), protocol.Reexeced)
        self._set_deadline(DEADLINE_SECONDS)
        return reply.seconds

    def accept_files(self, files: Sequence[protocol.FileRecord]) -> int:
        """Tells the owner that these shards were touched only; returns how many it renewed. Raises
        IdentityError when one is not what it was when it was read."""
        return self._ask(protocol.AcceptFiles(list(files)), protocol.Accepted).count

    def _take(self, request: protocol.GetListener) -> tuple[socket.socket, list[int]]:
        reply, fds = self._exchange(request)
        try:
            _expect(reply, protocol.Listener)
            expected = 1 + (2 + 2 * protocol.SEAT_LANES if request.seat else 0)
            if len(fds) != expected:
                raise ProtocolError(f"listener: {len(fds)} descriptors, expected {expected}")
        except Ds4Error:
            fdpass.close_all(fds)
            raise
        listener = socket.socket(fileno=fds[0])
        listener.setblocking(False)
        return listener, fds[1:]

    def _fetch(
        self, ids: Sequence[int] | None, *, with_fds: bool
    ) -> list[tuple[AllocationRecord, int]]:
        wanted = None if ids is None else list(ids)
        fetched: list[tuple[AllocationRecord, int]] = []
        fds: list[int] = []
        try:
            self._send(protocol.GetAllocations(wanted, with_fds))
            while True:
                reply, fds = self._receive()
                page = _expect(reply, protocol.Allocations)
                if len(fds) != (len(page.records) if with_fds else 0):
                    raise ProtocolError(f"{len(page.records)} allocations, {len(fds)} descriptors")
                page_fds = fds if with_fds else [-1] * len(page.records)
                fetched += zip(page.records, page_fds, strict=True)
                fds = []
                if not page.remaining:
                    break
                if not page.records:
                    raise ProtocolError(f"no allocation in a page, {page.remaining} remaining")
            if wanted is not None and [r.id for r, _ in fetched] != wanted:
                raise ProtocolError(f"asked for allocations {wanted}, got others")
        except (Ds4Error, OSError):
            fdpass.close_all(fds + [fd for _, fd in fetched if fd >= 0])
            raise
        return fetched

    def _check_memory(self, fd: int, n_bytes: int, what: str) -> None:
        mapping.check_size(fd, n_bytes, what)
        if self.welcome.backend != "shm":  # of vmm, only blobs come here
            mapping.check_sealed(fd, what)

    def _set_deadline(self, seconds: float) -> None:
        set_timeouts(self._sock, seconds)

    def _ask(self, request: Request, kind: type[_R]) -> _R:
        reply, fds = self._exchange(request)
        fdpass.close_all(fds)
        return _expect(reply, kind)

    def _exchange(self, request: Request) -> tuple[Reply, list[int]]:
        self._send(request)
        return self._receive()

    def _send(self, request: Request) -> None:
        send_request(self._sock, request, self.manifest_path)

    def _receive(self) -> tuple[Reply, list[int]]:
        return receive_reply(self._sock, self.manifest_path)


def connect(
    manifest_path: str,
    role: Role = "worker",
    name: str = "",
    wait_seconds: float | None = 0.0,
    *,
    appear_seconds: float = 0.0,
) -> OwnerConnection:
    """Opens a lease at the owner of a manifest.

    `wait_seconds`: how long to wait for an owner that is still loading; None: return at once in any
    state (`welcome.state`). `appear_seconds`: how long to keep trying while nobody listens.
    Raises OwnerUnavailable (nobody there, still loading, loading failed), IdentityError (a model
    file changed since it was loaded), ProtocolError."""
    sock = _reach(manifest_path, appear_seconds)
    try:
        command = " ".join(sys.orig_argv)[: protocol.MAX_COMMAND_CHARS]
        command = command.encode("utf-8", "replace").decode()
        hello = protocol.Hello(protocol.PROTOCOL_VERSION, role, name, command)
        send_request(sock, hello, manifest_path)
        reply, fds = receive_reply(sock, manifest_path)
        fdpass.close_all(fds)
        connection = OwnerConnection(sock, manifest_path, _expect(reply, Welcome))
        if role in _MEMORY_ROLES and wait_seconds is not None:
            _require_ready(connection, wait_seconds)
    except (Ds4Error, OSError):
        sock.close()
        raise
    return connection


def _require_ready(connection: OwnerConnection, wait_seconds: float) -> None:
    welcome = connection.welcome
    if welcome.state == "loading" and wait_seconds > 0:
        welcome = connection.wait_ready(wait_seconds)
    if welcome.state == "failed":
        raise OwnerUnavailable(
            f"owner of {connection.manifest_path} failed to load: {welcome.reason}"
        )
    if welcome.state == "loading":
        progress = welcome.progress
        raise OwnerUnavailable(
            f"owner of {connection.manifest_path} is still loading ({progress.phase}, "
            f"{progress.done_bytes} of {progress.total_bytes} bytes); try again when it is ready"
        )


def _reach(manifest_path: str, appear_seconds: float) -> socket.socket:
    """A connected control socket with deadlines set."""
    path = paths.control_socket_path(manifest_path)
    paths.check_socket_path(path, "manifest")
    give_up = time.monotonic() + appear_seconds
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            set_timeouts(sock, DEADLINE_SECONDS)
            sock.connect(path)
            return sock
        except OSError as error:
            sock.close()
            if time.monotonic() >= give_up:
                from ds4_common import silence  # only now: a start that works never needs it

                raise OwnerUnavailable(silence.explain_silence(manifest_path, error)) from error
        time.sleep(_RETRY_SECONDS)


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Deadlines kept by the kernel: connect and send, and receive, fail with EAGAIN after them."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send_request(sock: socket.socket, request: Request, where: str) -> None:
    try:
        fdpass.send(sock, protocol.encode(request))
    except (BrokenPipeError, ConnectionResetError):
        return  # the owner hung up; its last word is still to be read
    except OSError as error:
        raise OwnerUnavailable(f"owner of {where} does not take requests: {error}") from error


def receive_reply(sock: socket.socket, where: str) -> tuple[Reply, list[int]]:
    """One reply and its descriptors, which the caller owns. An `error` reply is raised."""
    try:
        try:
            data, fds = fdpass.receive(sock)
        except ConnectionResetError:
            # The owner closed with a request of ours unread. The kernel reports that first and
            # then gives what the owner had said.
            data, fds = fdpass.receive(sock)
    except BlockingIOError as error:
        raise OwnerUnavailable(f"owner of {where} does not answer in time") from error
    except OSError as error:
        raise OwnerUnavailable(f"owner of {where} is gone: {error}") from error
    if not data:
        raise OwnerUnavailable(f"owner of {where} closed the connection")
    try:
        reply = protocol.decode_reply(data)
        if isinstance(reply, protocol.Error):
            raise _ERRORS.get(reply.code, ProtocolError)(reply.message)
    except Ds4Error:
        fdpass.close_all(fds)
        raise
    return reply, fds


def _expect(reply: Reply, kind: type[_R]) -> _R:
    if not isinstance(reply, kind):
        raise ProtocolError(f"owner answered {type(reply).__name__}, expected {kind.__name__}")
    return reply


def _numeric(host: str, port: int) -> str:
    """The numeric address of `host`. Resolved here: the owner must never wait for a name server."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)  # getaddrinfo would load the idna codec, for nothing
            return host
        except OSError:
            continue
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise AddressError(f"listen address {host}: {error.strerror}") from error
    return str(found[0][4][0])
