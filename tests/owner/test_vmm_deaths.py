"""Owners, loaders and workers of device memory killed at each step; afterwards nothing is left.

The stand-in counts device memory over all processes alive, so "nothing" is exact.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4_common import client
from helpers import cuda_stand_in
from helpers.device_stack import Device, device, every_kind, owner_flags
from helpers.owner_processes import stuck, wait_gone
from helpers.service_manager import ServiceManager, service_manager
from helpers.stack import DEADLINE_SECONDS, Program
from helpers.stuck_owner import DEVICE_STEPS

pytestmark = pytest.mark.skipif(bool(cuda_stand_in.missing()), reason=cuda_stand_in.missing())
LOADER_STEPS = ("plan", *DEVICE_STEPS, "fingerprint", "blobs")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_kind(tmp_path_factory.mktemp("models"))


@pytest.fixture
def discrete() -> Iterator[Device]:
    with device() as made:
        yield made


def start_stuck(step: str, on: Device, kinds: Path, run: Path) -> tuple[Program, int, int]:
    """An owner whose loader waits at `step`; the loader's pid and a pidfd of it."""
    return stuck(step, on.launch("helpers.stuck_owner", step, *owner_flags(kinds, run)))


# The loader


@pytest.mark.parametrize("step", LOADER_STEPS)
def test_a_loader_killed_at_any_step_leaves_no_device_memory(
    discrete: Device, kinds: Path, run: Path, step: str
) -> None:
    program, pid, pidfd = start_stuck(step, discrete, kinds, run)
    os.kill(pid, signal.SIGKILL)
    assert program.wait() == 1
    wait_gone(pidfd)
    assert f"the loader (pid {pid}) died while" in program.text
    assert discrete.used_bytes() == 0
    assert {path.name for path in run.iterdir()} <= {"lock"}


KILLED_CALLS = {
    "cuDevicePrimaryCtxRetain:1": "planning",
    "cuMemImportFromShareableHandle:3": "loading",
    "cuMemMap:1": "loading",
    "cuMemSetAccess:2": "loading",
    "cuMemHostAlloc:2": "loading",
    "cuMemcpyHtoDAsync:4": "loading",
    "cuMemcpyDtoHAsync:20": "loading",
    "cuMemUnmap:1": "loading",
}


@pytest.mark.parametrize("call", KILLED_CALLS)
def test_a_loader_killed_inside_the_driver_leaves_no_device_memory(
    kinds: Path, run: Path, call: str
) -> None:
    with device(fault=f"ds4_owner.loader/{call}:kill") as made:
        program = made.launch("ds4_owner.cli", *owner_flags(kinds, run))
        assert program.wait() == 1
        assert f"died while {KILLED_CALLS[call]}: killed by signal 9" in program.lines[-1]
        assert made.used_bytes() == 0


# The owner


@pytest.mark.parametrize("step", LOADER_STEPS)
def test_an_owner_killed_while_loading_leaves_no_device_memory(
    discrete: Device, kinds: Path, run: Path, step: str
) -> None:
    program, _, pidfd = start_stuck(step, discrete, kinds, run)
    assert program.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_gone(pidfd)
    assert discrete.used_bytes() == 0
    again = discrete.owner(kinds, run)
    assert again.stop() == 0


@pytest.mark.parametrize("call", ["cuInit:1", "cuMemCreate:3", "cuMemExportToShareableHandle:2"])
def test_an_owner_killed_inside_the_driver_leaves_no_device_memory(
    kinds: Path, run: Path, call: str
) -> None:
    with device(fault=f"ds4_owner.cli/{call}:kill") as made:
        program = made.launch("ds4_owner.cli", *owner_flags(kinds, run))
        assert program.wait() == -signal.SIGKILL
        assert made.used_bytes() == 0


@pytest.mark.parametrize("streams", ["lazy", "eager"])
def test_a_mapped_worker_reads_on_when_its_owner_is_killed(
    kinds: Path, run: Path, streams: str
) -> None:
    with device(streams=streams) as made:
        program = made.owner(kinds, run)
        worker = made.client(run)
        before = worker.ask("map")
        assert program.stop(signal.SIGKILL) == -signal.SIGKILL
        assert worker.ask("hash") == before
        assert made.used_bytes() > 0
        worker.end(signal.SIGKILL)
        assert made.used_bytes() == 0


def test_a_stop_during_the_upload_leaves_no_device_memory(
    discrete: Device, kinds: Path, run: Path
) -> None:
    program, _, pidfd = start_stuck("upload", discrete, kinds, run)
    assert program.stop() == 0
    wait_gone(pidfd)
    assert discrete.used_bytes() == 0


