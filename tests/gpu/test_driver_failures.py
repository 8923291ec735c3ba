"""Every way a driver can fail ends in one line of its own kind, with its own exit code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ds4_common.cuda import driver
from ds4_common.errors import CudaError, Ds4Error
from helpers import cuda_stand_in
from helpers.driver import programs
from helpers.driver.programs import on_stand_in

pytestmark = pytest.mark.skipif(
    bool(cuda_stand_in.missing()), reason=f"stand-in driver: {cuda_stand_in.missing()}"
)

PROBE = "from ds4_common.cuda.device import probe; probe()"
USE = """
    from helpers.driver.bench import bench, memory
    with bench() as it:
        for _ in range(2):
            with memory(it) as mapping:
                it.put(mapping.address, b"weights")
                assert it.get(mapping.address, 7) == b"weights"
"""
EXPORT = """
    from ds4_common.cuda.device import probe
    from ds4_common.cuda.memory import Allocation, granularity
    device = probe()
    with Allocation.create(device, granularity(device), "range 3") as allocation:
        allocation.export_fd()
"""


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = done.stderr.strip().splitlines()
    return line


def kinds(base: type[CudaError]) -> list[type[CudaError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]


@pytest.mark.parametrize(
    ("program", "settings", "code", "text"),
    [
        (PROBE, {"fault": "cuInit:1:100"}, 43, "NoCudaDevice"),
        (PROBE, {"fault": "cuInit:1:34"}, 41, "NoCudaDriver"),
        (PROBE, {"fault": "cuInit:1:802"}, 40, "nvidia-fabricmanager"),
        (PROBE, {"fault": "cuInit:1:803"}, 40, "restart the machine"),
        (PROBE, {"fault": "cuInit:1:805"}, 40, "MPS daemon"),
        (PROBE, {"fault": "cuInit:1:999"}, 40, "nvidia_uvm"),
        (USE, {"fault": "cuDevicePrimaryCtxRetain:1:46"}, 40, "nvidia-smi -q -d COMPUTE"),
        (USE, {"fault": "cuStreamSynchronize:1:810"}, 49, "MPS_CLIENT_TERMINATED"),
        (PROBE, {"driver": "12080"}, 42, "got CUDA 12.8, expected 13.0"),
        (PROBE, {"lacks": "vmm"}, 44, "no virtual memory management"),
        (PROBE, {"lacks": "fd"}, 44, "no export of memory as file descriptors"),
        (PROBE, {"fault": "cuInit:1:12345"}, 40, "cannot be read by cuda-bindings"),
        (USE, {"fault": "cuMemCreate:2:2"}, 46, "weights, 2097152 bytes"),
        (USE, {"total_mb": "1"}, 46, "CUDA_ERROR_OUT_OF_MEMORY"),
        (USE, {"fault": "cuMemHostAlloc:3:2"}, 46, "input, 7 bytes"),
        (USE, {"fault": "cuMemMap:2:12345"}, 47, "cannot be read by cuda-bindings"),
        (USE, {"fault": "cuStreamSynchronize:3:sticky"}, 49, "cuStreamSynchronize"),
        (USE, {"fault": "cuMemcpyDtoHAsync:1:716"}, 49, "MISALIGNED_ADDRESS"),
        (EXPORT, {"fault": "cuMemExportToShareableHandle:1:304"}, 40, "ulimit -n"),
    ],
)
def test_a_failure_is_one_line_with_an_exit_code_of_its_kind(
    program: str, settings: dict[str, str], code: int, text: str
) -> None:
    done = on_stand_in(program, **settings)
    assert (done.returncode, text in only_line(done)) == (code, True), done.stderr


def test_the_stand_in_itself_works_without_faults() -> None:
    done = on_stand_in(USE)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_simulated_device_is_refused_outside_of_tests() -> None:
    environment = cuda_stand_in.environment(programs.plain_environment())
    for value in ("", "0", "yes"):
        done = programs.attempt(PROBE, {**environment, "DS4_CUDA_SIMULATED": value})
        assert done.returncode == 45
        assert "is a simulation for tests" in only_line(done)


def test_a_driver_without_a_function_is_too_old() -> None:
    done = on_stand_in(
        PROBE + "\nfrom ds4_common.cuda import driver; driver.call('cuCtxResetPersistingL2Cache')"
    )
    assert done.returncode == 42
    assert "lacks the function" in only_line(done)


def test_running_out_of_descriptors_names_the_limit_and_leaves_nothing() -> None:
    program = """
        import resource
        from ds4_common.cuda.device import probe
        from ds4_common.cuda.memory import Allocation, granularity
        from ds4_common.errors import CudaError
        device = probe()
        before = os.listdir("/proc/self/fd")
        with Allocation.create(device, granularity(device), "range 3") as allocation:
            fds = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 8, 4096))
            try:
                while True:
                    fds.append(allocation.export_fd())
            except CudaError as error:
                assert "range 3" in str(error) and "ulimit -n" in str(error), error
            for fd in fds:
                os.close(fd)
        assert os.listdir("/proc/self/fd") == before
    """
    done = on_stand_in(program)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_lost_context_shows_its_first_failure_only() -> None:
    done = on_stand_in(USE, fault="cuMemcpyHtoDAsync:1:sticky", log=str(Path("/dev/null")))
    assert done.returncode == 49
    assert "cuMemcpyHtoDAsync: CUDA_ERROR_LAUNCH_FAILED (719)" in only_line(done)


def test_a_kill_at_any_call_is_a_kill() -> None:
    for step in (1, 9, 17):
        assert on_stand_in(USE, fault=f"any:{step}:kill").returncode == -9


def test_each_kind_of_cuda_error_has_an_exit_code_of_its_own() -> None:
    codes = [kind.exit_code for kind in kinds(CudaError)]
    assert len(set(codes)) == len(codes)
    assert not {0, 1, 2, 3, 75} & set(codes)
    assert issubclass(CudaError, Ds4Error)


def test_whatever_the_header_says_ends_a_process_is_a_lost_context() -> None:
    text = (cuda_stand_in.headers() / "cuda.h").read_text()
    codes = text[text.index("typedef enum cudaError_enum") : text.index("} CUresult;")]
    found = {
        int(code)
        for comment, code in re.findall(r"/\*\*(.*?)\*/\s*CUDA_\w+\s*=\s*(\d+)", codes, re.DOTALL)
        if re.search(r"terminated[\s*]+and[\s*]+relaunched", comment)
    }
    assert len(found) > 9
    assert found <= driver.STICKY


def test_every_result_code_of_the_bindings_becomes_an_error_that_names_it() -> None:
    for result in driver.bindings().CUresult:
        if not int(result):
            continue
        error = driver.failure("cuSomething", int(result), "range 3")
        assert f"cuSomething, range 3: {result.name} ({int(result)})" in str(error)
        assert error.code == int(result)
