"""Every block type in every role of an executor: dense matrix, experts, table of tokens, logits."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from ds4_common.gguf import GgmlType
from ds4_common.quants import QuantType
from ds4_worker.executor.api import ExecutorConfig, Slice
from ds4_worker.executor.reference import ReferenceExecutor
from golden import tiny
from golden.qwen3moe.cases import COUNT, HEADS, KV_HEADS, PLAIN, USED
from helpers.executors import cpu_executor, logits, packed
from helpers.prepared import Prepared, prepare_file
from helpers.quant_blocks import U8, expected_floats, plausible_blocks

Rows = npt.NDArray[np.floating[Any]]
WIDTH, INNER, DIM = 256, 256, 64
CONFIG = ExecutorConfig(threads=2, banks=1, context_tokens=64, batch_outputs=64, kv_dtype="f32")
# Activation formats of another implementation, and numbers that no matrix of a model is made of.
NO_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}


def wide_case() -> tiny.Case:
    """Every row of every matrix fills blocks of 256."""
    shapes = tiny.trunk(WIDTH, 2)
    for layer in range(2):
        shapes |= tiny.attention(layer, WIDTH, HEADS, KV_HEADS, DIM, norms=True)
        shapes |= tiny.experts(layer, WIDTH, INNER, COUNT)
    sizes = {
        "embedding_length": WIDTH, "expert_feed_forward_length": INNER,
        "attention.key_length": DIM, "attention.value_length": DIM,
    }  # fmt: skip
    assert PLAIN.metadata["expert_used_count"] == USED
    return dataclasses.replace(PLAIN, shapes=shapes, metadata={**PLAIN.metadata, **sizes})


def in_blocks(
    quant: QuantType, case: tiny.Case, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Prepared, Prepared]:
    """The case with all matrices in random blocks of one type, and with the floats they mean."""
    rng, raws, floats = np.random.default_rng(int(quant)), [], {}
    for name, value in tiny.tensors(case).items():
        if value.ndim > 1:
            raw = plausible_blocks(rng, quant, math.prod(value.shape[:-1]), value.shape[-1])
            raws.append(raw)
            floats[name] = expected_floats(quant, raw).reshape(value.shape)
    given, waiting = dataclasses.replace(case, tensors=floats), iter(raws)

    def next_blocks(shape: tuple[int, ...], *rest: object) -> U8:
        return next(waiting).reshape(*shape[:-1], -1)

    monkeypatch.setattr(tiny, "random_tensor", next_blocks)
    types = {"": GgmlType(int(quant))}
    blocks = prepare_file(tiny.write_gguf(given, folder / "blocks.gguf", types))
    return blocks, prepare_file(tiny.write_gguf(given, folder / "floats.gguf"))


def by_cpu(prepared: Prepared, case: tiny.Case, **changes: Any) -> Rows:
    executor = cpu_executor(prepared, replace(CONFIG, **changes))
    rows = logits(executor, tiny.tokens(case))
    executor.close()
    return rows


def test_every_type_that_the_gguf_package_knows_has_kernels_or_holds_no_weights() -> None:
    known = {t.name for t in gguf.GGMLQuantizationType}
    assert known - NO_WEIGHTS == {t.name for t in QuantType}


@pytest.mark.parametrize("quant", list(QuantType), ids=lambda quant: str(quant.name))
def test_a_model_of_one_type_is_what_the_reference_computes(
    quant: QuantType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = wide_case()
    prepared, floats = in_blocks(quant, case, tmp_path, monkeypatch)
    matrices = [b for b in prepared.bundle.execution.buffers if b.resource and len(b.shape) > 1]
    assert {b.ggml_type for b in matrices} == {int(quant)}
    assert len(matrices) == 2 + 2 * 8  # tokens, logits, and of each layer
    made = ReferenceExecutor(floats.bundle, floats.allocations, CONFIG)
    made.map_all_pages()
    exact = made.all_logits([Slice(0, 0, tiny.tokens(case))])
    rows = by_cpu(prepared, case)
    # 8-bit activations; a close choice of experts may fall otherwise and moves its row.
    error = np.median(np.abs(rows - exact), 1) / np.std(exact)
    assert float(np.median(error)) < 0.05
    for form in (prepared, packed(prepared)):
        np.testing.assert_array_equal(by_cpu(form, case, isa="scalar", threads=1), rows)
        np.testing.assert_array_equal(by_cpu(form, case), rows)
