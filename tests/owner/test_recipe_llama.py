"""The llama recipe writes the right program, and refuses what it cannot serve by name."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.frontend import Frontend, parse_frontend
from ds4_common.contract.validate import parse_bundle, validate
from ds4_common.errors import UnsupportedModel
from ds4_common.gguf import LogicalModel
from helpers.models import smollm2_path
from helpers.oracles import oracle
from helpers.prepared import Build, prepare_file
from helpers.tiny_gguf import TinyLlama, bpe_vocabulary, spm_vocabulary, write_llama


def frontend_of(tmp_path: Path, **changes: Any) -> Frontend:
    path = write_llama(tmp_path / "tiny.gguf", TinyLlama(**changes))
    return parse_frontend(prepare_file(path).frontend)


def ops(bundle: pb.Bundle, kernel: str) -> list[pb.Op]:
    (program,) = bundle.execution.programs
    return [op for op in program.ops.ops if op.kernel == kernel]


def inputs(op: pb.Op) -> list[str]:
    return list(getattr(op, "in"))


def rope(bundle: pb.Bundle) -> dict[str, float]:
    """Attributes of the rope ops, which must all agree but for the number of heads."""
    first, *others = [
        {k: v for k, v in op.attr.items() if k != "heads"} for op in ops(bundle, "rope")
    ]
    assert all(other == first for other in others)
    return first


# --- the real model ---


def test_smollm2_ends_where_its_oracle_ends() -> None:
    vocabulary = oracle("tokenize")["vocab"]
    prepared = prepare_file(smollm2_path())
    frontend = parse_frontend(prepared.frontend)
    assert list(frontend.eos_ids) == vocabulary["eog_ids"]
    assert (frontend.bos_id, frontend.eos_id) == (vocabulary["bos"], vocabulary["eos"])
    assert (frontend.add_bos, frontend.add_eos) == (vocabulary["add_bos"], vocabulary["add_eos"])
    chat = oracle("chat")
    assert frontend.chat_template == chat["chat_template"]
    assert (frontend.bos_token, frontend.eos_token) == (chat["bos_token"], chat["eos_token"])
    assert frontend.vocabulary == vocabulary["n_vocab"]


def test_smollm2_serves_what_its_file_says() -> None:
    bundle = prepare_file(smollm2_path()).bundle
    assert bundle.serving.context_tokens == 8192
    assert bundle.serving.model.cache.page_tokens == 64
    assert rope(bundle) == {"base": 100000.0, "dim": 64.0, "rope_dim": 64.0, "style": 0.0}
    count = Counter(op.kernel for op in bundle.execution.programs[0].ops.ops)
    assert count == {
        "embed": 1, "rms_norm": 61, "matmul": 211, "rope": 60, "kv_store": 30,
        "attend_paged": 30, "add": 60, "glu": 30, "gather_rows": 1,
    }  # fmt: skip


def test_a_prepared_bundle_survives_its_own_validation(prepared: Build) -> None:
    bundle = prepared(biases=True, rope_freqs=True)
    again = parse_bundle(bundle.SerializeToString())
    validate(again)
    assert again == bundle


# --- variants ---


def test_a_missing_output_is_tied_to_the_embedding(prepared: Build) -> None:
    assert inputs(ops(prepared(output=None), "matmul")[-1])[1] == "token_embd.weight"
    assert inputs(ops(prepared(), "matmul")[-1])[1] == "output.weight"


def test_biases_are_taken_where_the_file_has_them(prepared: Build) -> None:
    with_biases = [inputs(op)[2] for op in ops(prepared(biases=True), "matmul")]
    assert with_biases[:7] == [
        f"blk.0.{name}.bias"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    ]
    assert {inputs(op)[2] for op in ops(prepared(), "matmul")} == {""}


def test_rope_freqs_become_the_factors_of_every_rotation(prepared: Build) -> None:
    bundle = prepared(rope_freqs=True)
    assert {inputs(op)[2] for op in ops(bundle, "rope")} == {"rope_freqs.weight"}


def test_a_head_size_of_its_own_is_followed(prepared: Build) -> None:
    bundle = prepared(width=64, n_heads=4, n_kv_heads=1, head_dim=24)
    (attend, *_) = ops(bundle, "attend_paged")
    assert attend.attr["dim"] == attend.attr["value_dim"] == 24
    assert attend.attr["scale"] == pytest.approx(1 / math.sqrt(24))
    assert (attend.attr["heads"], attend.attr["kv_heads"]) == (4, 1)


def test_rotation_may_cover_part_of_a_head(prepared: Build) -> None:
    assert rope(prepared(metadata={"llama.rope.dimension_count": 6}))["rope_dim"] == 6


def test_an_attention_scale_in_the_file_wins(prepared: Build) -> None:
    bundle = prepared(metadata={"llama.attention.scale": 0.5})
    assert ops(bundle, "attend_paged")[0].attr["scale"] == 0.5


def test_head_counts_may_be_given_per_layer(prepared: Build) -> None:
    bundle = prepared(metadata={"llama.attention.head_count_kv": [2, 2]})
    assert [op.attr["kv_heads"] for op in ops(bundle, "attend_paged")] == [2, 2]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {}),
        ({"type": "none", "factor": 4.0}, {}),
        ({"type": "linear", "factor": 4.0}, {"freq_scale": 0.25}),
        ({"factor": 4.0}, {"freq_scale": 0.25}),
        ({"factor": 0.0}, {}),
        ({"type": "linear", "factor": 2.0, "attn_factor": 1.5},
         {"freq_scale": 0.5, "attn_factor": 1.5}),
        ({"type": "yarn", "factor": 8.0, "original_context_length": 32},
         {"freq_scale": 0.125, "ext_factor": 1.0, "original_context": 32.0}),
        ({"type": "yarn", "factor": 8.0},
         {"freq_scale": 0.125, "ext_factor": 1.0, "original_context": 256.0}),
        ({"type": "yarn", "factor": 2.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0,
          "yarn_ext_factor": 0.5},
         {"freq_scale": 0.5, "ext_factor": 0.5, "original_context": 256.0,
          "beta_fast": 16.0, "beta_slow": 2.0}),
    ],
)  # fmt: skip
def test_rope_scaling_becomes_attributes(
    prepared: Build, metadata: dict[str, Any], expected: dict[str, float]
) -> None:
    keys = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    plain = {"base": 10000.0, "dim": 16.0, "rope_dim": 16.0, "style": 0.0}
    assert rope(prepared(metadata=keys)) == plain | expected


def test_the_legacy_linear_scale_counts(prepared: Build) -> None:
    assert rope(prepared(metadata={"llama.rope.scale_linear": 2.0}))["freq_scale"] == 0.5


# --- ends, beginnings, template ---


def test_sentence_piece_files_have_defaults(tmp_path: Path) -> None:
    silent = {
        f"tokenizer.ggml.{key}": None
        for key in ("bos_token_id", "eos_token_id", "add_bos_token", "add_eos_token")
    }
    frontend = frontend_of(tmp_path, vocabulary=spm_vocabulary(), metadata=silent)
    assert (frontend.bos_id, frontend.eos_id) == (1, 2)
    assert (frontend.add_bos, frontend.add_eos) == (True, False)
    assert (frontend.bos_token, frontend.eos_token) == ("<s>", "</s>")
    assert frontend.eos_ids == (2,)


def test_ends_named_by_metadata_are_added_to_those_found_by_text(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 40, "tokenizer.ggml.fim_pad_token_id": 50}
    assert frontend_of(tmp_path, metadata=metadata).eos_ids == (0, 2, 40, 50)


def test_end_closes_a_part_where_turns_have_their_own_end(tmp_path: Path) -> None:
    vocabulary = bpe_vocabulary()
    texts = ["<|return|>", "<|call|>", "<|end|>"]
    tokens = vocabulary.tokens[: -len(texts)] + texts
    changed = dataclasses.replace(vocabulary, tokens=tokens)
    n = len(tokens)
    assert frontend_of(tmp_path, vocabulary=changed).eos_ids == (0, 2, n - 3, n - 2)


def test_a_file_without_a_template_says_so(tmp_path: Path) -> None:
    frontend = frontend_of(tmp_path, chat_template=None)
    assert frontend.chat_template is None


def test_the_syntax_of_a_template_reaches_the_frontend(tmp_path: Path) -> None:
    template = '<think>\n</think><tool_call>{"name": N, "arguments": A}</tool_call>'
    frontend = frontend_of(tmp_path, chat_template=template)
    assert frontend.tools is not None
    assert (frontend.tools.syntax, frontend.tools.open) == ("TOOL_TAGGED_JSON", "<tool_call>")
    assert frontend.reasoning is not None
    assert frontend.reasoning.syntax == "REASONING_THINK_TAGS"


def test_sampling_defaults_are_the_neutral_ones(tmp_path: Path) -> None:
    defaults = frontend_of(tmp_path).defaults
    assert (defaults.temperature, defaults.top_p, defaults.min_p) == (1.0, 1.0, 0.05)
    assert (defaults.top_k, defaults.repeat_penalty, defaults.max_tokens) == (0, 1.0, 0)


def test_what_a_file_recommends_wins_over_the_neutral_defaults(tmp_path: Path) -> None:
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40}
    defaults = frontend_of(tmp_path, metadata=metadata).defaults
    assert (defaults.temperature, defaults.top_k) == (0.5, 40)
    assert (defaults.top_p, defaults.min_p, defaults.repeat_penalty) == (1.0, 0.05, 1.0)


@pytest.mark.parametrize(
    ("key", "value"), [("temp", -1.0), ("top_p", 0.0), ("min_p", 1.5), ("top_k", 1 << 31)]
)
def test_a_recommendation_out_of_range_is_refused(tmp_path: Path, key: str, value: float) -> None:
    with pytest.raises(UnsupportedModel, match=f"general.sampling.{key}"):
        frontend_of(tmp_path, metadata={f"general.sampling.{key}": value})


def test_cache_and_weights_are_counted(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    frontend = parse_frontend(prepare_file(path).frontend)
    assert frontend.cache_bytes_per_token_f16 == 2 * 2 * 2 * 2 * 16  # bytes, k+v, layers, heads
    assert frontend.cache_bytes_per_token_f32 == 2 * frontend.cache_bytes_per_token_f16
    with LogicalModel.open(path) as model:
        assert frontend.weights_bytes == sum(t.n_bytes for t in model.tensors)


def test_layers_of_unequal_feed_forward_get_buffers_of_their_own(tmp_path: Path) -> None:
    path = write_uneven(tmp_path / "uneven.gguf")
    bundle = prepare_file(path).bundle
    gates = [op.out[0] for op in ops(bundle, "glu")]
    shapes = {b.name: list(b.shape) for b in bundle.execution.buffers}
    assert [shapes[gate] for gate in gates] == [[0, 32], [0, 96]]


def write_uneven(path: Path) -> Path:
    """Two layers with different feed-forward widths."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": 2, "context_length": 64, "embedding_length": 32}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_array("llama.feed_forward_length", [32, 96])
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(64)])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(3)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, np.zeros(shape, np.float32))

    tensor("token_embd.weight", 64, 32)
    tensor("output_norm.weight", 32)
    for i, width in enumerate((32, 96)):
        for name in ("attn_norm", "ffn_norm"):
            tensor(f"blk.{i}.{name}.weight", 32)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{i}.{name}.weight", 32, 32)
        for name in ("ffn_gate", "ffn_up"):
            tensor(f"blk.{i}.{name}.weight", width, 32)
        tensor(f"blk.{i}.ffn_down.weight", 32, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
