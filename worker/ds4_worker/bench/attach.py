"""Attach: from connect to every range mapped, tokenizer and program image ready.

Owns: timing what a worker does between its first line of code and its engine, without importing
or allocating anything else; alone, and many processes at once. KV memory is the engine's and is not
part of it.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ds4_common import client, protocol
from ds4_common.contract.frontend import parse_frontend
from ds4_common.contract.image import load_image, read_header
from ds4_common.errors import Ds4Error
from ds4_common.mapping import Mapping
from ds4_common.paths import control_socket_path
from ds4_common.tokenizer.encoder import Tokenizer
from ds4_worker.bench.report import Row, summarise
from ds4_worker.loading import BLOBS


def _attach(manifest: Path) -> tuple[float, list[Mapping]]:
    """Milliseconds of one attach, and what it mapped."""
    start = time.perf_counter()
    with client.connect(str(manifest), role="worker", wait_seconds=0) as connection:
        blobs = connection.map_blobs(BLOBS)
        parse_frontend(blobs["frontend"].view)
        Tokenizer(blobs["tokenizer"].view)
        image, _ = load_image(blobs["image.cpu"].view, blobs["contract"].view)
        weights = connection.map_allocations(read_header(image).allocations)
        taken = (time.perf_counter() - start) * 1e3
    return taken, [*weights.values(), *blobs.values()]


def _attach_and_leave(manifest: Path) -> float:
    taken, mappings = _attach(manifest)
    for mapping in mappings:
        mapping.close()
    return taken


def measure(manifest: Path, runs: int, label: str = "") -> list[Row]:
    """One process alone, `runs` times."""
    samples = [_attach_and_leave(manifest) for _ in range(runs)]
    return [summarise(f"attach{label}", "ms", samples, goal="<= 10")]


def measure_many(manifest: Path, runs: int, clients: int) -> list[Row]:
    """`clients` processes that attach at the same moment, with and without a client that takes no
    answer. Both kinds of round alternate, either first in turn, so that what else the machine does
    meets both."""
    _attach_and_leave(manifest)  # loads the native library once, before the processes are made
    calm: list[list[float]] = []
    stalled: list[list[float]] = []
    for number in range(2 * runs):
        if number % 2:
            calm.append(_at_once(manifest, clients))
        with _stalled_client(manifest):
            stalled.append(_at_once(manifest, clients))
        if not number % 2:
            calm.append(_at_once(manifest, clients))
    typical = [statistics.median(round_) for round_ in calm]
    return [
        summarise(f"attach, {clients} at once, median", "ms", typical),
        summarise(f"attach, {clients} at once, slowest", "ms", _slowest(calm), goal="<= 50"),
        summarise(
            f"attach, {clients} at once beside a stalled client, median", "ms",
            [statistics.median(round_) for round_ in stalled],
            reference=statistics.median(typical), reference_name="without", goal="<= 1.05",
        ),
        summarise(
            f"attach, {clients} at once beside a stalled client, slowest", "ms",
            _slowest(stalled), goal="<= 50",
        ),
    ]  # fmt: skip


def _slowest(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [max(round_) for round_ in rounds]


def _at_once(manifest: Path, clients: int) -> list[float]:
    """Milliseconds of each of `clients` processes, which begin when all of them are there and stay,
    as workers do, until all are done."""
    start, go = os.pipe()
    arrived, arrive = os.pipe()
    results, report = os.pipe()
    end, leave = os.pipe()
    pids = []
    for _ in range(clients):
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            os.close(go)
            os.close(leave)
            os.write(arrive, b".")
            os.read(start, 1)  # ends when the parent closes its side
            taken, _mappings = _attach(manifest)
            os.write(report, struct.pack("d", taken))
            os.close(report)
            os.read(end, 1)
        finally:
            os._exit(0)
    for fd in (start, arrive, report, end):
        os.close(fd)
    with open(arrived, "rb") as waiting, open(results, "rb") as reports:
        waiting.read(clients)
        os.close(go)
        data = reports.read()
    os.close(leave)
    for pid in pids:
        os.waitpid(pid, 0)
    times = [value for (value,) in struct.iter_unpack("d", data)]
    if len(times) != clients:
        raise Ds4Error(f"attach: {clients - len(times)} of {clients} processes could not attach")
    return times


@contextmanager
def _stalled_client(manifest: Path) -> Iterator[None]:
    """A client with a lease that asks until nothing more is taken, and reads no answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(control_socket_path(str(manifest)))
        hello = protocol.Hello(protocol.PROTOCOL_VERSION, "worker", "stalled", "ds4-bench")
        sock.send(protocol.encode(hello))
        sock.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                sock.send(protocol.encode(protocol.GetAllocations()))
        yield
