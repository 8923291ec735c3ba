"""Published files differ in how they store one model: each way gives the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4_common.errors import UnsupportedModel
from ds4_worker.executor.api import ExecutorConfig
from golden import tiny
from golden.deepseek4.cases import CASES as DEEPSEEK4
from golden.gemma2.cases import CASES as GEMMA2
from golden.glm4moe.cases import CASES as GLM4MOE
from golden.gpt_oss.cases import CASES as GPT_OSS
from golden.mixtral.cases import CASES as MIXTRAL
from golden.phi3.cases import CASES as PHI3
from helpers.executors import cpu_executor, logits
from helpers.prepared import prepare_file

Rows = npt.NDArray[np.floating[Any]]
Values = dict[str, tiny.Array]
CASES = {
    f"{family}-{case.name}": case
    for family in tiny.FAMILIES
    for case in tiny.cases_of(family)[:2]
    if not any(name.endswith("scale") for name in case.tensors)
}
APART = [name for name, case in CASES.items() if "blk.0.attn_q.weight" in case.shapes
         and "blk.0.attn_k.weight" in case.shapes]  # fmt: skip
ROUTED = [name for name, case in CASES.items() if any("_gate_exps" in s for s in case.shapes)]


def with_values(case: tiny.Case, values: Values, **metadata: Any) -> tiny.Case:
    """The case with these tensors and no others."""
    shapes = {name: value.shape for name, value in values.items()}
    known = {**case.metadata, **metadata}
    return replace(case, shapes=shapes, tensors=values, metadata=known)


def rows_of(case: tiny.Case, folder: Path) -> Rows:
    config = ExecutorConfig(
        threads=1, banks=1, context_tokens=case.context, kv_dtype="f32", batch_outputs=64
    )
    executor = cpu_executor(prepare_file(tiny.write_gguf(case, folder / "case.gguf")), config)
    rows = logits(executor, tiny.tokens(case)[:24])
    executor.close()
    return rows


def joined(values: Values, parts: Mapping[str, tuple[str, ...]], axis: int) -> Values:
    """`values` with tensors joined: the new name's ending -> the endings of its parts."""
    made = dict(values)
    for whole, endings in parts.items():
        for name in [n for n in values if n.endswith(endings[0])]:
            stem = name.removesuffix(endings[0])
            names = [stem + ending for ending in endings]
            made[stem + whole] = np.concatenate([made.pop(part) for part in names], axis)
    return made


WEIGHTS = {"attn_qkv.weight": tuple(f"attn_{part}.weight" for part in "qkv")}
BIASES = {"attn_qkv.bias": tuple(f"attn_{part}.bias" for part in "qkv")}


