"""Tiny models as data: a case's weights follow from its name, its file from both.

Owns: what all families share - how a case becomes a GGUF file, and how its tensors become the
state of the model in `transformers`. A family's `cases.py` lists its cases and says what its
tensors are called there. `make.py` writes the golden logits; tests run the file through recipe and
executor.
"""

from __future__ import annotations

import importlib
import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ds4_common.gguf import GgmlType, block_weights
from helpers.tiny_gguf import Vocabulary, add_vocabulary, random_tensor

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
Shapes = dict[str, tuple[int, ...]]

FAMILIES = (
    "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "mixtral", "qwen2moe", "qwen3moe", "gpt_oss",
    "glm4moe", "deepseek2", "deepseek4",
)  # fmt: skip
VOCABULARY = 64
TEXTS = ("t", "1", *(f"t{i - 1}" for i in range(2, VOCABULARY)))  # "t" and "1" make "t1"
WORDS = Vocabulary(
    "gpt2", "gpt-2", list(TEXTS), [1] * VOCABULARY, merges=["t 1"], bos=0, eos=VOCABULARY - 1
)
N_TOKENS = 48
ROWS = (0, 1, 23, 47)  # positions whose logits are kept
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """`metadata` below the architecture's prefix, `shapes` of the tensors (row-major), `model` the
    class in `transformers` with the arguments of its configuration, `state` the renaming of tensors
    for it. `peer`: whether llama.cpp computes the same, else why not."""

    name: str
    architecture: str
    metadata: Mapping[str, Any]
    shapes: Shapes
    model: str
    config: Mapping[str, Any]
    state: Callable[[Case, Tensors], Tensors]
    context: int = 64
    peer: bool = True
    norms: float = 1.0  # what norm weights lie around
    tensors: Mapping[str, Array] = field(default_factory=dict)  # given, not drawn
    length: int = N_TOKENS  # of the prompt
    rows: tuple[int, ...] = ROWS
    rounded: bool = False  # to small floats, which `transformers` and llama.cpp leave out

    @property
    def id(self) -> str:
        return f"{self.architecture}-{self.name}"


def cases_of(family: str) -> Sequence[Case]:
    """The cases of `tests/golden/<family>/cases.py`."""
    cases: Sequence[Case] = importlib.import_module(f"golden.{family}.cases").CASES
    return cases


def logits_path(family: str) -> Path:
    return Path(__file__).parent / family / "logits.json"


def tokens(case: Case) -> list[int]:
    rng = np.random.default_rng([len(case.name), 1])
    return [int(t) for t in rng.integers(0, VOCABULARY, case.length)]


def tensors(case: Case) -> Tensors:
    """Matrices uniform in +-sqrt(3 / inputs), norms around `norms`, other vectors around 0."""
    found: Tensors = {}
    for name, shape in case.shapes.items():
        rng = np.random.default_rng(zlib.crc32(f"{case.id} {name}".encode()))
        spread = rng.random(shape) * 2 - 1
        if "norm" in name:
            values = case.norms + 0.2 * spread
        elif name.endswith(".bias") or len(shape) == 1:
            values = 0.3 * spread
        elif name.endswith("_ape.weight"):
            values = spread
        else:
            values = spread * math.sqrt(3 / shape[-1]) * (4 if name.startswith("token") else 1)
        found[name] = values.astype(np.float32)
    return found | dict(case.tensors)


def write_gguf(
    case: Case,
    path: Path,
    types: Sequence[GgmlType] | Mapping[str, GgmlType] = (),
    *,
    experts_apart: bool = False,
    vocabulary: Vocabulary = WORDS,
    chat_template: str | None = None,
) -> Path:
    """The case as a GGUF file; its vocabulary is t1, t2, ... where none is given. Tensors are
    float32; with `types` the matrices of the layers get random blocks of those types in turn, each
    of the next type whose blocks fill its rows; a float type among them fills any. Or `types` says
    which type matrices have whose name holds a text. `experts_apart`: one tensor for each expert,
    those of one number side by side, as old files have them."""
    writer = gguf.GGUFWriter(path, case.architecture)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    for key, value in ({"context_length": case.context} | dict(case.metadata)).items():
        add[type(value)](f"{case.architecture}.{key}", value)
    add_vocabulary(writer, vocabulary)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    type_of = _named(types) if isinstance(types, Mapping) else _dealt(types)
    rng = np.random.default_rng(7)
    apart: list[tuple[str, Any, gguf.GGMLQuantizationType | None]] = []
    for name, value in tensors(case).items():
        ggml_type = GgmlType.F32
        if value.ndim > 1 and value.dtype == np.float32:
            ggml_type = type_of(name, value.shape[-1])
        data, raw = value, None
        if ggml_type != GgmlType.F32:
            data = random_tensor(value.shape, ggml_type, rng, value.shape[-1] ** -0.5)
            raw = gguf.GGMLQuantizationType(ggml_type)
        if experts_apart and "_exps." in name:
            stem, _, ending = name.partition("_exps.")
            apart += [(f"{stem}.{i}.{ending}", part, raw) for i, part in enumerate(data)]
        else:
            writer.add_tensor(name, data, raw_dtype=raw)
    for name, data, raw in sorted(apart, key=lambda entry: entry[0].split(".")[3]):
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TypeOf = Callable[[str, int], GgmlType]  # of a matrix: its name, how wide it is


