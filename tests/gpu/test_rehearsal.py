"""`make gpu-test` rehearsed: the stand-in is "this machine's device", all else is as on a real one.

A few tests of every file that it runs, so that the way works when somebody has a device; all of
them with `-m slow`. What cannot be rehearsed: cubins, which the stand-in does not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import cuda_stand_in
from helpers.driver import programs

ROOT = Path(__file__).parents[2]
ON_DEVICE = os.environ.get("DS4_TEST_GPU") == "1"
pytestmark = [
    pytest.mark.skipif(ON_DEVICE, reason="the whole of them runs on the device"),
    pytest.mark.skipif(bool(cuda_stand_in.missing()), reason=cuda_stand_in.missing()),
]
CHOSEN = {
    "gpu/test_driver_contract.py": ("descriptor or reexec or read_only", 5),
    "gpu/test_cuda_executor.py": ("copied_and_shared", 1),
    "gpu/test_cuda_frames.py": ("pending or cannot_be_under_way", 2),
    "gpu/test_cuda_owner.py": ("manager or clients", 2),
    "gpu/test_cuda_worker.py": ("outlives", 1),
    "worker/test_cuda_weights.py": ("bias or many_threads", 2),
    "worker/test_cuda_experts.py": ("tiles_of_experts", 1),
    "worker/test_cuda_rows.py": ("combine or norms or rope", 13),
    "worker/test_cuda_cache.py": ("stored", 4),
    "worker/test_cuda_row_pages.py": ("stored", 1),
    "worker/test_cuda_sample.py": ("status", 1),
    "worker/test_cuda_route.py": ("", 1),
    "worker/test_cuda_streams.py": ("", 1),
}
# They have no device in them, or always their own stand-in.
HOST_ONLY = {
    "gpu/test_driver_failures.py", "gpu/test_no_driver.py", "gpu/test_rehearsal.py",
    "gpu/test_stand_in.py", "worker/test_cuda_compiler.py", "worker/test_cuda_fibers.py",
    "worker/test_cuda_limits.py", "worker/test_cuda_program.py", "worker/test_cuda_table.py",
}  # fmt: skip


def rehearse(files: list[str], chosen: str, seconds: float) -> int:
    """How many passed; none may fail."""
    environment = cuda_stand_in.environment(programs.plain_environment()) | {"DS4_TEST_GPU": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        [*command, "-k", chosen], env=environment, capture_output=True, text=True,
        timeout=seconds, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])


@pytest.mark.parametrize("file", CHOSEN)
def test_tests_of_a_device_pass_when_the_stand_in_is_one(file: str) -> None:
    chosen, count = CHOSEN[file]
    assert rehearse([f"tests/{file}"], chosen, 280) >= count


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_everything_that_gpu_test_runs_passes_when_the_stand_in_is_the_device() -> None:
    assert rehearse(gpu_test_files(), "", 3500) > 500


def gpu_test_files() -> list[str]:
    """As the Makefile names them."""
    done = subprocess.run(
        ["make", "-n", "-o", "setup", "-o", "model", "gpu-test"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if "DS4_TEST_GPU=1" in line)
    return line.partition("-m pytest ")[2].split()


def test_gpu_test_runs_every_file_that_has_a_device_in_it() -> None:
    listed = gpu_test_files()
    tests = ROOT / "tests"
    run = {file for file in listed if file.endswith(".py")} | {
        str(path.relative_to(ROOT)) for path in (tests / "gpu").glob("test_*.py")
    }
    assert "tests/gpu" in listed
    assert {file.removeprefix("tests/") for file in run} == CHOSEN.keys() | HOST_ONLY


def test_every_file_of_numerics_can_run_on_a_device() -> None:
    """The compiler's own test asks the host's build for its tables, and only that one may."""
    worker = ROOT / "tests" / "worker"
    bound = {
        path.name for path in worker.glob("test_cuda_*.py") if "host_module" in path.read_text()
    }
    assert bound == {"test_cuda_compiler.py"}
