"""Claims about device memory: sharing, access, lifetime, and what is refused."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress

from ds4_common.cuda import driver
from ds4_common.cuda.device import Context, probe
from ds4_common.cuda.memory import (
    Allocation,
    DeviceBuffer,
    Mapping,
    PinnedBuffer,
    Reservation,
    granularity,
    set_access,
)
from ds4_common.errors import (
    CudaDescriptorError,
    CudaError,
    CudaGranularityError,
    CudaOutOfMemory,
)
from helpers.descriptors import open_fds
from helpers.driver.bench import Bench, bench, claim, memory, strict_claim


def refused(kind: type[CudaError], call: Callable[[], object]) -> CudaError:
    """The refusal. It may have cost the context: whatever is undone after it uses `give_back`."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, nothing was raised")


@claim
def memory_is_made_and_exported_without_a_context() -> None:
    device = probe()
    with Allocation.create(device, granularity(device), "weights") as allocation:
        os.close(allocation.export_fd())


@claim
def what_one_mapping_writes_another_reads() -> None:
    with bench() as it, it.shareable() as allocation:
        fd = allocation.export_fd()
        with (
            Mapping(allocation, it.device, writable=True) as one,
            Allocation.import_fd(fd, allocation.n_bytes, "import") as imported,
            Mapping(imported, it.device, writable=False) as two,
        ):
            assert two.address != one.address
            it.put(one.address, b"weights")
            assert it.get(two.address, 7) == b"weights"
            it.put(one.address + 3, b"T")
            assert it.get(two.address, 7) == b"weiThts"
        os.close(fd)


@claim
def memory_lives_while_it_is_mapped_though_every_handle_and_descriptor_is_closed() -> None:
    with bench() as it:
        allocation = it.shareable()
        fd = allocation.export_fd()
        imported = Allocation.import_fd(fd, allocation.n_bytes, "import")
        with Mapping(allocation, it.device, writable=True) as writable:
            it.put(writable.address, b"kept")
            with Mapping(imported, it.device, writable=False) as mapping:
                os.close(fd)
                allocation.close()
                imported.close()
                assert it.get(mapping.address, 4) == b"kept"


@claim
def an_import_leaves_the_descriptor_to_its_owner() -> None:
    with bench() as it, it.shareable() as allocation:
        fd = allocation.export_fd()
        for _ in range(2):
            Allocation.import_fd(fd, allocation.n_bytes, "import").close()
        os.close(fd)


@claim
def closed_memory_leaves_no_descriptor_behind() -> None:
    with bench() as it:
        _come_and_go(it)  # whatever the driver opens once is open from here on
        before = open_fds()
        for _ in range(3):
            _come_and_go(it)
        assert open_fds() <= before


def _come_and_go(it: Bench) -> None:
    with it.shareable() as allocation:
        fd = allocation.export_fd()
        imported = Allocation.import_fd(fd, allocation.n_bytes, "import")
        with Mapping(imported, it.device, writable=False):
            imported.close()
        os.close(fd)


@claim
def exported_descriptors_are_closed_on_exec() -> None:
    device = probe()
    with Allocation.create(device, granularity(device), "weights") as allocation:
        fd = allocation.export_fd()
        inheritable = os.get_inheritable(fd)
        os.close(fd)
        assert not inheritable


@claim
def a_copy_into_a_read_only_mapping_is_refused() -> None:
    with bench() as it, memory(it, writable=False) as mapping, PinnedBuffer(8, "stage") as stage:

        def write() -> None:
            it.stream.upload(mapping.address, stage.address, 8)
            it.stream.synchronize()

        refused(CudaError, write)


@strict_claim
def memory_that_nobody_was_given_access_to_is_refused() -> None:
    with bench() as it, it.shareable() as allocation, PinnedBuffer(8, "stage") as stage:
        reservation = Reservation(allocation.n_bytes)
        size = allocation.n_bytes
        driver.call("cuMemMap", reservation.address, size, 0, allocation.handle, 0)

        def read() -> None:
            it.stream.download(stage.address, reservation.address, 8)
            it.stream.synchronize()

        refused(CudaError, read)
        driver.give_back("cuMemUnmap", reservation.address, size)
        reservation.close()


@strict_claim
def access_is_set_on_whole_mappings_only() -> None:
    with bench() as it, it.shareable(2) as allocation:
        with Mapping(allocation, it.device, writable=True) as mapping:
            half = allocation.n_bytes // 2
            refused(
                CudaError,
                lambda: set_access(mapping.address, half, it.device, writable=False, label="half"),
            )
            it.put(mapping.address, b"still writable")


