"""Clients of device memory on the stand-in driver: what they map, prove and refuse."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import cuda_stand_in
from helpers.device_stack import Device, device, every_kind

pytestmark = pytest.mark.skipif(bool(cuda_stand_in.missing()), reason=cuda_stand_in.missing())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, short: Path) -> Iterator[tuple[Device, Path]]:
    """An owner that every test of this module shares."""
    with device() as made:
        made.owner(every_kind(tmp_path_factory.mktemp("models")), short)
        yield made, short


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ds4-") as folder:
        yield Path(folder)


REFUSALS = {
    "swap": (47, "allocation 0"),
    "foreign": (47, "is no device memory of this machine's driver"),
    "lie sample none": (47, "samples of the mapped memory have hash"),
    "lie alloc_bytes 8388608": (47, "of another size than announced"),
    "lie alloc_bytes 6291457": (48, "expected a multiple of 2097152"),
    "lie alloc_bytes 2097152": (48, "got 2097152 bytes for"),
    "lie granularity 65536": (48, "maps in units of 2097152 bytes, the owner's in 65536"),
    "lie uuid GPU-0": (45, "the weights are on GPU-0"),
}


@pytest.mark.parametrize("command", REFUSALS)
def test_memory_that_is_not_what_was_announced_is_refused_with_its_own_code(
    served: tuple[Device, Path], command: str
) -> None:
    made, run = served
    code, says = REFUSALS[command]
    worker = made.client(run)
    used, descriptors = made.used_bytes(), made.descriptors(worker.process.pid)
    answer = worker.ask(command)
    assert answer["exit_code"] == code, answer
    assert says in answer["message"]
    assert "\n" not in answer["message"]
    assert made.descriptors(worker.process.pid) == descriptors  # nothing stays open or mapped
    assert len(worker.ask("map")) == 8
    worker.end()
    assert made.used_bytes() == used


def test_memory_of_another_device_is_refused(served: tuple[Device, Path]) -> None:
    """A descriptor that this driver did not make, as from another machine's or another process's
    driver."""
    made, run = served
    stranger = Device({"pool": "elsewhere"})
    worker = stranger.client(run)
    answer = worker.ask("map")
    assert answer["exit_code"] == 47
    assert "is no device memory of this machine's driver" in answer["message"]
    worker.end()
    integrated = made.client(run, profile="integrated")
    answer = integrated.ask("map")
    assert answer["exit_code"] == 45
    assert "CUDA_VISIBLE_DEVICES" in answer["message"]
    integrated.end()


@pytest.mark.parametrize("streams", ["lazy", "eager"])
def test_a_mapping_is_read_only(served: tuple[Device, Path], streams: str) -> None:
    made, run = served
    worker, other = made.client(run, streams=streams), made.client(run)
    before = worker.ask("map")
    answer = worker.ask("write")
    assert answer["exit_code"] in (40, 49), answer
    worker.end()
    assert other.ask("map") == before
    other.end()


def test_a_forked_child_is_told_to_start_anew(served: tuple[Device, Path]) -> None:
    made, run = served
    worker = made.client(run)
    worker.ask("map")
    assert worker.ask("fork") == 40
    worker.end()


FAULTS = {
    "cuInit:1:100": 43,
    "cuDevicePrimaryCtxRetain:1:2": 46,
    "cuMemAddressReserve:1:2": 46,
    "cuMemImportFromShareableHandle:3:1": 47,
    "cuMemMap:4:1": 47,
    "cuMemSetAccess:1:1": 40,
    "cuMemHostAlloc:2:2": 46,
    "cuMemcpyDtoHAsync:9:1": 40,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_on_the_way_leaves_nothing_mapped(
    served: tuple[Device, Path], fault: str
) -> None:
    made, run = served
    worker = made.client(run, fault=fault)
    answer = worker.ask("map")
    assert answer["exit_code"] == FAULTS[fault], answer
    assert made.mappings(worker.process.pid) == made.descriptors(worker.process.pid) == 0
    worker.end()
