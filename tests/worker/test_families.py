"""Every family computes what two independent implementations compute, and always the same bits."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from ds4_common import quants
from ds4_common.allocation import Layout
from ds4_common.gguf import GgmlType
from ds4_common.quants.native import best_isa
from ds4_owner.recipes import architectures
from ds4_worker.executor.api import ExecutorConfig, Slice
from ds4_worker.executor.reference import ReferenceExecutor
from golden import tiny
from golden.deepseek4.cases import REAL, REAL_TYPES
from helpers.executors import cpu_executor, logits, packed
from helpers.prepared import Prepared, prepare_file

CASES = [(family, case) for family in tiny.FAMILIES for case in tiny.cases_of(family)]
EACH = pytest.mark.parametrize(
    ("family", "case"), CASES, ids=[f"{family}-{case.name}" for family, case in CASES]
)
Rows = npt.NDArray[np.floating[Any]]
Make = Callable[[tiny.Case], Prepared]


@pytest.fixture
def prepare(tmp_path: Path) -> Make:
    return lambda case: prepare_file(tiny.write_gguf(case, tmp_path / "case.gguf"))


@functools.cache
def golden(family: str) -> dict[str, dict[str, Any]]:
    logits: dict[str, dict[str, Any]]
    logits = json.loads(tiny.logits_path(family).read_text())["logits"]
    return logits


def config(case: tiny.Case, **changes: Any) -> ExecutorConfig:
    made = ExecutorConfig(
        threads=2, banks=2, context_tokens=case.context, kv_dtype="f32", batch_outputs=64
    )
    return replace(made, **changes)


def by_cpu(prepared: Prepared, case: tiny.Case, **changes: Any) -> Rows:
    executor = cpu_executor(prepared, config(case, **changes))
    rows = logits(executor, tiny.tokens(case))
    executor.close()
    return rows


def unrounded(prepared: Prepared) -> Prepared:
    """The model without rounding to small floats, which the other implementations leave out."""
    program = prepared.bundle.execution.programs[0].ops
    kept = [op for op in program.ops if op.kernel != "round_floats"]
    del program.ops[:]
    program.ops.extend(kept)
    return prepared


@EACH
def test_the_reference_agrees_with_transformers(
    family: str, case: tiny.Case, prepare: Make
) -> None:
    prepared = unrounded(prepare(case))
    made = ReferenceExecutor(prepared.bundle, prepared.allocations, config(case), np.float64)
    made.map_all_pages()
    rows = made.all_logits([Slice(0, 0, tiny.tokens(case))])
    expected = golden(family)[case.name]["transformers"]
    # Their rotations and routers are rounded to float32.
    np.testing.assert_allclose(rows[list(case.rows)], expected, rtol=0, atol=5e-5)


@EACH
def test_the_cpu_executor_agrees_with_both(family: str, case: tiny.Case, prepare: Make) -> None:
    rows = by_cpu(unrounded(prepare(case)), case)[list(case.rows)]
    expected = golden(family)[case.name]
    assert ("llama.cpp" in expected) == case.peer
    near = 2e-3 if case.rounded else 3e-4  # its rows are halves
    np.testing.assert_allclose(rows, expected["transformers"], rtol=0, atol=near)
    if case.peer:  # its GELU is a table of halves
        np.testing.assert_allclose(rows, expected["llama.cpp"], rtol=0, atol=8e-3)


@pytest.mark.parametrize(
    "case", [case for _, case in CASES if case.rounded], ids=lambda case: str(case.name)
)
def test_rounding_to_small_floats_changes_results_as_the_reference_says(
    case: tiny.Case, prepare: Make
) -> None:
    prepared = prepare(case)
    made = ReferenceExecutor(prepared.bundle, prepared.allocations, config(case))
    made.map_all_pages()
    exact = made.all_logits([Slice(0, 0, tiny.tokens(case))])
    rows = by_cpu(prepared, case)
    np.testing.assert_allclose(rows, exact, rtol=0, atol=1e-3)
    error = np.abs(by_cpu(unrounded(prepared), case) - exact).max(1)
    assert float(np.median(error)) > 1e-2


@EACH
def test_instruction_sets_threads_and_chunks_change_no_bit(
    family: str, case: tiny.Case, prepare: Make
) -> None:
    prepared = prepare(case)
    whole = by_cpu(prepared, case, kv_dtype="f16")
    assert (by_cpu(prepared, case, kv_dtype="f16", threads=1, isa="scalar") == whole).all()
    executor = cpu_executor(prepared, config(case, kv_dtype="f16", threads=3))
    ids = tiny.tokens(case)
    parts = [executor.logits([Slice(1, 0, ids[:19]), Slice(0, 0, ids[:5])])]
    parts += [executor.logits([Slice(0, 5, ids[5:6]), Slice(1, 19, ids[19:])])]
    executor.close()
    assert (np.array(parts[0][0] + parts[1][1], np.float32) == whole).all()
    assert (np.array(parts[0][1] + parts[1][0], np.float32) == whole[:6]).all()


# Block types for rows of 32 and more, and floats for the narrow ones.
MIX = (
    GgmlType.Q8_0, GgmlType.MXFP4, GgmlType.Q4_0, GgmlType.F16, GgmlType.Q5_1, GgmlType.IQ4_NL,
    GgmlType.BF16, GgmlType.Q4_1,
)  # fmt: skip


@EACH
def test_block_types_stay_near_the_reference(family: str, case: tiny.Case, tmp_path: Path) -> None:
    prepared = prepare_file(tiny.write_gguf(case, tmp_path / "case.gguf", MIX))
    types = {b.ggml_type for b in prepared.bundle.execution.buffers if len(b.shape) > 1}
    assert len(types) >= 5
    made = ReferenceExecutor(prepared.bundle, prepared.allocations, config(case))
    made.map_all_pages()
    exact = made.all_logits([Slice(0, 0, tiny.tokens(case))])
    rows = by_cpu(prepared, case)
    # 8-bit activations; a close choice of experts may fall otherwise and moves its row.
    error = np.median(np.abs(rows - exact), 1) / np.std(exact)
    assert float(np.median(error)) < 0.03
    assert (by_cpu(packed(prepared), case, isa="scalar", threads=1) == rows).all()


def test_every_family_has_golden_logits() -> None:
    for family in tiny.FAMILIES:
        assert set(golden(family)) == {case.name for case in tiny.cases_of(family)}
    covered = {case.architecture for _, case in CASES} | {"llama"}
    assert covered == set(architectures())


@pytest.mark.parametrize("gate_up", [GgmlType.IQ2_XXS, GgmlType.IQ2_XS])
def test_experts_as_planes_give_the_bits_of_raw_blocks(
    gate_up: GgmlType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = REAL_TYPES | {"ffn_gate_exps": gate_up, "ffn_up_exps": gate_up}
    prepared = prepare_file(tiny.write_gguf(REAL, tmp_path / "case.gguf", types))
    expected = by_cpu(prepared, REAL)
    isa = best_isa().name
    monkeypatch.setattr(quants, "PLANES_TO_RAW", {isa: {gate_up.name: 2.0}})
    made = packed(prepared)
    layouts = {buffer.layout for buffer in made.bundle.execution.buffers}
    assert Layout.IQ2_PLANES in layouts
    for threads in (1, 2):
        np.testing.assert_array_equal(by_cpu(made, REAL, threads=threads), expected)
