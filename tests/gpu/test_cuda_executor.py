"""The CUDA executor computes what the CPU executor computes, to the bit, and nothing else happens.

By default on the stand-in driver with kernels that g++ built, in lazy and eager mode; with
DS4_TEST_GPU=1 (`make gpu-test`) the same on this machine's device, where the last bit of a cosine
may differ (cuda/rope.cu), and so logits by some ten thousandths of their spread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ds4_common.gguf import GgmlType
from ds4_common.quants import QuantType
from ds4_worker.executor.api import KV_DTYPES
from golden import tiny
from helpers import cuda_claims as claims
from helpers import cuda_stand_in
from helpers.driver import processes

ON_DEVICE = os.environ.get("DS4_TEST_GPU") == "1"
MISSING = "" if ON_DEVICE else cuda_stand_in.missing()
pytestmark = [pytest.mark.gpu] if ON_DEVICE else [pytest.mark.skipif(bool(MISSING), reason=MISSING)]
TOLERANCE = 1e-3 if ON_DEVICE else 0.0  # of logits, against their spread
Settings = dict[str, str] | None
MODES: dict[str, Settings] = (
    {"device": None}
    if ON_DEVICE
    else {"lazy": {"streams": "lazy", "host": "hidden"}, "eager": {"streams": "eager"}}
)
CASES = [(family, case.name) for family in tiny.FAMILIES for case in tiny.cases_of(family)]
# Nobody quantizes to these here; tests/worker/test_cuda_weights.py has blocks of them.
UNMADE = (QuantType.IQ1_M, QuantType.NVFP4, QuantType.Q1_0)
# Rows of 32 and more get blocks, the narrow ones floats.
MIX = (GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.F16, GgmlType.Q5_1, GgmlType.BF16, GgmlType.Q4_1)


class Process:
    """Runs claims where a device is seen."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __call__(self, claim: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(claim, *arguments).result(timeout=600)


@pytest.fixture(scope="module")
def first() -> Iterator[Process]:
    """In the first of the modes only: what does not depend on it."""
    with processes.process(next(iter(MODES.values()))) as pool:
        yield Process(pool)


@pytest.fixture(scope="module", params=MODES)
def each(request: pytest.FixtureRequest) -> Iterator[Process]:
    with processes.process(MODES[request.param]) as pool:
        yield Process(pool)


def agrees(found: dict[str, Any]) -> bool:
    return bool(found["error"] <= TOLERANCE and (ON_DEVICE or found["equal"]))


# --- numerics ---


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_logits_are_those_of_the_cpu(each: Process, kv_dtype: str) -> None:
    found = each(claims.llama_logits, kv_dtype)
    assert agrees(found), found


@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0"])
def test_chunks_neighbours_and_decoding_change_no_bit(first: Process, kv_dtype: str) -> None:
    assert first(claims.whatever_happens_around, kv_dtype) == {"decoded": True, "neighbour": True}


@pytest.mark.parametrize(
    "types",
    [[t] for t in QuantType if t not in UNMADE]
    + [[QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0]],
    ids=lambda types: "-".join(QuantType(t).name for t in types),
)
def test_every_type_of_weights_gives_the_bits_of_the_cpu(first: Process, types: list[int]) -> None:
    found = first(claims.weight_types, types)
    assert agrees(found), found


@pytest.mark.parametrize(("family", "case"), CASES, ids=[f"{f}-{c}" for f, c in CASES])
def test_every_family_gives_the_bits_of_the_cpu(first: Process, family: str, case: str) -> None:
    found = first(claims.family_logits, family, case, MIX)
    assert agrees(found), found


@pytest.mark.parametrize(
    ("family", "case"),
    [("deepseek4", "long"), ("deepseek2", "absorbed"), ("gemma3", "plain"), ("gpt_oss", "plain")],
)
def test_pieces_of_a_prompt_change_no_bit_of_other_histories_either(
    first: Process, family: str, case: str
) -> None:
    found = first(claims.family_in_pieces, family, case)
    assert found == {"decoded": True, "neighbour": True}


def test_sequences_that_outgrow_their_windows_draw_the_tokens_of_the_cpu(first: Process) -> None:
    found = first(claims.windowed_answers)
    assert found["windows"] == [40]
    assert found["cuda"] == found["cpu"]
    assert [len(tokens) for tokens in found["cuda"]] == [20, 20, 20]


# --- the boundary ---


def test_draws_scores_and_drafts_are_those_of_the_cpu(first: Process) -> None:
    for name, (tokens, everything) in first(claims.draws).items():
        assert tokens, name
        assert everything or ON_DEVICE, name


@pytest.mark.parametrize("room", [8192, 7], ids=["whole", "in parts"])
def test_masks_biases_and_penalties_are_those_of_the_cpu_behind_drafts_too(
    each: Process, room: int
) -> None:
    for name, same in each(claims.lists, room).items():
        assert all(same), (name, same)


def test_copied_and_shared_pages_give_the_bits_of_computed_ones(first: Process) -> None:
    assert first(claims.copied_pages) == {"copied": True, "mapped": True}


@pytest.mark.skipif(ON_DEVICE, reason="reads the log of the stand-in")
def test_steps_allocate_compile_and_capture_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with processes.process({"log": str(log)}) as pool:
        assert Process(pool)(claims.steps_of_every_size) == 0
    calls = [line.split()[1] for line in log.read_text().splitlines()]
    marks = [i for i, call in enumerate(calls) if call.startswith("cuMemGetInfo")]
    assert len(marks) == 2
    assert {call.removesuffix("_v2") for call in calls[marks[0] + 1 : marks[1]]} == {
        "cuCtxSetCurrent", "cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync",
        "cuEventRecord", "cuEventSynchronize", "cuMemcpyDtoDAsync",
    }  # fmt: skip


# --- failures ---


@pytest.mark.skipif(ON_DEVICE, reason="injects faults into the stand-in")
@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        ("cuMemAlloc:3:2", "CudaOutOfMemory", 46),
        ("cuMemHostAlloc:4:2", "CudaOutOfMemory", 46),
        ("cuGraphInstantiate:2:2", "CudaOutOfMemory", 46),
        ("cuGraphLaunch:3:sticky", "ExecutorFailure", 49),
        ("cuEventSynchronize:5:sticky", "ExecutorFailure", 49),
    ],
)
def test_a_device_that_fails_ends_the_executor_with_its_exit_code(
    fault: str, kind: str, code: int
) -> None:
    with processes.process({"fault": fault}) as pool:
        found = Process(pool)(claims.fails_with)
    assert found[:2] == [kind, code]
    assert "CUDA driver: " in found[2]