@pytest.mark.parametrize("biases", [{}, BIASES], ids=["biases apart", "biases joined"])
@pytest.mark.parametrize("name", APART)
def test_queries_keys_and_values_may_be_rows_of_one_tensor(
    name: str, biases: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    case = CASES[name]
    values = joined(tiny.tensors(case), WEIGHTS | biases, 0)
    assert "blk.0.attn_qkv.weight" in values
    np.testing.assert_array_equal(
        rows_of(with_values(case, values), tmp_path), rows_of(case, tmp_path)
    )


@pytest.mark.parametrize("name", ROUTED)
def test_gate_and_up_of_experts_may_be_one_tensor(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    parts = {
        f"ffn_gate_up_exps.{kind}": (f"ffn_gate_exps.{kind}", f"ffn_up_exps.{kind}")
        for kind in ("weight", "bias")
    }
    values = joined(tiny.tensors(case), parts, 1)
    assert any("gate_up_exps" in tensor for tensor in values)
    np.testing.assert_array_equal(
        rows_of(with_values(case, values), tmp_path), rows_of(case, tmp_path)
    )


@pytest.mark.parametrize("case", PHI3[:2], ids=lambda case: str(case.name))
def test_tensors_that_a_family_joins_may_be_apart(case: tiny.Case, tmp_path: Path) -> None:
    heads, kv_heads = (case.metadata[f"attention.head_count{end}"] for end in ("", "_kv"))
    values = tiny.tensors(case)
    for name in [n for n in values if n.endswith("attn_qkv.weight")]:
        whole = values.pop(name)
        dim = len(whole) // (heads + 2 * kv_heads)
        cuts = [heads * dim, (heads + kv_heads) * dim]
        for part, rows in zip("qkv", np.split(whole, cuts), strict=True):
            values[name.replace("qkv", part)] = rows
    np.testing.assert_array_equal(
        rows_of(with_values(case, values), tmp_path), rows_of(case, tmp_path)
    )


def tied(values: Values) -> Values:
    return {name: value for name, value in values.items() if name != "output.weight"}


def shared(values: Values) -> Values:
    return values | {"output.weight": values["token_embd.weight"]}


@pytest.mark.parametrize("name", CASES)
def test_without_an_output_matrix_the_table_of_tokens_serves(name: str, tmp_path: Path) -> None:
    case, values = CASES[name], tiny.tensors(CASES[name])
    np.testing.assert_array_equal(
        rows_of(with_values(case, tied(values)), tmp_path),
        rows_of(with_values(case, shared(values)), tmp_path),
    )


@pytest.mark.parametrize("case", [GEMMA2[0], GPT_OSS[1]], ids=lambda case: str(case.id))
def test_layers_that_slide_may_have_a_base_of_their_own(case: tiny.Case, tmp_path: Path) -> None:
    plain, base = rows_of(case, tmp_path), case.metadata.get("rope.freq_base", 10000.0)
    for swa, same in ((base, True), (base / 7, False)):
        changed = replace(case, metadata={**case.metadata, "rope.freq_base_swa": swa})
        assert (rows_of(changed, tmp_path) == plain).all() == same


@pytest.mark.parametrize(("original", "used"), [(64, "short"), (63, "long")])
def test_llama_takes_divisors_for_contexts_up_to_the_original_one_and_longer(
    original: int, used: str, tmp_path: Path
) -> None:
    case, values = MIXTRAL[0], tiny.tensors(MIXTRAL[0])
    dim = case.metadata.get("attention.key_length") or (
        case.metadata["embedding_length"] // case.metadata["attention.head_count"]
    )
    factors = {
        kind: np.linspace(first, 3, dim // 2, dtype=np.float32)
        for kind, first in (("short", 1.0), ("long", 2.0))
    }
    long_rope = with_values(
        case,
        values | {f"rope_factors_{kind}.weight": f for kind, f in factors.items()},
        **{
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": original,
        },
    )
    fixed = with_values(case, values | {"rope_freqs.weight": factors[used]})
    np.testing.assert_array_equal(rows_of(long_rope, tmp_path), rows_of(fixed, tmp_path))


def test_what_only_images_need_is_left_out(tmp_path: Path) -> None:
    case = DEEPSEEK4[0]
    values = tiny.tensors(case)
    count = case.metadata["expert_count"]
    images = {f"blk.{i}.exp_probs_b_vl.bias": np.ones(count, np.float32) for i in range(2)}
    np.testing.assert_array_equal(
        rows_of(with_values(case, values | images), tmp_path), rows_of(case, tmp_path)
    )


def is_scaled(name: str) -> bool:
    """Matrices of layers whose results a file may scale, as conversions to NVFP4 do."""
    return name.endswith(".weight") and any(
        f".{part}" in name for part in ("attn_q.", "attn_k.", "attn_v.", "attn_qkv.",
        "attn_output.", "ffn_gate", "ffn_up", "ffn_down")
    ) and "_inp" not in name and "tid2eid" not in name  # fmt: skip


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("gpt_oss")])
def test_results_may_be_scaled_by_tensors_of_their_own(name: str, tmp_path: Path) -> None:
    """Powers of two, so that the bits are those of a file without scales."""
    case, values, n = CASES[name], tiny.tensors(CASES[name]), 0
    for tensor in filter(is_scaled, list(values)):
        stem, experts = tensor.removesuffix(".weight"), values[tensor].ndim == 3
        count = len(values[tensor]) if experts else 1
        scale = 2.0 ** (np.arange(n, n + count) % 7 - 3)
        each = scale[:, None, None] if experts else scale[0]
        values[tensor] = (values[tensor] / each).astype(np.float32)
        values[f"{stem}.scale"] = scale.astype(np.float32)
        values[f"{stem}.input_scale"] = np.full(count, 3.0, np.float32)
        n += 1
    assert n
    np.testing.assert_array_equal(
        rows_of(with_values(case, values), tmp_path), rows_of(case, tmp_path)
    )


def test_logits_may_be_scaled(tmp_path: Path) -> None:
    case, values = CASES["qwen2-plain"], tiny.tensors(CASES["qwen2-plain"])
    scaled = values | {
        "output.weight": values["output.weight"] * 4,
        "output.scale": np.array([0.25], np.float32),
    }
    np.testing.assert_array_equal(
        rows_of(with_values(case, scaled), tmp_path), rows_of(case, tmp_path)
    )


def test_scales_beside_biases_of_experts_are_refused(tmp_path: Path) -> None:
    case, values = GPT_OSS[0], tiny.tensors(GPT_OSS[0])
    scales = np.ones(case.metadata["expert_count"], np.float32)
    scaled = with_values(case, values | {"blk.0.ffn_up_exps.scale": scales})
    with pytest.raises(
        UnsupportedModel, match=r"blk\.0\.ffn_up_exps\.scale: got one beside a bias"
    ):
        prepare_file(tiny.write_gguf(scaled, tmp_path / "case.gguf"))


def test_sections_of_a_rotation_are_for_images(tmp_path: Path) -> None:
    """A text has one position for all of them."""
    case = GLM4MOE[0]
    half = case.metadata["rope.dimension_count"] // 2
    sections = {"rope.dimension_sections": [half - 2, 1, 1, 0]}
    changed = replace(case, metadata={**case.metadata, **sections})
    np.testing.assert_array_equal(rows_of(changed, tmp_path), rows_of(case, tmp_path))
