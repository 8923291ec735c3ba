"""An owner's device memory in this process: imported, mapped read-only, proven to be the one meant.

Owns the addresses until `close`; the owner may die meanwhile. One span of addresses holds all
ranges of a call. Descriptors are taken in batches and closed at once, so hundreds of ranges need
few of them. Refuses: another device, another granularity, descriptors that are not the memory
announced - by the driver's word where it knows, else by the content of 16 samples per range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ds4_common import fdpass
from ds4_common.client import OwnerConnection
from ds4_common.closing import Closing
from ds4_common.cuda import driver
from ds4_common.cuda.device import Context, Device, find
from ds4_common.cuda.memory import Allocation, Reservation, granularity, map_at, set_access
from ds4_common.cuda.reading import DeviceReader
from ds4_common.errors import (
    BackendError,
    CudaDescriptorError,
    CudaGranularityError,
    ProtocolError,
    WrongCudaDevice,
)
from ds4_common.protocol import AllocationRecord, DeviceRecord

FETCHED_TOGETHER = 64  # descriptors open at a time
Fetch = Callable[[Sequence[int]], list[tuple[AllocationRecord, int]]]


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """One allocation at its address here. `alloc_bytes` are mapped, `n_bytes` mean something."""

    record: AllocationRecord
    address: int

    @property
    def n_bytes(self) -> int:
        return self.record.n_bytes


class DeviceRanges(Closing):
    """Mapped ranges by allocation id. `close` unmaps them: nothing may use an address then."""

    def __init__(
        self, context: Context, ranges: dict[int, DeviceRange], cleanup: ExitStack
    ) -> None:
        self.context = context
        self.ranges = ranges
        self._cleanup = cleanup

    def __getitem__(self, allocation: int) -> DeviceRange:
        return self.ranges[allocation]

    def close(self) -> None:
        self._cleanup.close()


def find_device(record: DeviceRecord) -> Device:
    """The device that has the owner's memory. Raises WrongCudaDevice when none here is it."""
    device = find(record.uuid, record.name)
    _check_granularity(device, record)
    return device


def _check_granularity(device: Device, record: DeviceRecord) -> None:
    unit = granularity(device)
    if unit != record.granularity:
        raise CudaGranularityError(
            f"{device.name}: the driver maps in units of {unit} bytes, the owner's in"
            f" {record.granularity}: they are of different versions; restart the owner"
        )


def map_ranges(
    connection: OwnerConnection,
    ids: Sequence[int] | None = None,
    context: Context | None = None,
    *,
    prove: bool = True,
) -> DeviceRanges:
    """Maps allocations (None: all) read-only at addresses of this process.

    Makes the context of the owner's device current unless one is given. `prove`: compare samples
    of the content with the owner's record. Raises BackendError (not
    device memory) and the CudaErrors; nothing stays mapped or open then."""
    announced = connection.welcome.device
    if announced is None:
        raise BackendError(
            f"owner of {connection.manifest_path} holds its weights by backend"
            f" {connection.welcome.backend}, which is host memory; start it with --backend vmm"
        )
    with ExitStack() as undo:
        if context is None:
            context = Context(find_device(announced))
            undo.callback(context.close)
        elif context.device.uuid != announced.uuid:
            raise WrongCudaDevice(
                f"the weights are on {announced.uuid}, the context is of {context.device.uuid}"
            )
        records = connection.describe_allocations()
        if ids is not None:
            known = {record.id: record for record in records}
            records = [known[i] for i in ids if i in known]
            if len(records) != len(ids):
                missing = [i for i in ids if i not in known]
                raise BackendError(f"the owner has no allocations {missing[:8]}")
        ranges = _map(connection.fetch_allocations, records, context.device, undo)
        if prove:
            _prove(ranges)
        return DeviceRanges(context, {r.record.id: r for r in ranges}, undo.pop_all())


def map_records(
    records: Sequence[AllocationRecord], fetch: Fetch, context: Context
) -> DeviceRanges:
    """The mapping alone, of allocations that `fetch` gives descriptors of; the content is not
    looked at, and the context stays the caller's. Raises what `map_ranges` raises."""
    with ExitStack() as undo:
        ranges = _map(fetch, records, context.device, undo)
        return DeviceRanges(context, {r.record.id: r for r in ranges}, undo.pop_all())


def _map(
    fetch: Fetch, records: Sequence[AllocationRecord], device: Device, undo: ExitStack
) -> list[DeviceRange]:
    unit = granularity(device, recommended=False)
    for record in records:
        if record.alloc_bytes % unit or record.alloc_bytes < max(record.n_bytes, 1):
            raise CudaGranularityError(
                f"allocation {record.id}: got {record.alloc_bytes} bytes for {record.n_bytes},"
                f" expected a multiple of {unit}"
            )
    if not records:
        return []
    total = sum(record.alloc_bytes for record in records)
    span = Reservation(total, granularity(device))
    undo.callback(span.close)
    ranges: list[DeviceRange] = []
    address = span.address
    for first in range(0, len(records), FETCHED_TOGETHER):
        batch = records[first : first + FETCHED_TOGETHER]
        fetched = fetch([record.id for record in batch])
        try:
            for record, (sent, fd) in zip(batch, fetched, strict=True):
                if sent != record:
                    raise ProtocolError(f"allocation {record.id}: the owner changed its record")
                _map_one(fd, record, address, undo)
                ranges.append(DeviceRange(record, address))
                address += record.alloc_bytes
        finally:
            fdpass.close_all(fd for _, fd in fetched)
    set_access(span.address, total, device, writable=False, label="the owner's weights")
    return ranges


def _map_one(fd: int, record: AllocationRecord, address: int, undo: ExitStack) -> None:
    label = f"allocation {record.id}"
    with Allocation.import_fd(fd, record.alloc_bytes, label) as allocation:
        map_at(address, allocation)  # the mapping keeps the memory; the handle may go
    undo.callback(driver.give_back, "cuMemUnmap", address, record.alloc_bytes, what=label)


def _prove(ranges: Sequence[DeviceRange]) -> None:
    """Raises CudaDescriptorError for a range whose samples are not those the loader took."""
    with DeviceReader() as reader:
        found = reader.samples([(r.address, r.n_bytes) for r in ranges])
    for r, sample in zip(ranges, found, strict=True):
        if sample != r.record.sample:
            raise CudaDescriptorError(
                f"allocation {r.record.id}: samples of the mapped memory have hash {sample},"
                f" the owner's record says {r.record.sample or 'nothing'}: the descriptor is of"
                " other memory, or it was written to; see ds4-weight-server verify"
            )
