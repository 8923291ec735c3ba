"""Artifacts: who gets one, how large it is, and that its bytes are the published ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ds4_common.allocation import Artifact, ArtifactKind
from ds4_common.errors import BudgetError, GgufError, UsageError
from ds4_common.gguf import GgmlType, TensorInfo, block_bytes, block_weights
from ds4_owner.artifacts import (
    ArtifactOptions,
    eligible_artifacts,
)

Bytes = npt.NDArray[np.uint8]
K = ArtifactKind
Q8, Q2K, XXS, XS = GgmlType.Q8_0, GgmlType.Q2_K, GgmlType.IQ2_XXS, GgmlType.IQ2_XS
GATE, DOWN = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_down_exps.weight"


def tensor(
    name: str, dims: tuple[int, ...], ggml_type: GgmlType, n_bytes: int | None = None
) -> TensorInfo:
    if n_bytes is None:
        weights = int(np.prod(dims))
        n_bytes = weights // block_weights(ggml_type) * block_bytes(ggml_type)
    return TensorInfo(name, ggml_type, dims, 4096, n_bytes, 0, 4096)


def kinds(*tensors: TensorInfo, options: ArtifactOptions | None = None) -> list[ArtifactKind]:
    return [p.kind for p in eligible_artifacts(tensors, options or ArtifactOptions())]


# --- eligibility ---


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (tensor(GATE, (1024, 8, 4), XXS), [K.IQ2_XXS_ALIGNED]),
        (tensor("blk.0.ffn_up_exps.weight", (1024, 8, 4), XS), [K.IQ2_XS_ALIGNED]),
        (tensor("model.mlp.experts.w13_weight", (2048, 8, 4), XXS), [K.IQ2_XXS_ALIGNED]),
        (tensor(GATE, (512, 8, 4), XXS), []),
        (tensor(GATE, (1024, 8), XXS), []),
        (tensor(DOWN, (1024, 8, 4), XXS), []),
        (tensor(GATE, (1024, 8, 4), XXS, 66 * 128 + 1), []),
        (tensor(DOWN, (256, 8, 4), Q2K), [K.Q2_K_ALIGNED]),
        (tensor(DOWN, (256, 7, 4), Q2K), []),
        (tensor(DOWN, (256, 8), Q2K), []),
        (tensor(GATE, (256, 8, 4), Q2K), []),
        (tensor("blk.0.attn_q.weight", (1024, 2048), Q8), [K.Q8_0_ALIGNED]),
        (tensor("blk.0.attn_q.weight", (1024, 1024), Q8), []),  # below 2 MiB
        (tensor("blk.0.attn_q.weight", (1024, 2048, 1), Q8), []),
        (tensor("token_embd.weight", (1024, 4096), Q8), []),
        (tensor("x", (2560, 640), Q8), [K.Q8_0_ALIGNED]),
        (tensor("x", (2560, 641), Q8), []),
        (tensor("x", (128, 8192), Q8), [K.Q8_0_ALIGNED]),
        (tensor("x", (128, 8191), Q8), []),
        (tensor("x", (1152, 2048), Q8), [K.Q8_0_ALIGNED]),
        (tensor("x", (1152, 2049), Q8), []),
        (tensor("x", (1152, 1920), Q8), []),
        (tensor("x", (1120, 2048), Q8), []),
        (tensor("x", (4224, 2048), Q8), []),
        (tensor("x", (640, 2048), Q8), []),  # below 2 MiB
        (tensor("blk.0.attn_kv_b.weight", (512, 4096), Q8), [K.Q8_0_ALIGNED, K.MLA_KV_B]),
        (tensor("blk.0.attn_kv_b.weight", (512, 32768), Q8), [K.Q8_0_ALIGNED, K.MLA_KV_B]),
        (tensor("blk.0.attn_kv_b.weight", (1024, 20480), Q8), [K.Q8_0_ALIGNED, K.MLA_KV_B]),
        (tensor("blk.0.attn_kv_b.weight", (512, 8192), Q8), [K.Q8_0_ALIGNED]),
        (tensor("blk.0.attn_kv.weight", (512, 4096), Q8), [K.Q8_0_ALIGNED]),
        (tensor("x", (1024, 4096), GgmlType.F16), []),
    ],
    ids=lambda value: f"{value.name} {value.dims}" if isinstance(value, TensorInfo) else None,
)
def test_published_rules_decide_who_is_eligible(
    candidate: TensorInfo, expected: list[ArtifactKind]
) -> None:
    assert kinds(candidate) == expected


def test_plans_come_in_the_published_build_order() -> None:
    tensors = (
        tensor("output.weight", (1024, 4096), Q8),
        tensor("blk.0.attn_kv_b.weight", (512, 4096), Q8),
        tensor("blk.0.ffn_up_exps.weight", (1024, 8, 4), XS),
        tensor(GATE, (1024, 8, 4), XXS),
        tensor(DOWN, (256, 8, 4), Q2K),
    )
    options = ArtifactOptions(
        output_certifier=True, q8_f16=("output.weight",), q8_f32=("output.weight",)
    )
    assert kinds(*tensors, options=options) == [
        K.Q2_K_ALIGNED, K.IQ2_XXS_ALIGNED, K.IQ2_XS_ALIGNED, K.Q8_0_ALIGNED, K.Q8_0_ALIGNED,
        K.MLA_KV_B, K.ROW_GROUP_NORMS, K.Q8_F16, K.Q8_F32,
    ]  # fmt: skip


def test_each_flag_switches_its_kinds_off() -> None:
    tensors = (
        tensor("blk.0.attn_kv_b.weight", (512, 4096), Q8),
        tensor("blk.0.ffn_up_exps.weight", (1024, 8, 4), XS),
        tensor(GATE, (1024, 8, 4), XXS),
        tensor(DOWN, (256, 8, 4), Q2K),
    )
    iq2, q8 = {K.IQ2_XXS_ALIGNED, K.IQ2_XS_ALIGNED}, {K.Q8_0_ALIGNED, K.MLA_KV_B}
    everything = set(kinds(*tensors))
    assert set(kinds(*tensors, options=ArtifactOptions(repack_iq2=False))) == everything - iq2
    assert set(kinds(*tensors, options=ArtifactOptions(repack_q8=False))) == everything - q8
    assert set(kinds(*tensors, options=ArtifactOptions(repack_q2k=False))) == everything - {
        K.Q2_K_ALIGNED
    }


def test_records_carry_the_published_dims_groups_and_replacement() -> None:
    tensors = (
        tensor(GATE, (1024, 8, 4), XXS),
        tensor("blk.0.attn_kv_b.weight", (512, 4096), Q8),
        tensor("output.weight", (1024, 64), Q8),
    )
    options = ArtifactOptions(output_certifier=True, group_count=5, q8_f32=("output.weight",))
    plans = eligible_artifacts(tensors, options)
    assert [(p.artifact, p.n_bytes, p.replaces) for p in plans] == [
        (Artifact(K.IQ2_XXS_ALIGNED, 1024, 8, 4, GATE), 256 + 64 * 128, True),
        (
            Artifact(K.Q8_0_ALIGNED, 512, 4096, 1, "blk.0.attn_kv_b.weight"),
            34 * 16 * 4096,
            False,
        ),
        (Artifact(K.MLA_KV_B, 512, 4096, 1, "blk.0.attn_kv_b.weight"), 34 * 16 * 2048, False),
        (Artifact(K.ROW_GROUP_NORMS, 1024, 64, 5, "output.weight"), 4 * 64 * 5, False),
        (Artifact(K.Q8_F32, 1024, 64, 0, "output.weight"), 4 * 1024 * 64, False),
    ]


@pytest.mark.parametrize(
    "candidate",
    [
        tensor(GATE, (1024, 8, 4), XXS, 66 * 127),
        tensor(DOWN, (256, 8, 4), Q2K, 84 * 33),
        tensor("x", (1024, 2048), Q8, 34 * 65537),
    ],
    ids=["IQ2_XXS", "Q2_K", "Q8_0"],
)
def test_block_count_that_disagrees_with_dims_fails_the_start(candidate: TensorInfo) -> None:
    with pytest.raises(GgufError, match="blocks, from dims"):
        eligible_artifacts([candidate], ArtifactOptions())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ArtifactOptions(output_certifier=True), "--derive-output-certifier.*no tensor output"),
        (ArtifactOptions(q8_f16=("nope",)), "--derive-q8-f16.*no tensor nope"),
        (ArtifactOptions(q8_f32=("three",)), "--derive-q8-f32.*3-D Q8_0"),
        (ArtifactOptions(q8_f32=("half",)), "--derive-q8-f32.*2-D F16"),
    ],
)
def test_named_tensor_that_cannot_be_derived_is_refused(
    options: ArtifactOptions, words: str
) -> None:
    tensors = [tensor("three", (32, 2, 2), Q8), tensor("half", (32, 2), GgmlType.F16)]
    with pytest.raises(UsageError, match=words):
        eligible_artifacts(tensors, options)


def test_budget_counts_the_dequantized_kinds_only_and_zero_is_unlimited() -> None:
    tensors = [tensor("w", (1024, 4096), Q8), tensor(GATE, (1024, 8, 4), XXS)]
    need = 2 * 1024 * 4096
    exact = ArtifactOptions(q8_f16=("w",), budget_bytes=need)
    assert K.Q8_F16 in kinds(*tensors, options=exact)
    with pytest.raises(BudgetError, match=f"need {need} bytes"):
        kinds(*tensors, options=ArtifactOptions(q8_f16=("w",), budget_bytes=need - 1))
    assert K.Q8_F16 in kinds(*tensors, options=ArtifactOptions(q8_f16=("w",), budget_bytes=0))
