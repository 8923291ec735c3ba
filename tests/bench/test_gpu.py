"""`ds4-bench gpu` whole, on the stand-in driver: its rows and what they stand beside."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from ds4_worker.bench import gpu_memory
from ds4_worker.bench.gpu_kernels import CASES
from ds4_worker.cuda.kernels import weight_unit
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.executor.cuda_code import library_name
from helpers import cuda_stand_in
from helpers.cuda_executors import kernel_folder
from helpers.cuda_kernels import build_unit
from helpers.driver import programs
from helpers.prepared import prepare_file
from helpers.tiny_gguf import write_llama

STAND_IN = pytest.mark.skipif(bool(cuda_stand_in.missing()), reason=cuda_stand_in.missing())
SMALL = ("-n", "1", "--gpu-mb", "1", "--depths", "4", "--steps", "2", "--streams", "2")
SIZES = ("--attach-gb", "0.004,0.02,100", "--upload-gb", "0.004")


def bench(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ds4_worker.bench.cli", "gpu", *arguments],
        env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


def kernels_for(model: Path, folder: Path) -> Path:
    """Those of the model, and those that are measured alone."""
    config = ExecutorConfig(banks=2, context_tokens=34)
    made = kernel_folder(prepare_file(model), config, folder)
    for unit in {weight_unit(quant, layout) for quant, layout, _ in CASES}:
        target = made / library_name(unit)
        if not target.exists():
            target.symlink_to(build_unit(unit))
    return made


@STAND_IN
def test_all_parts_give_their_rows_beside_a_reference_of_the_run(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    settings = {"pool": tmp_path.name, "total_mb": "512"}
    environment = cuda_stand_in.environment(programs.plain_environment(), **settings)
    environment["DS4_CUDA_KERNELS"] = str(kernels_for(model, tmp_path / "kernels"))
    table = tmp_path / "rows.csv"
    done = bench(environment, "-m", str(model), *SMALL, *SIZES, "--csv", str(table))
    assert done.returncode == 0, done.stderr
    assert "attach to 100 GB: left out" in done.stderr
    with table.open() as lines:
        rows = {row["figure"]: row for row in csv.DictReader(lines)}
    assert all(float(row["median"]) > 0 for row in rows.values() if row["unit"] != "GB/s")
    kernels = [row for name, row in rows.items() if name.startswith("matvec ")]
    assert {row["goal"] for row in kernels} == {">= 0.80", ">= 0.70"}
    assert len(kernels) == len(CASES)
    copy = rows["copy on the device, read + written, 1 MiB"]["median"]
    assert {row["reference"] for row in kernels} == {copy}
    assert rows["attach to 0.02 GB in 1 ranges"]["goal"] == "<= 200"
    upload = rows["upload by an owner, 0.004 GB beside the model"]
    assert upload["reference"] == rows["copy host to device, pinned, 1 MiB"]["median"]
    assert {name for name in rows if name.startswith("CUDA: ")} == {
        "CUDA: decode at depth 4", "CUDA: decode at depth 4, 2 streams", "CUDA: prefill 4",
        "CUDA: prefill 4, weight matrices", "CUDA: prefill 32",
        "CUDA: prefill 32, weight matrices", "CUDA: decode step, launches of its graphs",
        "CUDA: decode step, beside its graphs",
        "CUDA: decode through the engine, 1 streams, two steps under way",
        "CUDA: decode through the engine, 2 streams, two steps under way",
    }  # fmt: skip
    assert rows["CUDA: decode step, launches of its graphs"]["goal"] == "<= 0.03"
    assert "exec to first chat token, --cuda" in rows


def test_without_a_device_the_line_and_code_of_the_probe_are_all(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    environment = programs.plain_environment() | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = bench(environment)
    assert done.returncode == 41
    assert done.stderr.startswith("ds4-bench: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("sizes", ["1,0", "ten", "-1"])
def test_sizes_that_are_none_are_a_usage_error(sizes: str) -> None:
    done = bench(programs.plain_environment(), f"--attach-gb={sizes}")
    assert done.returncode == 2
    assert "expected sizes above 0" in done.stderr


def test_ranges_of_a_device_without_memory_of_its_own_leave_the_system_some() -> None:
    """There the driver's "free" is MemFree, which may be more than programs can give up."""
    free, available = 119 << 30, 100 << 30
    assert gpu_memory.usable_bytes(True, free, available) == 88 << 30
    assert gpu_memory.usable_bytes(True, free, 1 << 30) == 0
    assert gpu_memory.usable_bytes(False, 100, 0) == 95