# The worker

WORKER_CALLS = (
    "cuDevicePrimaryCtxRetain:1", "cuMemAddressReserve:1", "cuMemImportFromShareableHandle:2",
    "cuMemMap:3", "cuMemSetAccess:1", "cuMemcpyDtoHAsync:5",
)  # fmt: skip


def test_workers_killed_at_every_step_of_mapping_cost_the_owner_nothing(
    discrete: Device, kinds: Path, run: Path
) -> None:
    program = discrete.owner(kinds, run)
    descriptors, used = discrete.descriptors(program.process.pid), discrete.used_bytes()
    for call in WORKER_CALLS:
        worker = discrete.client(run, fault=f"{call}:kill")
        assert worker.tell("map") is None
        assert worker.process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    assert discrete.descriptors(program.process.pid) == descriptors
    assert discrete.used_bytes() == used
    last = discrete.client(run)
    assert len(last.ask("map")) == 8
    last.end()
    assert program.stop() == 0
    assert discrete.used_bytes() == 0


# The next owner


def test_a_reexec_keeps_the_memory_and_hands_it_out_as_before(
    discrete: Device, kinds: Path, run: Path
) -> None:
    program = discrete.owner(kinds, run)
    old = discrete.client(run)
    expected = old.ask("map")
    for _ in range(2):  # the second program of a row has descriptors where the first had handles
        with client.connect(str(run / "w"), "operator") as operator:
            operator.request_reexec()
        new = discrete.client(run)
        assert new.ask("map") == expected
        new.end()
    assert old.ask("hash") == expected
    old.end()
    assert program.stop() == 0
    assert discrete.used_bytes() == 0


def test_a_reexec_that_fails_leaves_the_owner_as_it_was(
    discrete: Device, kinds: Path, run: Path
) -> None:
    program = discrete.owner(kinds, run, fault="ds4_owner.cli/cuMemExportToShareableHandle:12:304")
    before = discrete.descriptors(program.process.pid)
    with client.connect(str(run / "w"), "operator") as operator:
        with pytest.raises(Exception, match="device memory cannot be handed over"):
            operator.request_reexec()
    assert discrete.descriptors(program.process.pid) == before
    worker = discrete.client(run)
    assert len(worker.ask("map")) == 8
    worker.end()
    assert program.stop() == 0


@pytest.fixture
def manager(run: Path) -> Iterator[ServiceManager]:
    with service_manager(run) as made:
        yield made


def test_an_owner_killed_under_a_service_manager_is_adopted_without_a_load(
    discrete: Device, kinds: Path, run: Path, manager: ServiceManager
) -> None:
    arguments = ("ds4_owner.cli", *owner_flags(kinds, run))
    manager.start(*arguments, **discrete.environment())
    manager.wait_ready()
    manager.wait_for(lambda: "ds4.state.1" in manager.names(), "the record")
    worker = discrete.client(run)
    expected = worker.ask("map")
    assert manager.program is not None
    manager.program.stop(signal.SIGKILL)
    second = manager.start(*arguments, **discrete.environment())
    manager.wait_ready(2)
    assert "adopted 8 allocations" in second.text
    assert "content fingerprint" not in second.text
    another = discrete.client(run)
    assert another.ask("map") == expected == worker.ask("hash")
    another.end()
    worker.end()
    assert second.stop() == 0
    manager.wait_for(lambda: not manager.names(), "an empty store")
    assert discrete.used_bytes() == 0


def test_memory_that_was_written_meanwhile_is_not_adopted_but_loaded_again(
    discrete: Device, kinds: Path, run: Path, manager: ServiceManager
) -> None:
    arguments = ("ds4_owner.cli", *owner_flags(kinds, run))
    manager.start(*arguments, **discrete.environment())
    manager.wait_ready()
    manager.wait_for(lambda: "ds4.state.1" in manager.names(), "the record")
    worker = discrete.client(run)
    expected = worker.ask("map")
    assert worker.ask("scribble 0") == "written"  # where a sample sees it
    worker.end()
    assert manager.program is not None
    manager.program.stop(signal.SIGKILL)
    second = manager.start(*arguments, **discrete.environment())
    manager.wait_ready(2)
    assert "not adopting" in second.text
    assert "memory base-0: got sample hash" in second.text
    another = discrete.client(run)
    assert another.ask("map") == expected
    another.end()
    assert second.stop() == 0
