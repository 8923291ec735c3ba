"""Models of published sizes, without their bytes: nothing about hundreds of GB is out of range."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from ds4_common.allocation import Layout, TensorPlace
from ds4_common.contract.image import write_image
from ds4_common.contract.lower import lower_image
from ds4_common.gguf import GgmlType as T
from ds4_common.gguf import LogicalModel, block_bytes, block_weights
from golden import tiny
from golden.deepseek2.cases import CASES as DEEPSEEK2
from golden.glm4moe.cases import CASES as GLM4MOE
from golden.gpt_oss.cases import CASES as GPT_OSS
from golden.qwen3moe.cases import PLAIN as QWEN3MOE
from helpers.prepared import prepare_places


def qwen3_coder_480b() -> tuple[tiny.Case, tiny.Shapes, dict[str, Any], int]:
    shapes = tiny.trunk(6144, 62)
    for i in range(62):
        shapes |= tiny.attention(i, 6144, 96, 8, 128, norms=True) | tiny.experts(i, 6144, 2560, 160)
    sizes = {
        "block_count": 62, "embedding_length": 6144, "attention.head_count": 96,
        "attention.head_count_kv": 8, "attention.key_length": 128, "attention.value_length": 128,
        "expert_count": 160, "expert_used_count": 8, "expert_feed_forward_length": 2560,
    }  # fmt: skip
    return QWEN3MOE, shapes, sizes, 262144


def gpt_oss_120b() -> tuple[tiny.Case, tiny.Shapes, dict[str, Any], int]:
    shapes = {n.replace("ffn_norm", "post_attention_norm"): s
              for n, s in tiny.trunk(2880, 36).items()}  # fmt: skip
    for i in range(36):
        shapes |= tiny.attention(i, 2880, 64, 8, 64, biases="qkvo")
        shapes |= tiny.experts(i, 2880, 2880, 128) | {f"blk.{i}.attn_sinks.weight": (64,)}
        shapes |= {f"blk.{i}.ffn_{part}_exps.bias": (128, 2880) for part in ("gate", "up", "down")}
        shapes[f"blk.{i}.ffn_gate_inp.bias"] = (128,)
    sizes = {
        "block_count": 36, "embedding_length": 2880, "attention.head_count": 64,
        "attention.head_count_kv": 8, "attention.key_length": 64, "attention.value_length": 64,
        "rope.dimension_count": 64, "attention.sliding_window": 128, "expert_count": 128,
        "expert_used_count": 4, "expert_feed_forward_length": 2880,
    }  # fmt: skip
    return GPT_OSS[0], shapes, sizes, 131072


def glm_355b() -> tuple[tiny.Case, tiny.Shapes, dict[str, Any], int]:
    shapes = {n.replace("ffn_norm", "post_attention_norm"): s
              for n, s in tiny.trunk(5120, 93).items()}  # fmt: skip
    for i in range(93):
        shapes |= tiny.attention(i, 5120, 96, 8, 128, biases="qkv", norms=True)
        shapes |= tiny.gated(i, 5120, 12288) if i < 3 else tiny.experts(i, 5120, 1536, 160)
        if i >= 3:
            shapes |= tiny.gated(i, 5120, 1536, "_shexp")
            shapes[f"blk.{i}.exp_probs_b.bias"] = (160,)
    shapes["blk.92.nextn.eh_proj.weight"] = (5120, 10240)
    sizes = {
        "block_count": 93, "embedding_length": 5120, "feed_forward_length": 12288,
        "attention.head_count": 96, "attention.head_count_kv": 8, "attention.key_length": 128,
        "attention.value_length": 128, "rope.dimension_count": 64, "expert_count": 160,
        "expert_used_count": 8, "expert_feed_forward_length": 1536, "leading_dense_block_count": 3,
    }  # fmt: skip
    return GLM4MOE[1], shapes, sizes, 131072


def kimi_k2() -> tuple[tiny.Case, tiny.Shapes, dict[str, Any], int]:
    shapes = tiny.trunk(7168, 61)
    for i in range(61):
        stem = f"blk.{i}.attn"
        shapes |= {
            f"{stem}_q_a.weight": (1536, 7168), f"{stem}_q_a_norm.weight": (1536,),
            f"{stem}_q_b.weight": (64 * 192, 1536), f"{stem}_kv_a_mqa.weight": (576, 7168),
            f"{stem}_kv_a_norm.weight": (512,), f"{stem}_k_b.weight": (64, 512, 128),
            f"{stem}_v_b.weight": (64, 128, 512), f"{stem}_output.weight": (7168, 64 * 128),
        }  # fmt: skip
        shapes |= tiny.experts(i, 7168, 2048, 384) if i else tiny.gated(i, 7168, 18432)
        if i:
            shapes |= tiny.gated(i, 7168, 2048, "_shexp") | {f"blk.{i}.exp_probs_b.bias": (384,)}
    sizes = {
        "block_count": 61, "embedding_length": 7168, "feed_forward_length": 18432,
        "attention.head_count": 64, "attention.head_count_kv": 1, "attention.q_lora_rank": 1536,
        "attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512,
        "attention.key_length_mla": 192, "attention.value_length_mla": 128,
        "rope.dimension_count": 64, "expert_count": 384, "expert_used_count": 8,
        "expert_feed_forward_length": 2048, "expert_shared_count": 1, "expert_group_count": 1,
        "expert_group_used_count": 1, "expert_gating_func": 2, "leading_dense_block_count": 1,
    }  # fmt: skip
    absorbed = next(case for case in DEEPSEEK2 if "attention.key_length_mla" in case.metadata)
    return absorbed, shapes, sizes, 131072


def places_of(shapes: tiny.Shapes) -> tuple[dict[str, TensorPlace], int]:
    """Matrices in blocks, one behind the other in one allocation."""
    places, at = {}, 0
    for name, shape in shapes.items():
        kind = T.F32
        if len(shape) > 1 and not name.endswith(".bias"):
            kind = T.Q4_K if shape[-1] % 256 == 0 else T.MXFP4
        n_bytes = math.prod(shape) // block_weights(kind) * block_bytes(kind)
        places[name] = TensorPlace("base", name, kind, shape[::-1], Layout.RAW, 0, at, n_bytes)
        at += -(-n_bytes // 64) * 64
    return places, at


@pytest.mark.parametrize("model", [qwen3_coder_480b, gpt_oss_120b, glm_355b, kimi_k2])
def test_the_largest_models_of_families_are_prepared(model: Any, tmp_path: Path) -> None:
    case, shapes, sizes, context = model()
    small = dataclasses.replace(case, metadata={**case.metadata, **sizes}, context=context)
    places, total = places_of(shapes)
    with LogicalModel.open(tiny.write_gguf(small, tmp_path / "m.gguf")) as opened:
        bundle = prepare_places(opened.metadata, places)
    assert total > 60e9
    held = [r.bytes for r in bundle.resources if r.kind == "allocation"]
    assert max(held) > 0.95 * total
    assert len(write_image(lower_image(bundle))) < 4e6
