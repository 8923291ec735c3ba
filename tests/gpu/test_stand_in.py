"""What the stand-in driver finds that an eager machine would hide, and how it shares memory."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from helpers import cuda_stand_in
from helpers.driver import programs
from helpers.driver.programs import on_stand_in

pytestmark = pytest.mark.skipif(
    bool(cuda_stand_in.missing()), reason=f"stand-in driver: {cuda_stand_in.missing()}"
)

UNWAITED = """
    from helpers.driver.bench import bench, memory
    from ds4_common.cuda.memory import PinnedBuffer
    from ds4_common.cuda.stream import Stream
    with bench() as it, Stream() as other, memory(it) as mapping, PinnedBuffer(4, "out") as out:
        with PinnedBuffer(4, "in") as stage:
            stage.view[:] = b"data"
            it.stream.upload(mapping.address, stage.address, 4)
            other.download(out.address, mapping.address, 4)
            other.synchronize()
            print(bytes(out.view))
            it.stream.synchronize()
"""
REUSED = """
    from helpers.driver.bench import bench, memory
    from ds4_common.cuda.memory import PinnedBuffer
    with bench() as it, memory(it) as mapping, PinnedBuffer(4, "stage") as stage:
        for chunk in (b"one ", b"two "):
            stage.view[:] = chunk
            it.stream.upload(mapping.address, stage.address, 4)
            mapping.address += 4
        mapping.address -= 8
        print(it.get(mapping.address, 8))
"""
FREED = """
    from helpers.driver.bench import bench, memory
    from ds4_common.cuda.memory import PinnedBuffer
    with bench() as it, memory(it) as mapping:
        with PinnedBuffer(1 << 20, "stage") as stage:
            it.stream.upload(mapping.address, stage.address, 1 << 20)
        it.stream.synchronize()
"""
TOUCHED = """
    import ctypes
    from helpers.driver.bench import bench, memory
    with bench() as it, memory(it) as mapping:
        it.put(mapping.address, b"data")
        print(ctypes.string_at(mapping.address, 4))
"""
HOLD = """
    from ds4_common.cuda.device import probe
    from ds4_common.cuda.memory import Allocation
    held = Allocation.create(probe(), 32 << 20, "weights")
    print("held", flush=True)
    sys.stdin.read()
"""
FREE = """
    from helpers.driver.bench import bench
    with bench() as it:
        print(it.context.memory_info()[0] >> 20)
"""


def test_a_missing_wait_between_streams_shows_in_lazy_mode_only() -> None:
    assert on_stand_in(UNWAITED, streams="lazy").stdout.strip() == repr(bytes(4))
    assert on_stand_in(UNWAITED, streams="eager").stdout.strip() == repr(b"data")


def test_a_stage_filled_again_too_early_shows_in_lazy_mode_only() -> None:
    assert on_stand_in(REUSED, streams="lazy").stdout.strip() == repr(b"two two ")
    assert on_stand_in(REUSED, streams="eager").stdout.strip() == repr(b"one two ")


def test_a_stage_freed_before_its_copy_is_a_fault_in_lazy_mode() -> None:
    assert on_stand_in(FREED, streams="lazy").returncode == 49
    assert on_stand_in(FREED, streams="eager").returncode == 0


def test_host_code_that_touches_device_memory_dies_where_that_is_hidden() -> None:
    assert on_stand_in(TOUCHED, host="hidden").returncode == -signal.SIGSEGV
    assert on_stand_in(TOUCHED).stdout.strip() == repr(b"data")


def test_processes_of_a_pool_share_the_devices_memory_and_a_kill_gives_it_back(
    tmp_path: Path,
) -> None:
    pool = {"pool": tmp_path.name, "total_mb": "48"}
    environment = cuda_stand_in.environment(programs.plain_environment(), **pool)
    holder = subprocess.Popen(
        programs.command(HOLD),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert on_stand_in(FREE, **pool).stdout == "16\n"
        assert on_stand_in(HOLD, **pool).returncode == 46
        assert on_stand_in(FREE, pool="another", total_mb="48").stdout == "48\n"
        holder.kill()
    assert on_stand_in(FREE, **pool).stdout == "48\n"


def test_the_compiler_works_beside_it() -> None:
    """NVRTC opens whatever libcuda.so.1 it finds, and asks it for private functions."""
    program = """
        from helpers.driver.bench import cubin
        print(len(cubin("sm_90")) > 1000)
    """
    done = on_stand_in(program)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_a_log_tells_every_call(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    assert on_stand_in(UNWAITED, log=str(log)).returncode == 0
    calls = [line.split()[1] for line in log.read_text().splitlines()]
    assert calls.count("cuMemcpyHtoDAsync") == calls.count("cuMemcpyDtoHAsync") == 1
    assert calls[0] == "cuInit"


def test_a_fault_may_be_meant_for_one_program() -> None:
    assert on_stand_in(FREE, fault="loader/cuInit:1:100").returncode == 0
    assert on_stand_in(FREE, fault="memory_info/cuInit:1:100").returncode == 43


@pytest.mark.parametrize("fault", ["cuInit", "cuInit:0:kill", "cuInit:1:", "cuInit:1:never"])
def test_a_misspelt_fault_ends_the_program(fault: str) -> None:
    done = on_stand_in(FREE, fault=fault)
    assert done.returncode == 99
    assert "DS4_SIM_FAULT: cannot read" in done.stderr
