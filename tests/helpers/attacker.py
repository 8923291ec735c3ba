"""Clients that misbehave, as their own processes, against the owner of a manifest.

`python -S helpers/attacker.py KIND MANIFEST [COUNT]` says `armed` once the harm is done, then keeps
what it holds until it is killed, or says `dropped` when the owner has closed all of it. Written
against the sockets alone: nothing of the product softens what these clients do.
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

HELLO = b'{"type":"hello","version":1,"role":"worker","name":"attacker","command":"attacker"}'
GET_ALL = b'{"type":"get_allocations"}'
MAX_BYTES, MAX_FDS = 131072, 250
GONE = (BrokenPipeError, ConnectionResetError)


def native(manifest: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(manifest + ".ctl")
    return sock


def line(manifest: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(manifest + ".sock")
    return sock


def greeted(manifest: str) -> socket.socket:
    sock = native(manifest)
    sock.send(HELLO)
    sock.recv(MAX_BYTES)
    return sock


# Each takes the manifest and a count, and returns what it keeps open.


def silent(manifest: str, count: int) -> list[socket.socket]:
    """Opens and never speaks."""
    return [connect(manifest) for _ in range(count) for connect in (native, line)]


def half(manifest: str, count: int) -> list[socket.socket]:
    """Says half a line, and greets without reading the answer."""
    socks = silent(manifest, count)
    for sock in socks:
        with suppress(*GONE):
            sock.send(HELLO if sock.type == socket.SOCK_SEQPACKET else b"GET 0")
    return socks


def flood(manifest: str, count: int) -> list[socket.socket]:
    """`count` connections; a twentieth asks for everything and reads nothing."""
    socks = silent(manifest, count // 2)
    for sock in socks[: count // 20]:
        with suppress(*GONE):
            sock.send(HELLO if sock.type == socket.SOCK_SEQPACKET else b"GET 0\n")
            sock.send(GET_ALL)
    return socks


def crowd(manifest: str, count: int) -> list[socket.socket]:
    """Takes every lease there is."""
    return [greeted(manifest) for _ in range(count)]


def stall(manifest: str, count: int) -> list[socket.socket]:
    """Asks for everything until no more requests are taken, and never reads."""
    socks = [greeted(manifest) for _ in range(count)]
    for sock in socks:
        sock.setblocking(False)
        with suppress(BlockingIOError, *GONE):
            while True:
                sock.send(GET_ALL)
    return socks


def slow(manifest: str, count: int) -> list[socket.socket]:
    """Has many answers due and reads one packet, or one byte, of them."""
    socks = [*stall(manifest, count), *(line(manifest) for _ in range(count))]
    for sock in socks:
        with suppress(*GONE):
            if sock.type == socket.SOCK_STREAM:
                sock.send(b"GET 0\n")
            sock.setblocking(True)
            sock.recv(1)
    return socks


def garbage(manifest: str, count: int) -> list[socket.socket]:
    """Random bytes of random length on both sockets, and descriptors nobody asked for."""
    chance = random.Random(count)
    for _ in range(count):
        for connect in (native, greeted, line):
            with connect(manifest) as sock, suppress(*GONE):
                fds = [0] * chance.randrange(3)
                socket.send_fds(sock, [chance.randbytes(chance.randrange(4000)) + b"\n"], fds)
                sock.recv(MAX_BYTES)
    return []


def dying(manifest: str, count: int) -> list[socket.socket]:
    """`count` processes, each killed at the next step of attaching."""
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                die_attaching(manifest, number % 5)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
    return []


def die_attaching(manifest: str, step: int) -> None:
    """Returns, to be killed: connected; greeted; before the reply; holding descriptors; mapped."""
    with suppress(*GONE):
        sock = native(manifest) if step == 0 else greeted(manifest)
        if step >= 2:
            sock.send(GET_ALL)
        if step >= 3:
            _, fds, _, _ = socket.recv_fds(sock, MAX_BYTES, MAX_FDS)
            if step == 4:
                mmap.mmap(fds[0], 0, mmap.MAP_SHARED, mmap.PROT_READ)
    os.kill(os.getpid(), signal.SIGKILL)


KINDS: dict[str, Callable[[str, int], list[socket.socket]]] = {
    f.__name__: f for f in (silent, half, flood, crowd, stall, slow, garbage, dying)
}


def all_dropped(socks: list[socket.socket]) -> None:
    """Returns when the owner has hung up on each of them, whatever it said before."""
    poll = select.poll()
    for sock in socks:
        poll.register(sock, 0)  # a hang-up is always reported
    waiting = len(socks)
    while waiting:
        for fd, _ in poll.poll():
            poll.unregister(fd)
            waiting -= 1


def main() -> None:
    kind, manifest = sys.argv[1:3]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept = KINDS[kind](manifest, count)
    print("armed", flush=True)
    all_dropped(kept)
    print("dropped", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
