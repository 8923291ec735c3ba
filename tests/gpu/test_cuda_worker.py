"""Workers on a CUDA device as processes: owner with device memory, broker, worker, HTTP, deaths.

On the stand-in driver, with kernels that g++ built; with DS4_TEST_GPU=1 (`make gpu-test`) on this
machine's device, without the tests that inject faults. The answers are those of the CPU executor.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds4_common import client
from ds4_common.allocation import ArtifactKind
from ds4_common.gguf import GgmlType
from ds4_worker.executor.api import ExecutorConfig
from golden import tiny
from helpers import stack
from helpers.device_stack import Device, owner_flags
from helpers.device_worker import (
    BODY,
    COUNT,
    MARKS,
    PROMPT,
    STAND_IN,
    Model,
    answer,
    launch,
    worker,
)
from helpers.models import smollm2_path
from helpers.stack import Program
from helpers.wide_experts import TWO_BIT, wide_experts

pytestmark = MARKS
SMALL_CHUNKS = ("--prefill-chunk", "8", "--mixed-prefill-quantum", "7")


# --- the whole path ---


def test_a_worker_answers_as_the_cpu_does_and_outlives_kills_on_both_sides(
    on_device: Device, model: Model, expected: str, run: Path
) -> None:
    port = stack.free_port()
    owner = on_device.owner(model.path, run)
    held = on_device.used_bytes()
    with worker(on_device, model, run, port) as first:
        assert answer(port) == expected
        first.stop(signal.SIGKILL)
    assert on_device.used_bytes() == held  # all of the worker's own memory is free again
    with worker(on_device, model, run, port) as second:
        assert answer(port) == expected
        owner.stop(signal.SIGKILL)
        assert answer(port) == expected  # its mappings are its own
        assert second.stop() == 0


@STAND_IN
def test_a_worker_killed_with_two_steps_under_way_leaves_nothing_behind(
    on_device: Device, model: Model, expected: str, run: Path
) -> None:
    """It dies waiting for the first of them; the next worker has the request that it had."""
    port = stack.free_port()
    on_device.owner(model.path, run)
    held = on_device.used_bytes()
    body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}  # all of it by the device
    with ThreadPoolExecutor(1) as client:
        with worker(on_device, model, run, port, fault="cuEventSynchronize:5:kill") as first:
            reply = client.submit(stack.request, port, "POST", "/v1/completions", body)
            assert first.wait() == -signal.SIGKILL
        assert on_device.used_bytes() == held
        with worker(on_device, model, run, port, "--speculate", "off"):
            status, found = reply.result(timeout=60)
            assert (status, found["choices"][0]["text"]) == (200, expected)
            _, metrics = stack.request(port, "GET", "/metrics")
    assert f"ds4_steps_ahead_total {COUNT - 1}.0" in metrics.splitlines()


def test_the_real_small_model_continues_as_on_the_cpu_after_a_kill(
    on_device: Device, run: Path, tmp_path: Path
) -> None:
    """Few tokens: the stand-in takes seconds for each."""
    config = ExecutorConfig(threads=1, banks=1, context_tokens=64, batch_tokens=8)
    model, port = Model(smollm2_path(), config, tmp_path), stack.free_port()
    ids = model.answer(PROMPT[:5], 2)
    on_device.owner(model.path, run)
    shape = [*("--ctx", "64", "--max-seqs", "1"), *SMALL_CHUNKS]
    body = {**BODY, "prompt": PROMPT[:5], "max_tokens": 2, "return_token_ids": True}
    for end in (signal.SIGKILL, signal.SIGTERM):
        with worker(on_device, model, run, port, *shape) as program:
            status, reply = stack.request(port, "POST", "/v1/completions", body)
            assert status == 200, reply
            assert reply["choices"][0]["token_ids"] == ids
            program.stop(end)


def test_experts_in_the_layouts_of_devices_answer_as_raw_ones_on_the_cpu(
    on_device: Device, run: Path, tmp_path: Path
) -> None:
    case = wide_experts()
    path = tiny.write_gguf(case, tmp_path / "model.gguf", TWO_BIT)
    config = ExecutorConfig(threads=1, banks=2, context_tokens=case.context, batch_tokens=16)
    model, port = Model(path, config, tmp_path), stack.free_port()
    ids = model.answer(PROMPT, 4)
    on_device.owner(model.path, run)
    with client.connect(str(run / "w"), "inspect") as owner:
        records = owner.describe_allocations()
        kinds = {record.artifact.kind for record in records if record.artifact}
    assert kinds == {ArtifactKind.IQ2_XXS_ALIGNED, ArtifactKind.Q2_K_ALIGNED}
    body = {**BODY, "prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
    for end in (signal.SIGKILL, signal.SIGTERM):
        with worker(on_device, model, run, port) as program:
            status, reply = stack.request(port, "POST", "/v1/completions", body)
            assert status == 200, reply
            assert reply["choices"][0]["token_ids"] == ids
            program.stop(end)


def test_requests_at_once_get_the_answer_of_one_alone(
    on_device: Device, model: Model, expected: str, run: Path
) -> None:
    port = stack.free_port()
    on_device.owner(model.path, run)
    with worker(on_device, model, run, port):
        body = {"prompt": [PROMPT] * 3, **BODY}
        status, reply = stack.request(port, "POST", "/v1/completions", body)
        assert status == 200, reply
        assert {choice["text"] for choice in reply["choices"]} == {expected}


def test_weights_in_host_memory_are_copied_only_when_a_flag_asks_for_it(
    on_device: Device, model: Model, expected: str, run: Path
) -> None:
    port = stack.free_port()
    with stack.owner(model.path, run, "--backend", "memfd", "--cpu-layout", "raw"):
        refused = launch(on_device, model, run, port, "--cuda")
        assert refused.wait() == 1
        assert "holds its weights in host memory (backend memfd)" in refused.text
        assert "--cuda-copy" in refused.text
        with worker(on_device, model, run, port, "--cuda-copy"):
            assert answer(port) == expected


# --- refusals and failures ---


def test_device_memory_is_no_place_for_a_cpu_worker(
    on_device: Device, model: Model, run: Path
) -> None:
    on_device.owner(model.path, run)
    refused = launch(on_device, model, run, stack.free_port())
    assert refused.wait() == 1
    assert "where a CPU cannot read them; add --cuda" in refused.text


@STAND_IN
def test_a_simulated_device_is_refused_without_the_flag_of_tests(
    on_device: Device, model: Model, run: Path
) -> None:
    on_device.owner(model.path, run)
    environment = {**on_device.environment(), "DS4_CUDA_SIMULATED": "0"}
    refused = Program.start(
        "ds4_worker.cli", "--cuda", "--manifest", str(run / "w"), "--port", "0", **environment
    )
    assert refused.wait() == 45
    assert "is a simulation for tests" in refused.text


def test_cpu_layouts_are_refused_by_name(on_device: Device, run: Path) -> None:
    """An owner that packed its weights for CPUs, and a worker that shall copy them."""
    case = tiny.cases_of("qwen3")[0]
    path = tiny.write_gguf(case, run / "model.gguf", (GgmlType.Q8_0, GgmlType.F16))
    port = stack.free_port()
    with stack.owner(path, run, "--backend", "memfd", "--cpu-layout", "packed"):
        environment = on_device.environment()
        refused = Program.start(
            "ds4_worker.cli", "--cuda", "--cuda-copy", "--manifest", str(run / "w"),
            "--port", str(port), **environment,
        )  # fmt: skip
        assert refused.wait() == 1
        assert "no kernels for: weights of Q8_0 in layout 1" in refused.text


# Settings of the stand-in under the worker; its exit code, and a part of its line.
STARTS: dict[str, tuple[dict[str, str], int, str]] = {
    "no driver": ({"library_path": ""}, 41, "no CUDA driver"),
    "an old driver": ({"driver": "12080"}, 42, "got CUDA 12.8, expected 13.0"),
    "no device": ({"fault": "cuInit:1:100"}, 43, "no CUDA device is visible"),
    "no VMM": ({"lacks": "vmm"}, 44, "no virtual memory management"),
    "no export": ({"lacks": "fd"}, 44, "no export of memory as file descriptors"),
    "another device": ({"profile": "integrated"}, 45, "not among the devices here"),
    "another driver": ({"granularity_kb": "4096"}, 48, "maps in units of 4194304 bytes"),
    "no memory": ({"fault": "cuMemAlloc:3:2"}, 46, "OUT_OF_MEMORY"),
    "no memory to import": ({"fault": "cuMemImportFromShareableHandle:1:2"}, 46, "OUT_OF_MEMORY"),
    "no import": ({"fault": "cuMemImportFromShareableHandle:1:1"}, 47, "is no device memory"),
    "no mapping": ({"fault": "cuMemMap:1:1"}, 47, "of another size than announced"),
    "no reading": ({"fault": "cuMemSetAccess:1:801"}, 40, "NOT_SUPPORTED"),
    "a device taken": ({"fault": "cuDevicePrimaryCtxRetain:1:46"}, 40, "nvidia-smi -q -d COMPUTE"),
    "a fault": ({"fault": "cuEventSynchronize:1:700"}, 49, "the context is lost"),
    "other code": ({"fault": "cuModuleLoadData:2:209"}, 40, "NO_BINARY_FOR_GPU"),
}


@STAND_IN
@pytest.mark.parametrize("why", STARTS)
def test_a_worker_that_cannot_start_ends_with_one_line_and_the_code_of_its_reason(
    on_device: Device, model: Model, run: Path, why: str
) -> None:
    settings, code, says = STARTS[why]
    owner = on_device.owner(model.path, run)
    held, descriptors = on_device.used_bytes(), on_device.descriptors(owner.process.pid)
    refused = launch(on_device, model, run, stack.free_port(), "--cuda", **settings)
    assert refused.wait() == code, refused.text
    assert says in refused.text
    assert len(refused.lines) == 1, refused.text
    assert on_device.used_bytes() == held
    assert on_device.descriptors(owner.process.pid) == descriptors


@STAND_IN
@pytest.mark.parametrize("why", ["no driver", "an old driver", "no VMM"])
def test_a_worker_whose_private_owner_cannot_start_ends_with_the_owner_s_code(
    on_device: Device, model: Model, run: Path, why: str
) -> None:
    settings, code, says = STARTS[why]
    nothing = {"LD_LIBRARY_PATH": ""}
    environment = nothing if why == "no driver" else on_device.environment(**settings)
    refused = Program.start(
        "ds4_worker.cli", "--cuda", "-m", str(model.path), "--port", "0",
        **environment, XDG_RUNTIME_DIR=str(run),
    )  # fmt: skip
    assert refused.wait() == code, refused.text
    assert says in refused.lines[-1]
    assert on_device.used_bytes() == 0
    assert list((run / "ds4").iterdir()) == []


@STAND_IN
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("smaller", "the descriptor is of another size than announced"),
        ("blank", "samples of the mapped memory have hash"),
        ("foreign", "is no device memory of this machine's driver"),
    ],
)
def test_an_owner_that_hands_out_other_memory_is_refused_in_one_line(
    on_device: Device, run: Path, tmp_path: Path, kind: str, says: str
) -> None:
    model = Model(smollm2_path(), ExecutorConfig(context_tokens=64), tmp_path, kernels=False)
    liar = on_device.launch("helpers.lying_owner", kind, *owner_flags(model.path, run))
    liar.wait_for("ready manifest=")
    held = on_device.used_bytes()
    refused = launch(on_device, model, run, stack.free_port(), "--cuda")
    assert refused.wait() == 47, refused.text
    assert says in refused.text
    assert len(refused.lines) == 1, refused.text
    assert on_device.used_bytes() == held


@STAND_IN
@pytest.mark.parametrize(
    ("module", "cache", "code", "says"),
    [
        ("helpers.no_compiler", "{run}/cubins", 50, "NVRTC: cannot be loaded"),
        ("ds4_worker.cli", "/proc/nowhere", 52, "cannot be kept in /proc/nowhere"),
        ("ds4_worker.cli", "{run}/lock", 52, "cannot be read"),
        ("ds4_worker.cli", "{run}/cubins", 40, "NO_BINARY_FOR_GPU"),  # only then: it was compiled
    ],
)
def test_kernels_that_cannot_be_had_are_one_line_with_a_code_of_their_own(
    on_device: Device, model: Model, run: Path, module: str, cache: str, code: int, says: str
) -> None:
    on_device.owner(model.path, run)
    held = on_device.used_bytes()
    arguments = ("--cuda", "--manifest", str(run / "w"), "--port", "0", "--max-seqs", "1")
    flags = ("--cuda-cache", cache.format(run=run), "--prefill-chunk", "16")
    refused = on_device.launch(module, *arguments, *flags)
    assert refused.wait() == code, refused.text
    assert says in refused.text
    assert len(refused.lines) == 1, refused.text
    assert on_device.used_bytes() == held


@STAND_IN
def test_a_lost_context_fails_the_requests_and_ends_the_worker(
    on_device: Device, model: Model, expected: str, run: Path
) -> None:
    port = stack.free_port()
    on_device.owner(model.path, run)
    with worker(on_device, model, run, port, fault="cuGraphLaunch:4:sticky") as broken:
        status, reply = stack.request(port, "POST", "/v1/completions", {"prompt": PROMPT, **BODY})
        assert status == 500, reply
        assert broken.wait() == 49
        assert "the context is lost" in broken.text
    with worker(on_device, model, run, port):
        assert answer(port) == expected
