"""A client of device memory as a process: `python -m helpers.device_client MANIFEST`.

Takes one command per line on stdin, answers with one line of JSON on stdout. An error is
{"error": class, "exit_code": N, "message": text}. Commands: `map` and `hash` (all ranges, read from
the device; `hash` needs no owner), `write` (to the first mapped range, which must fail), `scribble`
(through a mapping of one's own), `leave` (the lease, not the mapping), `attach` (all tensors by
name), `close`, `fork` (using the driver in a forked child), `swap` and `foreign` (maps with other
descriptors), `lie FIELD VALUE` (with a record that says otherwise).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

import ds4_common
from ds4_common import client, samples
from ds4_common.cuda.memory import Allocation, Mapping
from ds4_common.cuda.ranges import DeviceRanges, map_ranges
from ds4_common.cuda.reading import DeviceReader
from ds4_common.cuda.stream import Stream
from ds4_common.errors import Ds4Error
from ds4_common.protocol import AllocationRecord

Fetched = list[tuple[AllocationRecord, int]]


class Client:
    """What the commands work on."""

    def __init__(self, manifest: str) -> None:
        self.manifest = manifest
        self.ranges: DeviceRanges | None = None
        self.connection: client.OwnerConnection | None = None

    def map(self) -> Any:
        self.connection = client.connect(self.manifest, "worker", "device client")
        self.ranges = map_ranges(self.connection)
        return self.hash()

    def hash(self) -> Any:
        assert self.ranges is not None
        found = {}
        with DeviceReader(1 << 20) as reader:
            for i, held in self.ranges.ranges.items():
                state = xxhash.xxh3_128()
                for part in reader.stream(held.address, held.n_bytes):
                    state.update(part)
                found[i] = state.hexdigest()
        return found

    def write(self) -> Any:
        assert self.ranges is not None
        first = next(iter(self.ranges.ranges.values()))
        with Stream() as stream:
            stream.fill(first.address, 1, 16)
            stream.synchronize()
        return "written"

    def scribble(self, at: str = str(samples.SAMPLE_BYTES)) -> Any:
        """Maps the first allocation for writing, as nobody of ours does, and changes three bytes;
        by default where no sample sees them."""
        assert self.ranges is not None
        assert self.connection is not None
        (record, fd), *_ = self.connection.fetch_allocations([0])
        with Allocation.import_fd(fd, record.alloc_bytes, "scribble") as allocation:
            mapping = Mapping(allocation, self.ranges.context.device, writable=True)
        with mapping, Stream() as stream:
            stream.fill(mapping.address + int(at), 0xA5, 3)
            stream.synchronize()
        os.close(fd)
        return "written"

    def attach(self) -> Any:
        found = {}
        with ds4_common.attach(self.manifest) as model:
            for name, tensor in model.items():
                found[name] = {
                    "raw": xxhash.xxh3_128_hexdigest(tensor.raw()),
                    "layout": tensor.layout.name,
                    "device": list(tensor.__dlpack_device__()),
                }
        return found

    def close(self) -> Any:
        if self.ranges is not None:
            self.ranges.close()
        if self.connection is not None:
            self.connection.close()
        return "closed"

    def leave(self) -> Any:
        """Gives the lease up and keeps the mapping."""
        assert self.connection is not None
        self.connection.close()
        return "left"

    def fork(self) -> Any:
        child = os.fork()
        if not child:
            code = 0
            try:
                self.hash()
            except Ds4Error as error:
                code = error.exit_code
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def swap(self) -> Any:
        """Two allocations under each other's names."""

        def swapped(fetched: Fetched) -> Fetched:
            (one, a), (two, b), *rest = fetched
            return [(one, b), (two, a), *rest]

        return self._map_with(swapped)

    def foreign(self) -> Any:
        """A descriptor that is no device memory."""

        def replaced(fetched: Fetched) -> Fetched:
            (one, fd), *rest = fetched
            os.dup2(os.open("/dev/null", os.O_RDONLY), fd)
            return [(one, fd), *rest]

        return self._map_with(replaced)

    def lie(self, field: str, value: str) -> Any:
        """The owner's word about the first allocation, or about its device, changed."""
        connection = client.connect(self.manifest, "worker", "device client")
        device = connection.welcome.device
        assert device is not None
        described, fetch = connection.describe_allocations, connection.fetch_allocations
        lied = {field: number_or_text(value)}

        def changed() -> list[AllocationRecord]:
            first, *rest = described()
            return [msgspec.structs.replace(first, **lied), *rest]

        def fetched(ids: Sequence[int] | None = None) -> Fetched:
            (first, fd), *rest = fetch(ids)
            return [(msgspec.structs.replace(first, **lied), fd), *rest]

        if hasattr(device, field):
            device = msgspec.structs.replace(device, **{field: number_or_text(value)})
            connection.welcome = msgspec.structs.replace(connection.welcome, device=device)
        else:
            connection.describe_allocations = changed  # type: ignore[method-assign]
            connection.fetch_allocations = fetched  # type: ignore[method-assign]
        with connection:
            map_ranges(connection).close()
        return "mapped"

    def _map_with(self, change: Callable[[Fetched], Fetched]) -> Any:
        with client.connect(self.manifest, "worker", "device client") as connection:
            fetch = connection.fetch_allocations

            def changed(ids: Sequence[int] | None = None) -> Fetched:
                return change(fetch(ids))

            connection.fetch_allocations = changed  # type: ignore[method-assign]
            map_ranges(connection).close()
        return "mapped"


def number_or_text(value: str) -> int | str:
    return int(value) if value.isdigit() else value


def main() -> int:
    subject = Client(sys.argv[1])
    for line in sys.stdin:
        command, *arguments = line.split()
        answer: Any
        try:
            answer = getattr(subject, command)(*arguments)
        except Ds4Error as error:
            answer = {
                "error": type(error).__name__, "exit_code": error.exit_code, "message": str(error),
            }  # fmt: skip
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
