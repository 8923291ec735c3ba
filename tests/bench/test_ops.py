"""The table of ops: names of sections, and times that add up."""

from __future__ import annotations

from typing import cast

import pytest

from ds4_common.tokenizer.encoder import Tokenizer
from ds4_worker.bench.ops import measure, section_names
from ds4_worker.bench.speed import Mapped, TimedExecutor, WeightWork
from ds4_worker.executor.api import ExecutorConfig
from golden import tiny
from helpers.executors import cpu_executor
from helpers.prepared import Prepared, prepare_file


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    case = tiny.cases_of("qwen3moe")[0]
    return prepare_file(tiny.write_gguf(case, tmp_path_factory.mktemp("ops") / "case.gguf"))


def contract(prepared: Prepared) -> memoryview:
    return memoryview(prepared.bundle.SerializeToString())


def test_sections_are_named_by_their_ops_and_the_weights_they_read(experts: Prepared) -> None:
    names = section_names(contract(experts))
    assert names[-2:] == ["sample", "around the sections"]
    assert "attend" in names
    assert any(name.startswith("matmul_experts ") for name in names)
    assert not [name for name in names if "matmul" in name and "x" not in name]


def test_every_section_is_in_one_row_and_the_rows_are_the_whole(experts: Prepared) -> None:
    executor = cpu_executor(experts, ExecutorConfig(threads=2, banks=1, context_tokens=64))
    timed = cast(TimedExecutor, executor)
    model = Mapped(timed, cast(Tokenizer, None), WeightWork(1, 1, 1), contract(experts))
    *rows, beside, idle = measure(model, depth=8, steps=4, runs=1)
    executor.close()
    counts = [int(row.name.split(" x ")[0]) for row in rows]
    assert sum(counts) == len(section_names(contract(experts)))
    assert sum(row.ratio or 0 for row in rows) == pytest.approx(1)
    whole = sum(row.median for row in rows)
    assert 0 < beside.median < whole
    assert beside.median <= idle.median < whole