def _named(types: Mapping[str, GgmlType]) -> TypeOf:
    return lambda name, width: next((t for part, t in types.items() if part in name), GgmlType.F32)


def _dealt(types: Sequence[GgmlType]) -> TypeOf:
    assert not types or any(block_weights(t) == 1 for t in types), "rows may be too narrow"
    cards = itertools.cycle(types)

    def deal(name: str, width: int) -> GgmlType:
        if not types or not (name.startswith("blk.") and name.endswith(".weight")):
            return GgmlType.F32
        return next(t for t in cards if width % block_weights(t) == 0)

    return deal


# --- shapes and names that most families share ---


def trunk(width: int, layers: int, *, tied: bool = False) -> Shapes:
    """Embedding, output and the two norms of every layer."""
    shapes: Shapes = {"token_embd.weight": (VOCABULARY, width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (VOCABULARY, width)
    for i in range(layers):
        shapes[f"blk.{i}.attn_norm.weight"] = (width,)
        shapes[f"blk.{i}.ffn_norm.weight"] = (width,)
    return shapes


def attention(
    i: int, width: int, heads: int, kv_heads: int, dim: int, biases: str = "", norms: bool = False
) -> Shapes:
    """Layer i's attention; `biases` names those of q, k, v and o that have one."""
    shapes: Shapes = {}
    for letter, name, rows, cols in (
        ("q", "attn_q", heads * dim, width),
        ("k", "attn_k", kv_heads * dim, width),
        ("v", "attn_v", kv_heads * dim, width),
        ("o", "attn_output", width, heads * dim),
    ):
        shapes[f"blk.{i}.{name}.weight"] = (rows, cols)
        if letter in biases:
            shapes[f"blk.{i}.{name}.bias"] = (rows,)
    if norms:
        shapes |= {f"blk.{i}.attn_{part}_norm.weight": (dim,) for part in "qk"}
    return shapes


def gated(i: int, width: int, inner: int, suffix: str = "") -> Shapes:
    return {
        f"blk.{i}.ffn_gate{suffix}.weight": (inner, width),
        f"blk.{i}.ffn_up{suffix}.weight": (inner, width),
        f"blk.{i}.ffn_down{suffix}.weight": (width, inner),
    }


def experts(i: int, width: int, inner: int, count: int) -> Shapes:
    return {
        f"blk.{i}.ffn_gate_inp.weight": (count, width),
        f"blk.{i}.ffn_gate_exps.weight": (count, inner, width),
        f"blk.{i}.ffn_up_exps.weight": (count, inner, width),
        f"blk.{i}.ffn_down_exps.weight": (count, width, inner),
    }


_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}


def renamed(found: Tensors, names: Mapping[str, str] | None = None) -> Tensors:
    """The state of a model in `transformers`: llama's names, changed or extended by `names`, with
    the experts' gate and up joined. Parameters without a suffix there are named so here."""
    table, state = _NAMES | dict(names or {}), {}
    for name, value in found.items():
        stem, _, kind = name.rpartition(".")
        prefix = ""
        if stem.startswith("blk."):
            _, layer, stem = stem.split(".", 2)
            prefix = f"model.layers.{layer}."
        if stem == "ffn_up_exps":
            continue
        if stem == "ffn_gate_exps":
            up = found[name.replace("gate_exps", "up_exps")]
            value = np.concatenate([value, up], 1)
            state[f"{prefix}mlp.experts.gate_up_proj"] = value
            continue
        target = table[stem]
        bare = stem.endswith("_exps") or target.endswith("!")
        state[prefix + target.rstrip("!") + ("" if bare else f".{kind}")] = value
    return state


def llama_state(case: Case, found: Tensors) -> Tensors:
    """The usual names, nothing else."""
    del case
    return renamed(found)


def halves(value: Array, heads: int) -> Array:
    """Reorders each head's rows from adjacent pairs to (first halves, second halves)."""
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)
