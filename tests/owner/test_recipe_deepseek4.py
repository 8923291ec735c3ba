"""The deepseek4 recipe: what it leaves out, how long its pages are, and what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.errors import UnsupportedModel
from golden import tiny
from golden.deepseek4.cases import CASES
from helpers.prepared import prepare_file

MIXED = next(case for case in CASES if case.name == "short_ratios")
LAYERS = 4


def prepare(case: tiny.Case, path: Path) -> pb.Bundle:
    return prepare_file(tiny.write_gguf(case, path)).bundle


def changed(keys: dict[str, Any], case: tiny.Case = MIXED) -> tiny.Case:
    """The case with other metadata."""
    return dataclasses.replace(case, metadata={**case.metadata, **keys})


def kernels(bundle: pb.Bundle) -> list[str]:
    return [op.kernel for op in bundle.execution.programs[0].ops.ops]


def test_layers_that_only_predict_are_left_out(tmp_path: Path) -> None:
    plain = prepare(MIXED, tmp_path / "plain.gguf")
    stem = f"blk.{LAYERS}"
    ahead = {f"{stem}.nextn.eh_proj.weight": (32, 64), f"{stem}.attn_norm.weight": (32,)}
    more = dataclasses.replace(MIXED, shapes={**MIXED.shapes, **ahead})
    keys = {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    bundle = prepare(changed(keys, more), tmp_path / "ahead.gguf")
    assert kernels(bundle) == kernels(plain)


def test_a_count_of_predicting_layers_that_the_file_lacks_takes_no_layer_away(
    tmp_path: Path,
) -> None:
    plain = prepare(MIXED, tmp_path / "plain.gguf")
    bundle = prepare(changed({"nextn_predict_layers": 1}), tmp_path / "m.gguf")
    assert kernels(bundle) == kernels(plain)


@pytest.mark.parametrize(("name", "page"), [("windows", 64), ("short_ratios", 64), ("long", 128)])
def test_a_page_holds_whole_windows(name: str, page: int, tmp_path: Path) -> None:
    bundle = prepare(next(c for c in CASES if c.name == name), tmp_path / "m.gguf")
    cache = bundle.serving.model.cache
    assert cache.page_tokens == page
    assert all(page % history.tokens_per_record == 0 for history in cache.histories)


def test_the_shared_expert_may_have_limits_of_its_own(tmp_path: Path) -> None:
    bundle = prepare(changed({"swiglu_clamp_shexp": 3.0}), tmp_path / "m.gguf")
    units = [op for op in bundle.execution.programs[0].ops.ops if op.kernel == "glu"]
    assert {op.attr["limit"] for op in units} == {0.5, 3.0}


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "too few ratios": ({"attention.compress_ratios": [0, 4]}, "one per layer (4)"),
    "a long ratio": ({"attention.compress_ratios": [0, 4, 2048, 4]}, "integers from 0 to 1024"),
    "ratios that share no page": (
        {"attention.compress_ratios": [0, 4, 1000, 4]},
        "ratios that divide a page of 1024 tokens",
    ),
    "more than one row per token": ({"attention.head_count_kv": 2}, "head_count_kv': got 2"),
    "values of their own": ({"attention.value_length": 16}, "value_length': got 16"),
    "groups": ({"attention.output_group_count": 3}, "output_group_count': got 1, expected 3"),
    "a rotation of all dims": ({"rope.dimension_count": 32}, "even, less than 32"),
    "index": ({"attention.indexer.key_length": 48}, "a power of two"),
    "scaling": ({"rope.scaling.type": "linear"}, "none or yarn"),
    "limits": ({"swiglu_clamp_exp": [0.5]}, "one per layer (4)"),
    "negative limits": ({"swiglu_clamp_exp": [0.5, 0.5, -1.0, 0.5]}, "numbers from 0 to 1e+06"),
    "streams": ({"hyper_connection.count": 17}, "hyper_connection.count': got 17"),
    "another number of streams": (
        {"hyper_connection.count": 3},
        "hc_attn_fn.weight: got [24, 128], expected [15, 96]",
    ),
    "a table for every layer": ({"hash_layer_count": 3}, "blk.2.ffn_gate_tid2eid.weight: missing"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_recipe_cannot_serve_is_refused_by_its_key(name: str, tmp_path: Path) -> None:
    keys, message = REFUSALS[name]
    with pytest.raises(UnsupportedModel) as raised:
        prepare(changed(keys), tmp_path / "m.gguf")
    assert message in str(raised.value)
