"""The numerics of the kernels, launched as a device launches them.

`make gpu-test` runs tests/worker/test_cuda_*.py on the device; here a few of them go the same way
to the stand-in driver, so that this way works when somebody has a device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import cuda_stand_in
from helpers.driver import programs

WORKER = Path(__file__).parents[1] / "worker"
ON_DEVICE = os.environ.get("DS4_TEST_GPU") == "1"
pytestmark = [
    pytest.mark.skipif(ON_DEVICE, reason="the whole of them runs on the device"),
    pytest.mark.skipif(bool(cuda_stand_in.missing()), reason=cuda_stand_in.missing()),
]


@pytest.mark.parametrize(
    ("file", "chosen", "count"),
    [
        ("test_cuda_weights.py", "experts or bias or many_threads", 2),
        ("test_cuda_rows.py", "combine or norms or rope", 13),
        ("test_cuda_cache.py", "stored", 4),
        ("test_cuda_sample.py", "status", 1),
        ("test_cuda_route.py", "", 1),
        ("test_cuda_streams.py", "", 1),
    ],
)
def test_kernels_keep_their_bits_when_a_driver_launches_them(
    file: str, chosen: str, count: int
) -> None:
    environment = cuda_stand_in.environment(programs.plain_environment()) | {"DS4_TEST_GPU": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(WORKER / file), "-k", chosen], env=environment, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    passed = int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])
    assert passed >= count


def test_every_file_of_numerics_can_run_on_a_device() -> None:
    """The compiler's own test asks the host's build for its tables, and only that one may."""
    bound = {
        path.name for path in WORKER.glob("test_cuda_*.py") if "host_module" in path.read_text()
    }
    assert bound == {"test_cuda_compiler.py"}
