"""Recipes are found by name, one module a family, and refuse by name what they do not know."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4_common.allocation import Layout
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.errors import UnsupportedModel
from ds4_common.gguf import GgmlType, LogicalModel
from ds4_owner.recipes import architectures, families
from ds4_owner.recipes.builder import TextProgram
from ds4_worker.executor.api import ExecutorConfig
from golden import tiny
from golden.deepseek2.cases import CASES as DEEPSEEK2
from golden.gemma3.cases import CASES as GEMMA3
from golden.glm4moe.cases import CASES as GLM4MOE
from golden.mixtral.cases import CASES as MIXTRAL
from golden.phi3.cases import CASES as PHI3
from golden.qwen2.cases import CASES as QWEN2
from golden.qwen3moe.cases import CASES as QWEN3MOE
from helpers.executors import cpu_executor, logits
from helpers.prepared import prepare_file, prepare_places, raw_places

TOY = '''
"""qwen2 with a window and capped logits: a family of one file."""
from dataclasses import replace
from ds4_owner.recipes.decoder import HALVES, Decoder, Gated, Layer, write_decoder
from ds4_owner.recipes.extents import read_extents, read_rope

def recipe(parameters, program, vocabulary, context_tokens, tensors):
    extents = read_extents(parameters, tensors, layer_tensors=9)
    rope = read_rope(parameters, context_tokens, extents.rope_dim, HALVES)
    width = parameters.count("feed_forward_length")
    window = parameters.count("attention.sliding_window")
    layers = [
        Layer(replace(extents.attention(i, rope), window=window), Gated(width))
        for i in range(extents.layers)
    ]
    decoder = Decoder(extents.width, extents.epsilon, layers, logit_cap=5.0)
    write_decoder(program, vocabulary, decoder)
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A family in a file of its own."""
    (tmp_path / "toy_family.py").write_text(TOY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    yield
    sys.modules.pop(f"{families.__name__}.toy_family", None)


def prepared(case: tiny.Case, folder: Path, **metadata: Any) -> pb.Bundle:
    changed = dataclasses.replace(case, metadata=dict(case.metadata) | metadata)
    return prepare_file(tiny.write_gguf(changed, folder / "m.gguf")).bundle


def windows(bundle: pb.Bundle) -> list[float]:
    """Of each attention, 0 where it has none."""
    ops = [op for op in bundle.execution.programs[0].ops.ops if op.kernel == "attend_paged"]
    return [op.attr["window"] if "window" in op.attr else 0 for op in ops]


@pytest.mark.usefixtures("toy")
def test_a_family_is_one_module(tmp_path: Path) -> None:
    assert "toy-family" in architectures()
    metadata = dict(QWEN2[0].metadata) | {"attention.sliding_window": 6}
    case = dataclasses.replace(QWEN2[0], architecture="toy-family", metadata=metadata)
    config = ExecutorConfig(threads=1, banks=1, context_tokens=64, batch_outputs=64)
    executor = cpu_executor(prepare_file(tiny.write_gguf(case, tmp_path / "m.gguf")), config)
    rows = logits(executor, tiny.tokens(case))
    executor.close()
    assert np.abs(rows).max() < 5.0


def test_names_are_those_of_the_files() -> None:
    assert set(architectures()) == {
        "deepseek2", "deepseek4", "gemma2", "gemma3", "glm4moe", "gpt-oss", "llama", "phi3",
        "qwen2", "qwen2moe", "qwen3", "qwen3moe",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["mystery", "gpt_oss", "builder", "", "../llama", "llama.x"])
def test_other_names_are_refused_with_the_known_ones(name: str, tmp_path: Path) -> None:
    case = dataclasses.replace(QWEN2[0], architecture=name or " ")
    with pytest.raises(UnsupportedModel, match=r"expected one of: deepseek2, .*gemma2, .*qwen3moe"):
        prepare_file(tiny.write_gguf(case, tmp_path / "m.gguf"))


def test_tensors_that_a_recipe_does_not_know_are_named(tmp_path: Path) -> None:
    shapes = QWEN2[0].shapes | {"blk.1.attn_q_norm.weight": (8,)}
    case = dataclasses.replace(QWEN2[0], shapes=shapes)
    with pytest.raises(UnsupportedModel, match=r"does not know: blk\.1\.attn_q_norm\.weight"):
        prepared(case, tmp_path)


def test_layers_that_predict_further_tokens_are_left_out_and_no_others(tmp_path: Path) -> None:
    bundle = prepared(GLM4MOE[0], tmp_path)
    assert not any(b.name.startswith("blk.3.") for b in bundle.execution.buffers)
    with pytest.raises(UnsupportedModel, match=r"blk\.3\.nextn\.eh_proj\.weight"):
        prepared(GLM4MOE[0], tmp_path, nextn_predict_layers=0)


@pytest.mark.parametrize(
    ("case", "key", "value", "expected"),
    [
        (PHI3[0], "rope.scaling.type", "yarn", "got yarn, expected one of none, linear, longrope"),
        (GEMMA3[0], "rope.freq_base_swa", 0.5, "got 0.5"),
        (GEMMA3[0], "attention.sliding_window_pattern", [True, False], "one per layer (7)"),
        (QWEN3MOE[0], "expert_used_count", 9, "got 9, expected an integer from 1 to 8"),
        (QWEN3MOE[0], "expert_count", 0, "got 0"),
        (QWEN3MOE[0], "expert_gating_func", 5, "got 5"),
        (QWEN3MOE[0], "expert_group_count", 3, "a divisor of 8 experts"),
        (DEEPSEEK2[6], "expert_group_used_count", 3, "got 3"),
        (DEEPSEEK2[6], "expert_used_count", 5, "got 5, expected at most 4, of its groups"),
        (DEEPSEEK2[1], "attention.key_length_mla", 8, "got 8, expected an integer from 9"),
        (DEEPSEEK2[1], "attention.kv_lora_rank", 0, "got 0"),
        (GLM4MOE[0], "rope.dimension_count", 7, "an even number"),
    ],
    ids=lambda value: value.id if isinstance(value, tiny.Case) else None,
)
def test_values_that_no_recipe_can_use_are_refused_by_their_key(
    tmp_path: Path, case: tiny.Case, key: str, value: Any, expected: str
) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        prepared(case, tmp_path, **{key: value})
    assert f"{case.architecture}.{key}" in str(refusal.value)
    assert expected in str(refusal.value)


def test_rows_of_one_tensor_share_its_bytes(tmp_path: Path) -> None:
    bundle = prepared(PHI3[0], tmp_path)
    parts = [b for b in bundle.execution.buffers if b.name.startswith("blk.0.attn_qkv.weight[")]
    assert [b.name[21:] for b in parts] == ["[0:32]", "[32:48]", "[48:64]"]
    assert [b.offset - parts[0].offset for b in parts] == [0, 32 * 32 * 4, 48 * 32 * 4]


def test_rows_are_cut_out_of_packed_tensors_in_whole_groups_only(tmp_path: Path) -> None:
    path = tiny.write_gguf(PHI3[0], tmp_path / "m.gguf", [GgmlType.Q8_0, GgmlType.F16])
    with LogicalModel.open(path) as model:
        places = {
            name: dataclasses.replace(place, layout=Layout.X8) if "qkv" in name else place
            for name, place in raw_places(model).items()
        }
        bundle = prepare_places(model.metadata, places)
        parts = [b for b in bundle.execution.buffers if "qkv" in b.name]
        assert {b.layout for b in parts} == {Layout.X8}
        program = TextProgram(places, 64)
        program.linear_parts("x", "blk.0.attn_qkv", 32, ("q", "k"), (30, 34))
        with pytest.raises(UnsupportedModel, match="rows 0 to 30 cannot be cut out of layout X8"):
            program.finish(pb.Bundle())


def test_a_router_with_a_bias_means_sigmoid_where_the_file_is_silent(tmp_path: Path) -> None:
    silent = {k: v for k, v in DEEPSEEK2[5].metadata.items() if k != "expert_gating_func"}
    (case, plain) = (dataclasses.replace(DEEPSEEK2[5], metadata=silent), DEEPSEEK2[1])
    for which, score in ((case, 1), (plain, 0)):
        ops = prepared(which, tmp_path).execution.programs[0].ops.ops
        assert {op.attr["score"] for op in ops if op.kernel == "route_experts"} == {score}


def test_expanded_matrices_beside_the_absorbed_ones_are_left_out(tmp_path: Path) -> None:
    both = DEEPSEEK2[1].shapes | {"blk.1.attn_kv_b.weight": (88, 20)}
    bundle = prepared(dataclasses.replace(DEEPSEEK2[1], shapes=both), tmp_path)
    assert not any("attn_kv_b" in b.name for b in bundle.execution.buffers)


def test_a_window_as_wide_as_the_context_is_none(tmp_path: Path) -> None:
    assert windows(prepared(PHI3[0], tmp_path, **{"attention.sliding_window": 64})) == [0, 0]
    assert windows(prepared(PHI3[0], tmp_path, **{"attention.sliding_window": 63})) == [63, 63]


def test_the_pattern_of_windows_may_be_given_per_layer(tmp_path: Path) -> None:
    flags = [True, False, True, True, False, False, True]
    bundle = prepared(GEMMA3[0], tmp_path, **{"attention.sliding_window_pattern": flags})
    assert windows(bundle) == [8 * flag for flag in flags]


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("attention.causal", False, True),
        ("attention.temperature_scale", 0.125, 0.0),
        ("attention.clamp_kqv", 8.0, 0.0),
        ("attention.max_alibi_bias", 8.0, 0.0),
        ("logit_scale", 0.0625, 1.0),
        ("residual_scale", 0.25, 1.0),
        ("embedding_scale", 12.0, 1.0),
        ("attn_logit_softcapping", 50.0, 0.0),
        ("final_logit_softcapping", 30.0, 0.0),
        ("router_logit_softcapping", 30.0, 0.0),
        ("attention.key_length_swa", 64, 8),
    ],
)
def test_values_that_would_change_results_and_that_no_recipe_applies_are_refused(
    tmp_path: Path, key: str, value: Any, neutral: Any
) -> None:
    same = {"attention.key_length": 8, "attention.value_length": 8}
    prepared(QWEN2[0], tmp_path, **same, **{key: neutral})
    with pytest.raises(UnsupportedModel, match=rf"'qwen2\.{key}': got {value}, expected"):
        prepared(QWEN2[0], tmp_path, **same, **{key: value})


def test_a_family_that_applies_such_a_value_is_not_refused(tmp_path: Path) -> None:
    prepared(GEMMA3[0], tmp_path, final_logit_softcapping=30.0)


@pytest.mark.parametrize("case", [QWEN2, MIXTRAL], ids=["qwen2", "mixtral"])
def test_a_key_that_converters_wrote_for_every_family_is_not_refused(
    case: Any, tmp_path: Path
) -> None:
    prepared(case[0], tmp_path, use_parallel_residual=True)


@pytest.mark.parametrize("ahead", [2, 3, 4])
def test_a_count_of_predicting_layers_that_takes_in_others_is_refused(
    tmp_path: Path, ahead: int
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"nextn_predict_layers': got {ahead}, expected"):
        prepared(GLM4MOE[0], tmp_path, nextn_predict_layers=ahead)


def test_what_is_missing_and_what_is_left_over_are_said_together(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"ffn_gate\.weight: missing.*know: .*ffn_down_exps"):
        prepared(MIXTRAL[0], tmp_path, expert_count=0)