@claim
def one_call_sets_access_on_neighbouring_mappings() -> None:
    with bench() as it, it.shareable() as one, it.shareable() as two:
        reservation = Reservation(2 * one.n_bytes)
        second = reservation.address + one.n_bytes
        driver.call("cuMemMap", reservation.address, one.n_bytes, 0, one.handle, 0)
        driver.call("cuMemMap", second, two.n_bytes, 0, two.handle, 0)
        whole = 2 * one.n_bytes
        set_access(reservation.address, whole, it.device, writable=True, label="both")
        it.put(second - 2, b"abcd")
        assert it.get(second - 2, 4) == b"abcd"
        driver.call("cuMemUnmap", reservation.address, whole)
        reservation.close()


@strict_claim
def addresses_are_not_given_back_while_memory_is_mapped_there() -> None:
    with bench() as it, it.shareable() as allocation:
        reservation = Reservation(allocation.n_bytes)
        size = allocation.n_bytes
        driver.call("cuMemMap", reservation.address, size, 0, allocation.handle, 0)
        refused(CudaError, lambda: driver.call("cuMemAddressFree", reservation.address, size))
        driver.call("cuMemUnmap", reservation.address, size)
        reservation.close()


@claim
def sizes_come_in_multiples_of_the_granularity() -> None:
    with bench() as it:
        size = granularity(it.device, recommended=False)
        assert size & (size - 1) == 0
        assert granularity(it.device) % size == 0
        for wrong in (0, size + 1, size // 2):
            error = refused(
                CudaGranularityError,
                lambda wrong=wrong: Allocation.create(it.device, wrong, "weights"),  # type: ignore[misc]
            )
            assert f"multiples of {size} bytes: got {wrong}" in str(error)


@claim
def more_memory_than_the_device_has_is_out_of_memory() -> None:
    with bench() as it:
        if it.device.integrated and not it.device.simulated:
            return  # the system's memory: a driver that tries it takes that of other programs
        unit = granularity(it.device)
        size = it.device.total_bytes // unit * unit + (64 << 30)
        error = refused(CudaOutOfMemory, lambda: Allocation.create(it.device, size, "weights"))
        assert f"weights, {size} bytes" in str(error)
        assert error.exit_code == 46
        with memory(it) as mapping:
            it.put(mapping.address, b"there is room for less")


@claim
def a_descriptor_of_something_else_is_refused() -> None:
    with bench() as it, tempfile.TemporaryFile() as file:
        file.truncate(granularity(it.device))
        error = refused(
            CudaDescriptorError,
            lambda: Allocation.import_fd(file.fileno(), granularity(it.device), "range 3"),
        )
        assert "range 3" in str(error)


@claim
def a_closed_descriptor_is_refused() -> None:
    with bench() as it:
        fd = os.open("/dev/null", os.O_RDONLY)
        os.close(fd)
        refused(CudaDescriptorError, lambda: Allocation.import_fd(fd, 1 << 21, "range 3"))
        assert it.context


@claim
def mapping_more_than_there_is_is_refused() -> None:
    with bench() as it, it.shareable() as allocation:
        fd = allocation.export_fd()
        with Allocation.import_fd(fd, 4 * allocation.n_bytes, "range 3") as imported:
            refused(CudaDescriptorError, lambda: Mapping(imported, it.device, writable=False))
        os.close(fd)


@claim
def a_mapping_that_fails_gives_its_addresses_back() -> None:
    with bench() as it, it.shareable() as allocation:
        fd = allocation.export_fd()
        with Allocation.import_fd(fd, 1 << 34, "range 3") as imported:
            for _ in range(64):
                with suppress(CudaDescriptorError):
                    Mapping(imported, it.device, writable=False)
        os.close(fd)
        with open("/proc/self/maps") as maps:
            spans = [line.split()[0].split("-") for line in maps]
        sizes = [int(end, 16) - int(start, 16) for start, end in spans]
        if it.device.simulated:  # a driver keeps its reservations elsewhere
            assert max(sizes) < 1 << 34


@strict_claim
def a_copy_outside_of_device_memory_is_refused() -> None:
    with bench() as it, memory(it) as mapping, PinnedBuffer(16, "stage") as stage:

        def write() -> None:
            it.stream.upload(mapping.address + mapping.n_bytes - 8, stage.address, 16)
            it.stream.synchronize()

        refused(CudaError, write)


@claim
def free_memory_shrinks_by_what_is_made_and_returns() -> None:
    with bench() as it:
        if it.device.integrated:
            return  # the system's memory, which everybody changes all the time
        size = 64 << 20
        before, total = it.context.memory_info()
        with Allocation.create(it.device, size, "weights"):
            during, _ = it.context.memory_info()
        assert before <= total
        assert before - during >= size
        with DeviceBuffer(size, "scratch"):
            during, _ = it.context.memory_info()
        assert before - during >= size // 2


@claim
def a_process_without_a_context_has_no_plain_memory() -> None:
    device = probe()
    error = refused(CudaError, lambda: DeviceBuffer(64, "buffer"))
    assert error.code == 201
    with Context(device), DeviceBuffer(64, "buffer"):
        pass
