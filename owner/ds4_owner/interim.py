"""Who serves while the next program of a reexec starts: the one before, in a forked child.

Python needs a tenth of a second to start, and more on a busy machine. Meanwhile the child goes on
with everything the broker has: it answers, grants leases, makes listening sockets. When the next
program is there it asks the child for the state, which comes with the descriptors of all that is
new; only then do requests wait, for milliseconds.

Owns the child from its fork to its end, and what the two say to each other. The child never
outlives the handover: it ends when it has given everything away, or when nobody is left to ask.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import msgspec

from ds4_common import fdpass
from ds4_common.errors import Ds4Error, HandoverError
from ds4_owner import state
from ds4_owner.broker import Broker
from ds4_owner.progress import log
from ds4_owner.state import State, Traffic

TAKE_SECONDS = 5.0  # for the child to give everything away
_TAKE = b"take"
_RETRY_SECONDS = 0.005  # after the kernel had too many descriptors in flight


class Handed(Protocol):
    """What is handed over."""

    broker: Broker

    def record(self, traffic: Traffic | None = None) -> State: ...


@dataclass(frozen=True, slots=True)
class Interim:
    """The child, for the program that forked it. `record`: what the next program gets without it.
    Descriptors: `front` leads to the child; `starts` keeps it waiting for execve() or our death."""

    pid: int
    front: int
    starts: int
    record: State

    def cancel(self) -> None:
        """There was no execve(): the program that forked goes on itself."""
        _end(self.pid)
        os.close(self.front)
        os.close(self.starts)


def fork(owner: Handed, paused_at: float) -> Interim:
    """Forks the child of a paused broker. Raises OSError."""
    traffic = owner.broker.traffic(paused_at)
    bare = owner.record(msgspec.structs.replace(traffic, connections=[]))
    fixed = {fd: _identity(fd) for fd in state.descriptors(bare)}
    front, back = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waits, starts = os.pipe2(os.O_CLOEXEC)
    with front, back:
        try:
            pid = os.fork()
            if not pid:
                front.close()
                os.close(starts)
                _be_the_child(owner, back, waits, fixed, paused_at)
        except OSError:
            os.close(starts)
            raise
        finally:
            os.close(waits)
        kept = bare.traffic
        assert kept is not None
        kept = msgspec.structs.replace(kept, interim_fd=front.detach(), interim_pid=pid)
    return Interim(pid, kept.interim_fd, starts, msgspec.structs.replace(bare, traffic=kept))


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# In the child


def _be_the_child(
    owner: Handed,
    back: socket.socket,
    waits: int,
    fixed: dict[int, tuple[int, int]],
    paused_at: float,
) -> NoReturn:
    """Serves, gives everything away, and ends. Signals are blocked; a stop is passed on."""
    try:
        if os.read(waits, 1) == b"":  # the other end went with execve()
            waited = time.monotonic() - paused_at
            stops: list[bool] = []
            broker = owner.broker
            broker.on_stop = lambda: stops.append(True)
            broker.on_reexec = None
            broker.serve_until(back.fileno())
            now = time.monotonic()
            if back.recv(len(_TAKE)) == _TAKE:
                traffic = broker.traffic(now - waited)
                record = owner.record(msgspec.structs.replace(traffic, stop=bool(stops)))
                _give(back, record, fixed)
    finally:
        if (error := sys.exc_info()[1]) is not None:
            traceback.print_exception(error)
        os._exit(0)  # whatever happened: the next program sees the end of the socket


def _give(back: socket.socket, record: State, fixed: dict[int, tuple[int, int]]) -> None:
    """The record, and every descriptor that the next program has not inherited."""
    needed = dict.fromkeys(state.descriptors(record))
    new = [fd for fd in needed if fixed.get(fd) != _identity(fd)]
    fd = state.write(record)
    _send(back, msgspec.json.encode(new), [fd])
    for first in range(0, len(new), fdpass.MAX_FDS):
        _send(back, b"+", new[first : first + fdpass.MAX_FDS])


def _send(back: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    give_up = time.monotonic() + TAKE_SECONDS
    while True:
        try:
            fdpass.send(back, data, fds)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > give_up:
                raise
        time.sleep(_RETRY_SECONDS)


# In the next program


def take(record: State, traffic: Traffic) -> State:
    """The state as it is now, from the child, which ends. Without an answer from it the owner goes
    on with what it inherited: clients find a broker that does not know them, and register again."""
    if traffic.interim_fd < 0:  # a program that did not fork one
        return record
    inherited = state.descriptors(record)
    try:
        with socket.socket(fileno=traffic.interim_fd) as front:
            front.settimeout(TAKE_SECONDS)
            front.send(_TAKE)
            taken = _receive(front)
    except (OSError, msgspec.DecodeError, Ds4Error) as error:
        log(f"reexec: connections are lost, who served meanwhile does not answer: {error}")
        taken = record
    finally:
        _end(traffic.interim_pid)
    for fd in set(inherited) - set(state.descriptors(taken)) - {traffic.interim_fd}:
        os.close(fd)
    return taken


def _receive(front: socket.socket) -> State:
    data, (fd,) = _packet(front, 1)
    record = state.read(fd)
    os.close(fd)
    new = msgspec.json.decode(data, type=list[int])
    got: list[int] = []
    while len(got) < len(new):
        got += _packet(front, min(len(new) - len(got), fdpass.MAX_FDS))[1]
    return state.renumbered(record, dict(zip(new, got, strict=True)))


def _packet(front: socket.socket, count: int) -> tuple[bytes, list[int]]:
    data, fds = fdpass.receive(front)
    if len(fds) != count:
        fdpass.close_all(fds)
        raise HandoverError(f"{len(fds)} descriptors came, expected {count}")
    return data, fds
