"""What the llama recipe cannot serve is refused by name."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from ds4_common.allocation import TensorPlace
from ds4_common.errors import GgufError, UnsupportedModel
from ds4_common.gguf import GgmlType, LogicalModel
from helpers.prepared import Build, prepare_places, raw_places
from helpers.tiny_gguf import bpe_vocabulary, write_llama


def test_an_unknown_architecture_lists_the_known_ones(prepared: Build) -> None:
    with pytest.raises(UnsupportedModel, match=r"got 'mystery', expected one of: .*llama"):
        prepared(metadata={"general.architecture": "mystery"})


def test_missing_experts_are_named(prepared: Build) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        prepared(metadata={"llama.expert_count": 8, "llama.expert_used_count": 2})
    message = str(refusal.value)
    assert "blk.0.ffn_gate_inp.weight: missing, expected [8, 64]" in message
    assert "blk.0.ffn_gate_exps.weight: missing, expected [8, 128, 64]" in message
    prepared(metadata={"llama.expert_count": 0})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("llama.block_count", 0, "got 0, expected an integer from 1 to"),
        ("llama.block_count", 1 << 60, "got 1152921504606846976"),
        ("llama.attention.head_count", 0, "got 0"),
        ("llama.attention.head_count", 1 << 31, "got 2147483648"),
        ("llama.attention.head_count_kv", 0, "got 0"),
        ("llama.attention.head_count_kv", 3, "a divisor of layer 0's 4 heads"),
        ("llama.attention.head_count_kv", [2, 2, 2], "got 3 entries, expected one per layer"),
        ("llama.attention.head_count_kv", [2, 0], "got 0, expected integers from 1"),
        ("llama.attention.head_count", 6, "a divisor of the width 64"),
        ("llama.embedding_length", 0, "got 0"),
        ("llama.feed_forward_length", 0, "got 0"),
        ("llama.context_length", 0, "got 0"),
        ("llama.context_length", 1 << 40, "got 1099511627776"),
        ("llama.attention.key_length", 0, "got 0"),
        ("llama.rope.dimension_count", 7, "got 7, expected an even number"),
        ("llama.rope.dimension_count", 18, "got 18, expected an integer from 2 to 16"),
        ("llama.rope.freq_base", 0.0, "got 0.0"),
        ("llama.rope.freq_base", math.inf, "got inf"),
        ("llama.rope.scaling.type", "x", "got x, expected one of none, linear, yarn, longrope"),
        ("llama.rope.scaling.factor", -1.0, "got -1.0"),
        ("llama.rope.scaling.factor", math.nan, "got nan"),
        ("llama.attention.layer_norm_rms_epsilon", math.nan, "got nan"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "got -1.0"),
        ("llama.attention.scale", math.inf, "got inf"),
    ],
)
def test_absurd_parameters_are_refused_by_name(
    prepared: Build, key: str, value: Any, expected: str
) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        prepared(metadata={key: value})
    assert f"metadata {key!r}" in str(refusal.value)
    assert expected in str(refusal.value)


def test_yarn_cannot_shrink_the_context(prepared: Build) -> None:
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.factor.*at least 1 with YaRN"):
        prepared(metadata={"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.5})


@pytest.mark.parametrize(
    "key",
    ["llama.embedding_length", "llama.attention.layer_norm_rms_epsilon", "llama.context_length"],
)
def test_missing_parameters_are_named(prepared: Build, key: str) -> None:
    with pytest.raises(GgufError, match=key):
        prepared(metadata={key: None})


def test_a_width_that_no_tensor_has_names_the_tensors(prepared: Build) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"token_embd\.weight: got \[320, 64\].*and \d+ more"
    ):
        prepared(metadata={"llama.embedding_length": 128})


def test_a_vocabulary_of_another_size_is_refused(prepared: Build) -> None:
    vocabulary = bpe_vocabulary()
    fewer = {
        "tokenizer.ggml.tokens": vocabulary.tokens[:-1],
        "tokenizer.ggml.token_type": vocabulary.types[:-1],
    }
    refusal = r"token_embd\.weight: got \[320, 64\], expected \[319, 64\]"
    with pytest.raises(UnsupportedModel, match=refusal):
        prepared(metadata=fewer)


@pytest.fixture
def opened(tmp_path: Path) -> LogicalModel:
    return LogicalModel.open(write_llama(tmp_path / "tiny.gguf"))


def places_of(model: LogicalModel) -> dict[str, TensorPlace]:
    with model:
        return raw_places(model)


def test_missing_tensors_are_named_together(opened: LogicalModel) -> None:
    places = raw_places(opened)
    del places["blk.1.ffn_up.weight"], places["blk.0.attn_norm.weight"]
    with opened, pytest.raises(UnsupportedModel) as refusal:
        prepare_places(opened.metadata, places)
    assert "blk.0.attn_norm.weight: missing, expected [64]" in str(refusal.value)
    assert "blk.1.ffn_up.weight: missing, expected [128, 64]" in str(refusal.value)


def test_unknown_tensors_are_named(opened: LogicalModel) -> None:
    places = raw_places(opened)
    extra = dataclasses.replace(places["output.weight"], name="blk.0.mystery.weight")
    places["blk.0.mystery.weight"] = extra
    with opened, pytest.raises(UnsupportedModel, match=r"not know: blk\.0\.mystery\.weight;"):
        prepare_places(opened.metadata, places)


def test_a_model_without_an_embedding_is_refused(opened: LogicalModel) -> None:
    places = raw_places(opened)
    del places["token_embd.weight"]
    with opened, pytest.raises(UnsupportedModel, match=r"token_embd\.weight: missing"):
        prepare_places(opened.metadata, places)


def test_a_norm_of_a_block_type_is_refused_by_name(tmp_path: Path, opened: LogicalModel) -> None:
    places = raw_places(opened)
    name = "blk.0.attn_norm.weight"
    places[name] = dataclasses.replace(places[name], ggml_type=GgmlType.Q8_0, n_bytes=68)
    with opened, pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_norm\.weight.*Q8_0"):
        prepare_places(opened.metadata, places)


def test_a_template_beyond_reason_is_refused(prepared: Build) -> None:
    with pytest.raises(UnsupportedModel, match=r"chat_template.*got 1048577 characters"):
        prepared(chat_template="x" * ((1 << 20) + 1))
