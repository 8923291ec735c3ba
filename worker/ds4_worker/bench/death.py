"""How soon the death of a process with a lot of mapped memory is seen by others.

Owns: a process that maps and touches memory in pages of 4 KiB and holds a lock, and the two ways of
noticing its end: the robust lock, and the end of its socket, which the kernel closes only after the
address space is torn down. As a program (`python -m ds4_worker.bench.death FDS GIGABYTES`) this
module is that process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import sys
import time

from ds4_common.errors import Ds4Error
from ds4_common.mapping import map_read_only
from ds4_common.protocol import SEAT_LANES
from ds4_common.seat import SERVING, Seat
from ds4_worker.bench import processes
from ds4_worker.bench.report import Row, summarise

_PAGE_BYTES = mmap.PAGESIZE


def seat_fds() -> list[int]:
    """The descriptors of a seat, as an owner makes them."""
    fds = [os.memfd_create("ds4-bench-seat", os.MFD_ALLOW_SEALING), os.eventfd(0)]
    for _ in range(SEAT_LANES):
        fds += [end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    return fds


def measure(gigabytes: float, runs: int) -> list[Row]:
    n_bytes = round(gigabytes * (1 << 30))
    memory = os.memfd_create("ds4-bench-weights")
    fds = seat_fds()
    by_lock, by_socket = [], []
    try:
        os.ftruncate(memory, n_bytes)
        seat = Seat(fds)
        for _ in range(runs):
            lock_ms, socket_ms = _one_death(seat, [*fds, memory], n_bytes)
            by_lock.append(lock_ms)
            by_socket.append(socket_ms)
        seat.close()
    finally:
        os.close(memory)
    label = f"death seen, {gigabytes:g} GB mapped"
    return [
        summarise(f"{label}, by the lock", "ms", by_lock, goal="<= 5"),
        summarise(f"{label}, by the socket", "ms", by_socket),
    ]


def _one_death(seat: Seat, fds: list[int], n_bytes: int) -> tuple[float, float]:
    ours, theirs = socket.socketpair()
    with ours:
        passed = [*fds, theirs.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, ",".join(map(str, passed)), str(n_bytes)],
            pass_fds=passed,
            env=processes.python_environment(),
        )
        theirs.close()
        if ours.recv(5) != b"ready":
            raise Ds4Error("death: the process to be killed did not get ready")
        killed = time.perf_counter()
        process.kill()
        seat.lock(SERVING, None)
        by_lock = time.perf_counter()
        ended = ours.recv(1) == b""
        by_socket = time.perf_counter()
        seat.unlock(SERVING)
        process.wait()
    if not ended:
        raise Ds4Error("death: the killed process spoke")
    return (by_lock - killed) * 1e3, (by_socket - killed) * 1e3


def main() -> None:
    *seat, memory, parent = map(int, sys.argv[1].split(","))
    n_bytes = int(sys.argv[2])
    held = Seat(seat)
    (mapping,) = map_read_only([(memory, n_bytes, n_bytes)])
    page = (ctypes.c_char * 1).from_address
    for offset in range(0, n_bytes, 16 * _PAGE_BYTES):  # the kernel maps 16 around each
        page(mapping.address + offset).raw  # noqa: B018
    held.lock(SERVING, None)
    with socket.socket(fileno=parent) as speaker:
        speaker.sendall(b"ready")
        speaker.recv(1)


if __name__ == "__main__":
    main()
