"""The rules of the ops beyond llama's: each refuses operands and attributes that do not fit."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.validate import parse_bundle, validate
from ds4_common.errors import ContractError
from golden import tiny
from golden.deepseek2.cases import CASES as DEEPSEEK2
from golden.gemma2.cases import CASES as GEMMA2
from golden.gpt_oss.cases import CASES as GPT_OSS
from golden.phi3.cases import CASES as PHI3
from golden.qwen2moe.cases import CASES as QWEN2MOE
from golden.qwen3.cases import CASES as QWEN3
from helpers.bundles import buffer, op, put_input
from helpers.prepared import prepare_file

MODELS = {
    case.id: case for case in (*DEEPSEEK2, GEMMA2[0], GPT_OSS[0], PHI3[2], QWEN2MOE[0], QWEN3[0])
}
Refusal = tuple[str, str, Callable[[pb.Bundle], object], str]


@functools.cache
def contract(model: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write_gguf(MODELS[model], Path(folder) / "m.gguf")
        return prepare_file(path).bundle.SerializeToString()


def attribute(kernel: str, name: str, value: float) -> Callable[[pb.Bundle], object]:
    return lambda b: op(b, kernel).attr.__setitem__(name, value)


def operand(kernel: str, index: int, name: str) -> Callable[[pb.Bundle], object]:
    return lambda b: put_input(op(b, kernel), index, name)


def extent(name: str, index: int, value: int) -> Callable[[pb.Bundle], object]:
    def change(b: pb.Bundle) -> Any:
        buffer(b, name).shape[index] = value

    return change


LATENT, GROUPED = "deepseek2-absorbed", "deepseek2-sigmoid_groups"
REFUSALS: list[Refusal] = [
    ("heads of a norm", "qwen3-plain", attribute("rms_norm", "heads", 5), "a divisor of the width"),
    ("weight of a norm", "qwen3-plain", attribute("rms_norm", "heads", 2), "expected WEIGHT [16]"),
    (
        "rope offset",
        LATENT,
        attribute("rope", "offset", 1),
        "offset: got 1.0, expected an integer from 0 to 0",
    ),
    ("truncate", "gpt-oss-plain", attribute("rope", "truncate", 2), "truncate: got 2"),
    ("long factors", "phi3-long", operand("rope", 3, "output_norm.weight"), "long_factors: got"),
    (
        "long factors of no context",
        "phi3-long",
        attribute("rope", "original_context", 0),
        "original_context: got 0",
    ),
    ("window", "gemma2-plain", attribute("attend_paged", "window", -1), "window: got -1"),
    ("score cap", "gemma2-plain", attribute("attend_paged", "soft_cap", -1), "soft_cap: got -1"),
    ("sinks", "gpt-oss-plain", operand("attend_paged", 6, "output_norm.weight"), "sinks: got"),
    ("unit", "gpt-oss-plain", attribute("glu", "act", 3), "act: got 3"),
    ("limit", "gpt-oss-plain", attribute("glu", "limit", -1), "limit: got -1"),
    ("alpha", "gpt-oss-plain", attribute("glu", "alpha", 0), "alpha: got 0"),
    ("logit cap", "gemma2-plain", attribute("soft_cap", "cap", 0), "cap: got 0"),
    ("gate of a row", "qwen2moe-plain", operand("gate_row", 1, "x"), "expected SCRATCH F32 [0, 1]"),
    ("slice", LATENT, attribute("slice_heads", "first", 15), "at most 20"),
    ("slice of others", LATENT, attribute("slice_heads", "heads", 3), "expected SCRATCH F32"),
    ("join", LATENT, attribute("join_heads", "heads", 3), "a multiple of the 3 heads"),
    ("joined with others", LATENT, operand("join_heads", 1, "opening"), "'opening'"),
    ("heads of matrices", LATENT, operand("matmul_heads", 0, "latent"), "expected SCRATCH F32"),
    ("matrix of heads", LATENT, operand("matmul_heads", 1, "output.weight"), "expected WEIGHT"),
    ("score", GROUPED, attribute("route_experts", "score", 4), "score: got 4"),
    ("groups", GROUPED, attribute("route_experts", "groups", 3), "a divisor of the 8 experts"),
    ("groups used", GROUPED, attribute("route_experts", "groups_used", 3), "groups_used: got 3"),
    ("group top", GROUPED, attribute("route_experts", "group_top", 5), "group_top: got 5"),
    ("normalize", GROUPED, attribute("route_experts", "normalize", 0.5), "normalize: got 0.5"),
    ("scale", GROUPED, attribute("route_experts", "scale", 0), "scale: got 0"),
    ("bias of logits", GROUPED, attribute("route_experts", "score", 3), "none with score 3"),
    ("choice", GROUPED, operand("route_experts", 1, "output_norm.weight"), "bias: got"),
    ("routes", GROUPED, extent("routes", 1, 5), "twice 1 to 4 experts"),
    ("more than there are", GROUPED, extent("routes", 1, 10), "twice 1 to 4 experts"),
    ("experts' input", GROUPED, extent("routes", 1, 4), "expected SCRATCH F32"),
    ("experts", GROUPED, operand("matmul_experts", 2, "output.weight"), "expected WEIGHT"),
    (
        "experts' bias",
        "gpt-oss-plain",
        operand("matmul_experts", 3, "blk.0.ffn_down_exps.bias"),
        "bias: got",
    ),
    (
        "experts' bias of halves",
        "gpt-oss-plain",
        lambda b: buffer(b, "blk.0.ffn_gate_exps.bias").MergeFrom(
            pb.Buffer(ggml_type=1, bytes=6 * 24 * 2)
        ),
        "expected ggml type F32",
    ),
    ("combined", GROUPED, operand("combine_experts", 0, "x"), "a multiple of the 3 experts"),
]


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [refusal[1:] for refusal in REFUSALS],
    ids=[refusal[0] for refusal in REFUSALS],
)
def test_an_op_that_does_not_fit_is_refused(
    model: str, change: Callable[[pb.Bundle], object], message: str
) -> None:
    bundle = parse_bundle(contract(model))
    validate(bundle)
    change(bundle)
    with pytest.raises(ContractError) as raised:
        validate(bundle)
    assert message in str(raised.value)
