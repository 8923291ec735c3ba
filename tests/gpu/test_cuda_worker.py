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
from helpers.device_stack import Device
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


@STAND_IN
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("cuMemAlloc:3:2", 46),
        ("cuMemImportFromShareableHandle:1:2", 46),
        ("cuModuleLoadData:2:209", 40),
    ],
)
def test_a_worker_that_cannot_start_ends_with_the_code_of_its_reason(
    on_device: Device, model: Model, run: Path, fault: str, code: int
) -> None:
    on_device.owner(model.path, run)
    held = on_device.used_bytes()
    refused = launch(on_device, model, run, stack.free_port(), "--cuda", fault=fault)
    assert refused.wait() == code, refused.text
    assert refused.text.count("CUDA driver: ") == 1
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
