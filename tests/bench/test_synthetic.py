"""Synthetic models are models: they open, run in every type, and speak the words of a real one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from ds4_common.errors import Ds4Error
from ds4_common.gguf import GgmlType, LogicalModel
from ds4_worker.bench.synthetic import SHAPES, TYPES, Shape, types, write
from ds4_worker.executor.api import ExecutorConfig, Slice
from helpers.executors import cpu_executor
from helpers.models import smollm2_path
from helpers.prepared import prepare_file

SMALL = {"width": 256, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 64, "inner": 512}
DENSE = replace(SHAPES["dense-1b"], **SMALL)
EXPERTS = replace(SHAPES["moe-30b"], **SMALL, experts=(4, 2, 256))


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_a_synthetic_model_runs_to_finite_logits(
    shape: Shape, type_: GgmlType, tmp_path: Path
) -> None:
    words = smollm2_path()
    path = tmp_path / "model.gguf"
    n_bytes = write(path, shape, types(",".join([type_.name] * 3)), words)
    assert path.stat().st_size == n_bytes
    with LogicalModel.open(path) as made, LogicalModel.open(words) as source:
        for key in ("tokens", "merges"):
            name = f"tokenizer.ggml.{key}"
            assert made.metadata.get_strings(name) == source.metadata.get_strings(name)
    executor = cpu_executor(
        prepare_file(path), ExecutorConfig(threads=1, banks=1, context_tokens=64)
    )
    rows = [list(row) for row in executor.logit_rows(Slice(0, 0, [1, 2, 3]))]
    executor.close()
    assert all(math.isfinite(value) for row in rows for value in row)
    assert rows[0] != rows[1]


def test_published_shapes_have_the_sizes_of_their_models() -> None:
    def weights(name: str, vocabulary: int) -> int:
        return sum(math.prod(dims) for _, dims in SHAPES[name].tensors(vocabulary))

    assert 1.2e9 < weights("dense-1b", 128_256) - 2048 * 128_256 < 1.3e9  # tied in the original
    assert 30.4e9 < weights("moe-30b", 151_936) < 30.6e9


@pytest.mark.parametrize("text", ["", "Q9_9", "Q8_0,Q8_0", "Q8_0,,Q8_0", "F16"])
def test_types_that_cannot_be_written_are_refused(text: str) -> None:
    with pytest.raises(Ds4Error, match="expected one or three of"):
        types(text)
