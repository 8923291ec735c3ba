"""Owners of device memory that are replaced under their workers: by themselves, by a manager.

On the stand-in, and with DS4_TEST_GPU=1 (`make gpu-test`) on this machine's device, where this is
what shows whether a driver's descriptors outlive the process that made them.
tests/owner/test_vmm_*.py has the rest, which needs the stand-in's faults and its book of memory.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import xxhash

import ds4_common
from ds4_common import client
from ds4_common.dlpack import KDL_CUDA
from helpers import stack
from helpers.device_stack import Device, every_kind, owner_flags
from helpers.device_worker import MARKS, Model, answer, worker
from helpers.service_manager import service_manager

pytestmark = MARKS


def owner_command(on_device: Device, run: Path, name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ds4_owner.cli", name, "--manifest", str(run / "w")],
        capture_output=True, text=True, env=stack.process_environment(**on_device.environment()),
    )  # fmt: skip


def test_what_is_on_the_device_is_what_was_loaded(
    on_device: Device, model: Model, run: Path
) -> None:
    owner = on_device.owner(model.path, run)
    done = owner_command(on_device, run, "verify")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as it was loaded" in done.stdout
    assert owner.stop() == 0


def test_clients_read_from_the_device_what_host_memory_would_hold(
    on_device: Device, run: Path, tmp_path: Path
) -> None:
    """Every kind of artifact, by the owner's word, by a mapping, and by the tensors of `attach`."""
    kinds = every_kind(tmp_path)
    flags = ("--cpu-layout", "raw", "--repack-q8-aligned", "--backend", "memfd")
    with stack.owner(kinds, run, *flags):
        expected = hashes(run)
        with ds4_common.attach(str(run / "w")) as model:
            tensors = {name: xxhash.xxh3_128_hexdigest(t.raw()) for name, t in model.items()}
    owner = on_device.owner(kinds, run)
    assert hashes(run) == expected
    reader = on_device.client(run)
    assert reader.ask("map") == expected
    shown = reader.ask("attach")
    assert {name: found["raw"] for name, found in shown.items()} == tensors
    assert {tuple(found["device"]) for found in shown.values()} == {(KDL_CUDA, 0)}
    reader.end()
    assert owner.stop() == 0
    assert on_device.used_bytes() == 0


def hashes(run: Path) -> dict[str, str]:
    """Of allocations, as the owner says them; keys as JSON has them."""
    with client.connect(str(run / "w"), "inspect") as owner:
        return {str(record.id): record.hash128 for record in owner.describe_allocations()}


def test_a_reexec_keeps_weights_for_the_worker_that_is_there_and_for_the_next(
    on_device: Device, model: Model, expected: str, run: Path
) -> None:
    port = stack.free_port()
    owner = on_device.owner(model.path, run)
    with worker(on_device, model, run, port) as first:
        for _ in range(2):  # the second program hands on descriptors, where the first made some
            with client.connect(str(run / "w"), "operator") as operator:
                operator.request_reexec()
        assert answer(port) == expected
        first.stop(signal.SIGKILL)
    with worker(on_device, model, run, port) as second:
        assert answer(port) == expected
        assert second.stop() == 0
    assert owner.stop() == 0


def test_an_owner_that_a_manager_starts_again_has_the_weights_of_the_killed_one(
    on_device: Device, model: Model, expected: str, run: Path
) -> None:
    port = stack.free_port()
    arguments = ("ds4_owner.cli", *owner_flags(model.path, run))
    with service_manager(run) as manager:
        killed = manager.start(*arguments, **on_device.environment())
        manager.wait_ready()
        manager.wait_for(lambda: "ds4.state.1" in manager.names(), "the record")
        killed.stop(signal.SIGKILL)
        adopting = manager.start(*arguments, **on_device.environment())
        manager.wait_ready(2)
        assert "adopted " in adopting.text, adopting.text
        with worker(on_device, model, run, port) as program:
            assert answer(port) == expected
            assert program.stop() == 0
        assert adopting.stop() == 0
        manager.wait_for(lambda: not manager.names(), "an empty store")
    assert on_device.used_bytes() == 0
