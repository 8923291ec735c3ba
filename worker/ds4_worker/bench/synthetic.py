"""Model files of real shapes with random weights: what kernels, loader and restarts are timed with
where the real weights are too large to fetch.

Owns: shapes by name (`shapes.json`), the types of their tensors, valid random blocks, and writing
them as GGUF v3 at the speed of the disk. The words are those of a real file, so that the model can
be served. Refuses nothing: it reads a model that was served before and writes a file that its
caller names.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec

from ds4_common.errors import Ds4Error
from ds4_common.gguf import GgmlType, LogicalModel, Metadata, ValueType, block_bytes, block_weights
from ds4_common.gguf.parser import ArrayInfo
from ds4_common.gguf.types import FIXED_CODES

ALIGNMENT = 32
PATTERN_BYTES = 1 << 20  # random bytes, written again and again
_STRING = struct.pack("<I", ValueType.STRING)
Value = int | float
Dims = tuple[int, ...]
# Where the half-precision scales lie in a block of the types that shapes are written in.
_HALVES: dict[GgmlType, tuple[int, ...]] = {
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q8_0: (0,),
    GgmlType.Q2_K: (80, 82),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q6_K: (208,),
    GgmlType.IQ2_XXS: (0,),
    GgmlType.F16: (0,),
}
TYPES = tuple(type_ for type_ in _HALVES if type_ != GgmlType.F16)


class Shape(msgspec.Struct, frozen=True, kw_only=True, rename={"origin": "from"}):
    """A model's numbers. `experts`: how many, used per token, and the width of one."""

    architecture: str  # as GGUF calls it
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    head_norms: bool = False  # q and k are normed head by head
    experts: tuple[int, int, int] | None = None
    origin: str = ""  # the published model of this shape

    def metadata(self) -> dict[str, Value]:
        found: dict[str, Value] = {
            "block_count": self.layers,
            "context_length": 32768,
            "embedding_length": self.width,
            "feed_forward_length": self.inner,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
        }
        if self.experts:
            count, used, inner = self.experts
            found |= {
                "expert_count": count,
                "expert_used_count": used,
                "expert_feed_forward_length": inner,
            }
        return found

    def tensors(self, vocabulary: int) -> Iterator[tuple[str, Dims]]:
        """Names and dims in the order of GGUF: inputs first."""
        width, q, kv = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd.weight", (width, vocabulary)
        yield "output_norm.weight", (width,)
        yield "output.weight", (width, vocabulary)
        for layer in range(self.layers):
            inside: dict[str, Dims] = {
                "attn_norm": (width,),
                "attn_q": (width, q),
                "attn_k": (width, kv),
                "attn_v": (width, kv),
                "attn_output": (q, width),
                "ffn_norm": (width,),
            }
            if self.head_norms:
                inside |= {"attn_q_norm": (self.head_dim,), "attn_k_norm": (self.head_dim,)}
            if self.experts:
                count, _, inner = self.experts
                inside |= {
                    "ffn_gate_inp": (width, count),
                    "ffn_gate_exps": (width, inner, count),
                    "ffn_up_exps": (width, inner, count),
                    "ffn_down_exps": (inner, width, count),
                }
            else:
                inside |= {
                    "ffn_gate": (width, self.inner),
                    "ffn_up": (width, self.inner),
                    "ffn_down": (self.inner, width),
                }
            for name, dims in inside.items():
                yield f"blk.{layer}.{name}.weight", dims


SHAPES = msgspec.json.decode(
    Path(__file__).with_name("shapes.json").read_bytes(), type=dict[str, Shape]
)


@dataclass(frozen=True, slots=True)
class Types:
    """Of the matrices, and of the experts' first two and last."""

    dense: GgmlType
    gate_up: GgmlType = GgmlType.Q4_K
    down: GgmlType = GgmlType.Q6_K

    def of(self, name: str, dims: Dims) -> GgmlType:
        """Vectors and routers stay floats, as in published files."""
        if len(dims) == 1 or "gate_inp" in name:
            return GgmlType.F32
        if "_exps" in name:
            return self.down if "down" in name else self.gate_up
        return self.dense


def types(text: str) -> Types:
    """From names with commas between them: one of the matrices, or three. Raises Ds4Error."""
    known = {type_.name: type_ for type_ in TYPES}
    names = text.upper().split(",")
    if len(names) not in (1, 3) or not set(names) <= set(known):
        raise Ds4Error(f"types: got {text!r}, expected one or three of {', '.join(known)}")
    return Types(*(known[name] for name in names))


def write(path: Path, shape: Shape, types: Types, words: Path, seed: int = 1) -> int:
    """Writes the model with the vocabulary of the GGUF file `words`; returns its bytes."""
    with LogicalModel.open(words) as source:
        keys = _words(source.metadata, words)
        vocabulary = len(source.metadata.get_strings("tokenizer.ggml.tokens"))
    keys["general.architecture"] = _STRING + _text(shape.architecture)
    for name, value in shape.metadata().items():
        kind, code = (
            (ValueType.FLOAT32, "f") if isinstance(value, float) else (ValueType.UINT32, "I")
        )
        keys[f"{shape.architecture}.{name}"] = struct.pack(f"<I{code}", kind, value)
    table, sizes, offset = bytearray(), [], 0
    tensors = list(shape.tensors(vocabulary))
    for name, dims in tensors:
        type_ = types.of(name, dims)
        n_bytes = prod(dims) // block_weights(type_) * block_bytes(type_)
        table += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_, offset)
        sizes.append((type_, n_bytes))
        offset += -(-n_bytes // ALIGNMENT) * ALIGNMENT
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys))
    head += b"".join(_text(name) + value for name, value in keys.items()) + table
    rng = random.Random(seed)
    patterns = {type_: memoryview(_pattern(rng, type_)) for type_ in {t for t, _ in sizes}}
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for type_, n_bytes in sizes:
            pattern = patterns[type_]
            for start in range(0, n_bytes, len(pattern)):
                file.write(pattern[: n_bytes - start])
            file.write(bytes(-n_bytes % ALIGNMENT))
        return file.tell()


def _pattern(rng: random.Random, type_: GgmlType) -> bytearray:
    """Whole blocks of random quants under small scales; small floats."""
    size = block_bytes(type_)
    count = PATTERN_BYTES // size
    if type_ == GgmlType.F32:
        return bytearray(struct.pack(f"<{count}f", *(rng.uniform(-0.1, 0.1) for _ in range(count))))
    pattern = bytearray(rng.randbytes(count * size))
    for low in _HALVES[type_]:
        # Half-precision numbers of either sign between 2^-9 and 2^-6: sign, exponent, two bits.
        pattern[low + 1 :: size] = bytes(rng.choices([0x18, 0x1C, 0x20, 0x98, 0x9C, 0xA0], k=count))
    return pattern


def _words(metadata: Metadata, path: Path) -> dict[str, bytes]:
    """The keys of the tokenizer with their types and values as they are in the file."""
    found: dict[str, bytes] = {}
    with path.open("rb") as file:
        for key, value in metadata.items():
            if not key.startswith("tokenizer."):
                continue
            kind = metadata.type_of(key)
            if isinstance(value, ArrayInfo):
                file.seek(value.offset)
                body = struct.pack("<IQ", value.element_type, value.count)
                body += file.read(value.n_bytes)
            elif isinstance(value, str):
                body = _text(metadata.get_str(key))
            else:
                body = struct.pack("<" + FIXED_CODES[kind], value)
            found[key] = struct.pack("<I", kind) + body
    return found


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
