"""Owners of device memory on the stand-in driver: what they hold, say, hand out and refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4_common import client
from ds4_common.allocation import ArtifactKind
from ds4_common.manifest import read_manifest
from helpers import cuda_stand_in, stack
from helpers.device_stack import Device, device, every_kind, owner_flags
from helpers.tiny_gguf import write_llama

pytestmark = pytest.mark.skipif(bool(cuda_stand_in.missing()), reason=cuda_stand_in.missing())
MODES = {
    "lazy": {"streams": "lazy"},
    "eager": {"streams": "eager"},
    "integrated": {"profile": "integrated", "granularity_kb": "8192"},
}
# What the resident process may ask of the driver: nothing that needs a context.
RESIDENT_CALLS = {
    "cuInit", "cuDriverGetVersion", "cuGetProcAddress", "cuDeviceGet", "cuDeviceGetCount",
    "cuDeviceGetName", "cuDeviceGetUuid", "cuDeviceGetAttribute", "cuDeviceTotalMem",
    "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemRelease",
}  # fmt: skip


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_kind(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=MODES)
def simulated(request: pytest.FixtureRequest) -> Iterator[Device]:
    with device(**MODES[request.param]) as made:
        yield made


@pytest.fixture
def discrete() -> Iterator[Device]:
    with device() as made:
        yield made


def hashes(run: Path) -> dict[str, str]:
    """As the owner says them; keys as JSON has them."""
    with client.connect(str(run / "w"), "inspect") as owner:
        return {str(record.id): record.hash128 for record in owner.describe_allocations()}


# What it holds


def test_the_device_holds_what_host_memory_would(simulated: Device, kinds: Path, run: Path) -> None:
    """The same plan, the same bytes: hashed while loading, and again by a client on the device."""
    flags = ("--cpu-layout", "raw", "--repack-q8-aligned", "--backend", "memfd")
    with stack.owner(kinds, run, *flags):
        expected = hashes(run)
    program = simulated.owner(kinds, run)
    assert hashes(run) == expected
    worker = simulated.client(run)
    assert worker.ask("map") == expected
    manifest = read_manifest(str(run / "w"))
    assert manifest.backend == "vmm"
    assert {a.artifact.kind for a in manifest.allocations if a.artifact is not None} == {
        ArtifactKind.IQ2_XXS_ALIGNED, ArtifactKind.IQ2_XS_ALIGNED, ArtifactKind.Q2_K_ALIGNED,
        ArtifactKind.Q8_0_ALIGNED, ArtifactKind.MLA_KV_B,
    }  # fmt: skip
    unit = int(simulated.settings.get("granularity_kb", "2048")) << 10
    assert all(a.alloc_bytes % unit == 0 for a in manifest.allocations)
    worker.end()
    assert program.stop() == 0
    assert simulated.used_bytes() == 0


def test_small_stages_make_the_same_bytes(discrete: Device, kinds: Path, run: Path) -> None:
    """Artifacts in dozens of parts, through more threads than there are cores."""
    program = discrete.owner(kinds, run)
    expected = hashes(run)
    assert program.stop() == 0
    small = discrete.launch(
        "helpers.small_stages", *owner_flags(kinds, run, "--repack-threads", "4")
    )
    small.wait_for("ready manifest=")
    assert hashes(run) == expected
    assert small.stop() == 0


def test_the_resident_process_makes_no_context_and_maps_nothing(
    discrete: Device, kinds: Path, run: Path, tmp_path: Path
) -> None:
    log = tmp_path / "calls"
    program = discrete.owner(kinds, run, log=str(log))
    worker = discrete.client(run)
    worker.ask("map")
    worker.end()
    assert program.stop() == 0
    pid = str(program.process.pid)
    calls = {line.split()[1] for line in log.read_text().splitlines() if line.split()[0] == pid}
    assert calls - RESIDENT_CALLS == set()
    assert {"cuMemCreate", "cuMemExportToShareableHandle", "cuMemRelease"} <= calls


def test_handing_memory_out_leaves_no_descriptor_of_it_open(
    discrete: Device, kinds: Path, run: Path
) -> None:
    program = discrete.owner(kinds, run)
    worker = discrete.client(run)
    before = discrete.descriptors(program.process.pid)  # the stand-in's own, one per allocation
    for _ in range(3):
        worker.ask("map")
        assert discrete.descriptors(worker.process.pid) == before
        worker.ask("close")
    assert discrete.descriptors(program.process.pid) == before
    assert discrete.descriptors(worker.process.pid) == 0


def test_a_model_of_a_known_family_gets_what_a_worker_on_the_device_needs(
    discrete: Device, tmp_path: Path, run: Path
) -> None:
    program = discrete.owner(write_llama(tmp_path / "tiny.gguf"), run)
    with client.connect(str(run / "w"), "inspect") as owner:
        names = {blob.name for blob in owner.welcome.blobs}
        owner.map_blobs(sorted(names))
    assert names == {"contract", "image.cuda", "tokenizer", "frontend", "tensors"}
    assert program.stop() == 0


# Commands


def test_status_and_verify_understand_device_memory(
    discrete: Device, kinds: Path, run: Path
) -> None:
    program = discrete.owner(kinds, run)
    assert "ds4 sim discrete, GPU-" in command(discrete, run, "status").stdout
    done = command(discrete, run, "verify", "--rate", "0")
    assert done.returncode == 0, done.stderr
    assert "as it was loaded" in done.stdout
    assert program.stop() == 0


def command(on: Device, run: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ds4_owner.cli", name, "--manifest", str(run / "w"), *more],
        capture_output=True, text=True, env=stack.process_environment(**on.environment()),
    )  # fmt: skip


def test_verify_finds_bytes_that_were_changed_on_the_device(
    discrete: Device, kinds: Path, run: Path
) -> None:
    program = discrete.owner(kinds, run)
    writer = discrete.client(run)
    writer.ask("map")
    assert writer.ask("scribble") == "written"
    done = command(discrete, run, "verify", "--rate", "0", "--json")
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    assert [(f["subject"], f["name"]) for f in findings] == [("allocation", "0")]
    assert program.stop() == 0


@pytest.mark.parametrize("profile", ["discrete", "integrated"])
def test_a_dry_run_prints_the_budget_of_the_device_and_allocates_nothing(
    kinds: Path, tmp_path: Path, profile: str
) -> None:
    log = tmp_path / "calls"
    with device(profile=profile, log=str(log)) as made:
        program = made.launch("ds4_owner.cli", *owner_flags(kinds, tmp_path, "--dry-run"))
        assert program.wait() == 0, program.text
        assert program.lines[-1].endswith("no allocations or manifest were created")
        pool = "free device memory" if profile == "discrete" else "available memory"
        assert f"have: {pool}" in program.text
        assert f"integrated={int(profile == 'integrated')}" in program.text
        assert "base artifacts IQ2_XXS_ALIGNED" in program.text
        assert " cuMemCreate" not in log.read_text()


# Memory that is not there


def test_a_plan_that_never_fits_is_refused_at_once(kinds: Path, run: Path) -> None:
    with device(total_mb="1040") as small:  # less than the plan and the reserve of 1 GiB
        program = small.launch("ds4_owner.cli", *owner_flags(kinds, run))
        assert program.wait() == 1
        assert re.search(r"ds4 sim discrete: need .* free device memory; short by", program.text)
        assert "waiting" not in program.text
        assert small.used_bytes() == 0


def test_an_integrated_device_is_judged_by_available_memory(kinds: Path, run: Path) -> None:
    with device(profile="integrated") as made:
        program = made.launch("ds4_owner.cli", *owner_flags(kinds, run), "--reserve-gb", "1000000")
        assert program.wait() == 1
        assert "the available memory; short by" in program.text
        assert made.used_bytes() == 0


def test_memory_of_a_worker_that_dies_while_we_start_is_waited_for(kinds: Path, run: Path) -> None:
    with device(total_mb="1060") as small:
        first = small.owner(kinds, run)
        worker = small.client(run)
        worker.ask("map")
        assert first.stop() == 0  # its worker keeps the memory
        second = small.launch("ds4_owner.cli", *owner_flags(kinds, run))
        second.wait_for("too little device memory; waiting")
        worker.end()
        second.wait_for("ready manifest=")
        assert second.stop() == 0
        assert small.used_bytes() == 0


@pytest.mark.parametrize("times", ["2", "2+"])
def test_an_allocation_out_of_memory_is_tried_again_until_the_deadline(
    discrete: Device, kinds: Path, run: Path, times: str
) -> None:
    fault = f"cuMemCreate:{times}:2"
    program = discrete.launch("helpers.small_stages", *owner_flags(kinds, run), fault=fault)
    program.wait_for("base-1: too little device memory; waiting 1 s")
    if times == "2":
        program.wait_for("ready manifest=")
        assert program.stop() == 0
    else:
        assert program.wait() == 46
        assert "CUDA_ERROR_OUT_OF_MEMORY" in program.lines[-1]
    assert discrete.used_bytes() == 0


# Refusals: one line, an exit code of its own, nothing left

REFUSALS: dict[str, tuple[dict[str, str], int, str]] = {
    "an old driver": ({"driver": "12080"}, 42, "got CUDA 12.8, expected 13.0"),
    "no device": ({"fault": "cuInit:1+:100"}, 43, "no CUDA device is visible"),
    "no VMM": ({"lacks": "vmm"}, 44, "no virtual memory management"),
    "no export": ({"lacks": "fd"}, 44, "no export of memory as file descriptors"),
    "no descriptors": (
        {"fault": "ds4_owner.cli/cuMemExportToShareableHandle:1+:304"}, 40, "OPERATING_SYSTEM",
    ),
    "no context": ({"fault": "ds4_owner.loader/cuDevicePrimaryCtxRetain:1+:2"}, 46, "OUT_OF_MEM"),
    "no import": ({"fault": "ds4_owner.loader/cuMemImportFromShareableHandle:2:1"}, 47, "base-1"),
    "no stage": ({"fault": "ds4_owner.loader/cuMemHostAlloc:2:2"}, 46, "upload stage"),
    "a lost context": ({"fault": "ds4_owner.loader/cuMemcpyHtoDAsync:3:sticky"}, 49, "lost"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSALS)
def test_what_the_driver_lacks_is_one_line_with_its_own_exit_code(
    kinds: Path, run: Path, why: str
) -> None:
    settings, code, says = REFUSALS[why]
    with device(**settings) as made:
        program = made.launch("ds4_owner.cli", *owner_flags(kinds, run))
        assert program.wait() == code, program.text
        assert says in program.lines[-1]
        assert "Traceback" not in program.text
        assert made.used_bytes() == 0
        assert {path.name for path in run.iterdir()} <= {"lock"}


def test_a_machine_without_a_driver_exits_41(kinds: Path, run: Path) -> None:
    program = stack.Program.start("ds4_owner.cli", *owner_flags(kinds, run), LD_LIBRARY_PATH="")
    assert program.wait() == 41
    assert "no CUDA driver" in program.lines[-1]
    assert "--backend memfd" in program.lines[-1]


def test_a_device_number_that_does_not_exist_exits_45(
    discrete: Device, kinds: Path, run: Path
) -> None:
    program = discrete.launch("ds4_owner.cli", *owner_flags(kinds, run, "--device", "3"))
    assert program.wait() == 45
    assert "no CUDA device 3" in program.lines[-1]


def test_a_simulated_device_is_refused_outside_tests(
    discrete: Device, kinds: Path, run: Path
) -> None:
    environment = discrete.environment() | {"DS4_CUDA_SIMULATED": ""}
    program = stack.Program.start("ds4_owner.cli", *owner_flags(kinds, run), **environment)
    assert program.wait() == 45
    assert "is a simulation for tests" in program.lines[-1]


def test_preflight_counts_what_the_old_owner_holds_on_the_same_device(
    kinds: Path, run: Path
) -> None:
    """Total 1060 MiB: the reserve of 1 GiB, and one plan, but not two."""
    with device(total_mb="1060") as small:
        program = small.owner(kinds, run)
        done = subprocess.run(
            [sys.executable, "-m", "ds4_owner.cli", "preflight", str(kinds), "--manifest",
             str(run / "w"), "--json"],
            capture_output=True, text=True, env=stack.process_environment(**small.environment()),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        forecast = json.loads(done.stdout)["budget"]
        assert forecast["limits"].keys() == {"free device memory"}
        assert forecast["returned"] == 24 << 20
        assert forecast["refusal"] == ""
        assert program.stop() == 0


def test_a_worker_on_the_cpu_says_that_the_weights_are_elsewhere(
    discrete: Device, tmp_path: Path, run: Path
) -> None:
    program = discrete.owner(write_llama(tmp_path / "tiny.gguf"), run)
    worker = discrete.launch("ds4_worker.cli", "--manifest", str(run / "w"), "--port", "0")
    assert worker.wait() == 1
    assert "holds its weights on ds4 sim discrete" in worker.lines[-1]
    assert program.stop() == 0
