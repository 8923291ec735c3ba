"""The ballast model of the restart benchmark is a valid GGUF whose tensors cost no disk."""

from __future__ import annotations

from pathlib import Path

from ds4_common.gguf import LogicalModel
from ds4_worker.bench.restart import write_ballast


def test_ballast_opens_as_a_model_of_the_asked_size_and_is_sparse(tmp_path: Path) -> None:
    path = tmp_path / "ballast.gguf"
    write_ballast(path, 2.2)
    with LogicalModel.open(path) as model:
        assert [tensor.n_bytes for tensor in model.tensors] == [1 << 30, 1 << 30]
    assert path.stat().st_blocks * 512 < 1 << 20


def test_less_than_a_gibibyte_of_ballast_is_one_tensor_of_about_that_size(tmp_path: Path) -> None:
    path = tmp_path / "ballast.gguf"
    write_ballast(path, 0.004)
    with LogicalModel.open(path) as model:
        assert [tensor.n_bytes for tensor in model.tensors] == [4_000_000 // 4096 * 4096]
