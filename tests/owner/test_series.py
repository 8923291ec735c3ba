"""Experts that a file keeps one by one become one tensor, or the file is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.allocation import Layout, TensorPlace
from ds4_common.errors import UnsupportedModel
from ds4_owner.plan import SMALL_TENSOR_BYTES, ModelTensors, PlanSettings, plan
from ds4_owner.series import joined, series_of
from golden import tiny
from golden.mixtral.cases import CASES
from helpers.prepared import prepare_file

Q4_1, F32 = 3, 0


@dataclass(frozen=True)
class FakeTensor:
    name: str
    ggml_type: int
    dims: tuple[int, ...]
    offset: int
    n_bytes: int


@st.composite
def files(draw: st.DrawFn) -> ModelTensors:
    """Layers of experts one by one, in any order, between other tensors of any size."""
    shapes: list[tuple[str, int, tuple[int, ...], int]] = []
    for layer in range(draw(st.integers(1, 3))):
        for part in ("gate", "down", "up"):
            rows = draw(st.integers(1, 60))
            kind = draw(st.sampled_from([(Q4_1, 8 * rows * 80), (F32, rows * 520)]))
            dims: tuple[int, ...] = (128, 8 * rows) if kind[0] == Q4_1 else (130, rows)
            for expert in range(draw(st.integers(1, 12))):
                shapes.append((f"blk.{layer}.ffn_{part}.{expert}.weight", kind[0], dims, kind[1]))
        for other in range(draw(st.integers(0, 3))):
            size = draw(st.sampled_from([64, SMALL_TENSOR_BYTES - 4, SMALL_TENSOR_BYTES + 4]))
            shapes.append((f"blk.{layer}.other{other}.weight", F32, (size // 4,), size))
    offset, tensors = 0, []
    for name, ggml_type, dims, n_bytes in draw(st.permutations(shapes)):
        tensors.append(FakeTensor(name, ggml_type, dims, offset, n_bytes))
        offset += n_bytes + draw(st.sampled_from([0, 32, 100_000]))
    return ModelTensors("base", offset, tensors)


@given(files(), st.sampled_from([4096, 1 << 20, 1 << 26]))
def test_every_series_lies_in_one_group_and_nowhere_else(model: ModelTensors, span: int) -> None:
    settings = PlanSettings(
        span_bytes=span,
        granularity=4096,
        packed=True,
        cpu_layout=lambda kind, _: Layout.X8 if kind == Q4_1 else Layout.RAW,
        packed_bytes=lambda _, dims: dims[0] * dims[1] * 20 // 32,
    )
    result = plan([model], settings)
    places = joined({place.name: place for place in result.places})
    series = {name for name in places if name.endswith("_exps.weight")}
    assert series == {whole[0] for t in model.tensors if (whole := series_of(t.name))}
    assert not any(series_of(name) for name in places)
    for place in (places[name] for name in series):
        names = [series_of(t.name) for t in model.tensors]
        experts = sum(name is not None and name[0] == place.name for name in names)
        assert place.dims[2:] == (experts,)
        assert result.allocations[place.allocation].artifact is not None
        assert place.offset + place.n_bytes <= result.allocations[place.allocation].n_bytes
    moved = sum(t.n_bytes for t in model.tensors if series_of(t.name))
    kept = sum(t.n_bytes for t in model.tensors if series_of(t.name) is None)
    assert result.n_bytes <= moved + 2 * kept + 100_000 * len(model.tensors)


PLACE = TensorPlace("base", "", F32, (32, 24), Layout.RAW, 1, 64, 3072)


def experts(count: int, **changes: Any) -> dict[str, TensorPlace]:
    """Experts behind each other; the last one changed."""
    names = [f"blk.0.ffn_up.{i}.weight" for i in range(count)]
    places = {
        name: dataclasses.replace(PLACE, name=name, offset=64 + 3072 * i)
        for i, name in enumerate(names)
    }
    places[names[-1]] = dataclasses.replace(places[names[-1]], **changes)
    return places


def test_experts_that_follow_each_other_are_one_tensor() -> None:
    whole = joined(experts(11))["blk.0.ffn_up_exps.weight"]
    assert (whole.dims, whole.offset, whole.n_bytes) == ((32, 24, 11), 64, 11 * 3072)


@pytest.mark.parametrize(
    "changes",
    [{"offset": 9000}, {"ggml_type": 1}, {"dims": (24, 32)}, {"allocation": 2}, {"n_bytes": 64}],
)
def test_experts_that_do_not_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"blk.0.ffn_up.2.weight: got .* right behind the"):
        joined(experts(3, **changes))


def test_missing_and_doubled_experts_are_refused() -> None:
    places = experts(3)
    with pytest.raises(UnsupportedModel, match="expected one tensor or all experts from 0 on"):
        joined({k: v for k, v in places.items() if ".1." not in k})
    with pytest.raises(UnsupportedModel, match="expected one tensor or all experts from 0 on"):
        joined(places | {"blk.0.ffn_up_exps.weight": PLACE})


def test_an_old_file_whose_tensors_stay_where_they_are_is_refused(tmp_path: Path) -> None:
    path = tiny.write_gguf(CASES[0], tmp_path / "old.gguf", experts_apart=True)
    with pytest.raises(UnsupportedModel, match="without --cpu-layout raw"):
        prepare_file(path)
