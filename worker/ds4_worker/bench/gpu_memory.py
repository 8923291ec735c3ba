"""What a device's memory does: the rate of plain copies, and attaching to ranges of it.

Owns: the reference that every other figure of `ds4-bench gpu` is a share of, and the timing of
descriptors received, imported and mapped read-only, in the steps of a worker. The ranges are of
another process, which makes them without a context, as an owner does, and leaves them unwritten.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ds4_common import fdpass
from ds4_common.cuda.device import Context, Device, probe
from ds4_common.cuda.memory import Allocation, DeviceBuffer, PinnedBuffer, granularity
from ds4_common.cuda.ranges import FETCHED_TOGETHER, map_records
from ds4_common.cuda.stream import Event, Stream
from ds4_common.errors import Ds4Error
from ds4_common.protocol import AllocationRecord
from ds4_worker.bench.processes import python_environment
from ds4_worker.bench.report import Row, summarise

RANGE_BYTES = 1 << 30  # --span-mb of an owner, as it is by default
SPARED = 0.05  # of the device's free memory: the driver needs some, and so does the context
KEPT_BYTES = 12 << 30  # of memory that is the system's too: below that a machine begins to swap


# ---- copies --------------------------------------------------------------------------------------


def timed(stream: Stream, runs: int, work: Callable[[], None]) -> list[float]:
    """Seconds of the device for each run, after one that does not count."""
    start, end = Event(timing=True), Event(timing=True)
    found = []
    try:
        for _ in range(runs + 1):
            stream.record(start)
            work()
            stream.record(end)
            end.synchronize()
            found.append(end.milliseconds_since(start) / 1e3)
    finally:
        start.close()
        end.close()
    if min(found) <= 0:
        raise Ds4Error("the device's events tell no time; give larger buffers: --gpu-mb")
    return found[1:]


def copies(n_bytes: int, runs: int) -> list[Row]:
    """Device to device, counting bytes read and written; host to device out of pinned memory."""
    with (
        Stream() as stream,
        DeviceBuffer(n_bytes, "source") as source,
        DeviceBuffer(n_bytes, "target") as target,
    ):
        stream.fill(source.address, 1, n_bytes)
        inside = timed(stream, runs, lambda: stream.copy(target.address, source.address, n_bytes))
        with PinnedBuffer(n_bytes, "stage") as stage:
            stage.view[::4096] = bytes(len(range(0, n_bytes, 4096)))  # every page is there
            up = timed(stream, runs, lambda: stream.upload(target.address, stage.address, n_bytes))
    size = f"{n_bytes >> 20} MiB"
    return [
        summarise(
            f"copy on the device, read + written, {size}", "GB/s",
            [2 * n_bytes / s / 1e9 for s in inside],
        ),
        summarise(f"copy host to device, pinned, {size}", "GB/s", [n_bytes / s / 1e9 for s in up]),
    ]  # fmt: skip


# ---- attach --------------------------------------------------------------------------------------


def attach(context: Context, sizes_gb: Sequence[float], runs: int) -> list[Row]:
    """A row per size that the device has memory for; the others are told on stderr."""
    rows = []
    usable = usable_bytes(context.device.integrated, context.memory_info()[0], _available())
    for size in sizes_gb:
        wanted = _spread(context.device, int(size * 1e9))
        if sum(wanted) > usable:
            print(
                f"attach to {size:g} GB: left out, {usable / 1e9:.1f} GB of the device are free",
                file=sys.stderr,
            )
            continue
        with _maker(context.device, wanted) as maker:
            samples = [_attach(maker, context, wanted) for _ in range(runs)]
        rows.append(
            summarise(
                f"attach to {size:g} GB in {len(wanted)} ranges", "ms", samples,
                goal="<= 200" if size <= 100 else "",
            )
        )  # fmt: skip
    return rows


def usable_bytes(integrated: bool, free: int, available: int) -> int:
    """How much can be taken for a while. `free`: by the driver's word; `available`: MemAvailable,
    which alone counts where the device has no memory of its own."""
    return max(0, available - KEPT_BYTES) if integrated else int(free * (1 - SPARED))


def _available() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _spread(device: Device, n_bytes: int) -> list[int]:
    """Sizes of ranges: as many whole ones as there are, and the rest."""
    unit = granularity(device)
    whole, rest = divmod(n_bytes, RANGE_BYTES)
    return [RANGE_BYTES] * whole + ([-(-rest // unit) * unit] if rest else [])


def _attach(maker: socket.socket, context: Context, sizes: Sequence[int]) -> float:
    """Milliseconds from the first request to the last range that is mapped."""
    records = [
        AllocationRecord(
            id=number, model="base", model_bytes=sum(sizes), source_offset=0, source_bytes=size,
            n_bytes=size, alloc_bytes=size, hash128="",
        )
        for number, size in enumerate(sizes)
    ]  # fmt: skip

    def fetch(ids: Sequence[int]) -> list[tuple[AllocationRecord, int]]:
        maker.send(json.dumps(list(ids)).encode())
        _, fds = fdpass.receive(maker)
        if len(fds) != len(ids):
            fdpass.close_all(fds)
            raise Ds4Error(f"attach: {len(fds)} descriptors came, expected {len(ids)}")
        return [(records[number], fd) for number, fd in zip(ids, fds, strict=True)]

    started = time.perf_counter()
    ranges = map_records(records, fetch, context)
    taken = (time.perf_counter() - started) * 1e3
    ranges.close()
    return taken


@contextmanager
def _maker(device: Device, sizes: Sequence[int]) -> Iterator[socket.socket]:
    """The other process, at the end of a socket: takes numbers of ranges, gives descriptors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", "-m", __name__, str(device.ordinal), str(theirs.fileno())]
    with ours, theirs:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=python_environment(),
        )  # fmt: skip
        theirs.close()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(list(sizes)))
            process.stdin.close()
            if not ours.recv(16):
                assert process.stderr is not None
                raise Ds4Error(f"attach: no ranges were made: {process.stderr.read().strip()}")
            yield ours
        finally:
            ours.close()  # which ends it
            process.wait(60)
            assert process.stderr is not None
            process.stderr.close()


def _make(ordinal: int, sock: socket.socket, sizes: Sequence[int]) -> None:
    device = probe(ordinal)
    made = [Allocation.create(device, size, f"range {n}") for n, size in enumerate(sizes)]
    sock.send(b"ready")
    while request := sock.recv(FETCHED_TOGETHER * 16):
        fds = [made[number].export_fd() for number in json.loads(request)]
        fdpass.send(sock, b"ranges", fds)
        fdpass.close_all(fds)
    for allocation in made:
        allocation.close()


def main() -> int:
    ordinal, fd = (int(word) for word in sys.argv[1:])
    try:
        with socket.socket(fileno=fd) as sock:
            _make(ordinal, sock, json.load(sys.stdin))
    except Ds4Error as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
