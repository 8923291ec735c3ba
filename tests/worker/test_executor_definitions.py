"""The CPU executor beside independent implementations: transformers, and the reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from ds4_common.gguf import GgmlType
from ds4_worker.executor.api import ExecutorConfig, Slice
from ds4_worker.executor.reference import ReferenceExecutor
from golden.llama import cases
from helpers.executors import cpu_executor, logits
from helpers.prepared import prepare_file
from helpers.tiny_gguf import TinyLlama, write_llama

GOLDEN = json.loads((Path(cases.__file__).with_name("logits.json")).read_text())["logits"]
CONTEXT = 640
BASE = ExecutorConfig(threads=1, banks=3, context_tokens=CONTEXT, batch_tokens=CONTEXT)


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 320, n)]


# --- against independent implementations ---


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_logits_equal_those_of_transformers(
    case: cases.Case, kv_dtype: str, tmp_path: Path
) -> None:
    prepared = prepare_file(cases.write_gguf(case, tmp_path / "case.gguf"))
    config = ExecutorConfig(
        threads=2, banks=1, context_tokens=case.context, kv_dtype=kv_dtype, batch_outputs=48
    )
    executor = cpu_executor(prepared, config)
    rows = logits(executor, cases.tokens(case))
    executor.close()
    tolerance = {"f32": 2e-4, "f16": 2e-2, "bf16": 2e-1}[kv_dtype]
    np.testing.assert_allclose(rows[list(cases.ROWS)], GOLDEN[case.name], rtol=0, atol=tolerance)


def test_rotated_halves_follow_the_reference(tmp_path: Path) -> None:
    """Style 1, with dims past rope_dim: no recipe writes it yet, the op is defined all the same."""
    case = next(c for c in cases.CASES if c.name == "wide_heads")
    prepared = prepare_file(cases.write_gguf(case, tmp_path / "case.gguf"))
    for op in prepared.bundle.execution.programs[0].ops.ops:
        if op.kernel == "rope":
            op.attr["style"] = 1
            op.attr["rope_dim"] = 16
            op.attr["attn_factor"] = 1.5
    config = ExecutorConfig(
        threads=1, banks=1, context_tokens=case.context, kv_dtype="f32", batch_outputs=48
    )
    reference = ReferenceExecutor(prepared.bundle, prepared.allocations, config, np.float64)
    reference.map_all_pages()
    executor = cpu_executor(prepared, config)
    got = logits(executor, cases.tokens(case))
    executor.close()
    exact = reference.all_logits([Slice(0, 0, cases.tokens(case))])
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-4)


def test_quantized_weights_stay_near_the_reference(tmp_path: Path) -> None:
    spec = TinyLlama(width=256, ffn=512, weights=(GgmlType.Q4_K, GgmlType.Q6_K, GgmlType.Q8_0))
    prepared = prepare_file(write_llama(tmp_path / "tiny.gguf", spec))
    config = ExecutorConfig(
        threads=2, banks=1, context_tokens=128, kv_dtype="f32", batch_outputs=100
    )
    reference = ReferenceExecutor(prepared.bundle, prepared.allocations, config)
    reference.map_all_pages()
    executor = cpu_executor(prepared, config)
    got = logits(executor, tokens(100))
    executor.close()
    exact = reference.all_logits([Slice(0, 0, tokens(100))])
    spread = float(np.std(exact))
    assert float(np.abs(got - exact).mean()) < 0.02 * spread  # 8-bit activations


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "q8_0"])
def test_the_cache_rounds_as_the_reference_does(tmp_path: Path, kv_dtype: str) -> None:
    spec = TinyLlama(
        head_dim=32, n_heads=4, weights=(GgmlType.F32,), embedding=GgmlType.F32, output=GgmlType.F32
    )
    prepared = prepare_file(write_llama(tmp_path / "tiny.gguf", spec))
    config = ExecutorConfig(banks=1, context_tokens=128, kv_dtype=kv_dtype, batch_outputs=100)
    executor = cpu_executor(prepared, config)
    got = logits(executor, tokens(100))
    executor.close()

    def distance(kind: str) -> float:
        made = ReferenceExecutor(
            prepared.bundle, prepared.allocations, replace(config, kv_dtype=kind)
        )
        made.map_all_pages()
        return float(np.abs(got - made.all_logits([Slice(0, 0, tokens(100))])).mean())

    assert distance(kv_dtype) < 0.1 * distance("f32")
