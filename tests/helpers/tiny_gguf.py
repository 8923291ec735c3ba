"""Small GGUF files for tests.

Owns: a byte-level builder that will also build hostile files (`gguf_bytes`), random blocks of any
quant type whose scales are sane (`random_blocks`), complete tiny llama models (`write_llama`) and
expert-shaped tensors for the aligned artifacts (`write_tensors`). Deterministic for a given seed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from ds4_common.gguf import GgmlType, ValueType, block_bytes, block_weights
from ds4_common.gguf.types import FIXED_CODES

Bytes = npt.NDArray[np.uint8]
Value = int | float | bool | str

# --- byte level ---


@dataclass(frozen=True)
class RawTensor:
    """A line of the tensor table; None means: what a valid file would have."""

    name: str | bytes
    dims: Sequence[int]
    ggml_type: int = GgmlType.F32
    data: bytes | None = None
    offset: int | None = None


def pack_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pack_value(value_type: int, value: object) -> bytes:
    """A metadata value. Arrays are given as (element type, list)."""
    if value_type == ValueType.STRING:
        assert isinstance(value, str | bytes)
        return pack_string(value)
    if value_type == ValueType.ARRAY:
        assert isinstance(value, tuple)
        element_type, elements = value
        head = struct.pack("<IQ", element_type, len(elements))
        return head + b"".join(pack_value(element_type, e) for e in elements)
    return struct.pack("<" + FIXED_CODES[ValueType(value_type)], value)


def tensor_bytes(dims: Sequence[int], ggml_type: int) -> int:
    """Bytes of a tensor; 0 where the numbers make no sense (hostile files)."""
    try:
        return int(np.prod(dims, dtype=object)) // block_weights(ggml_type) * block_bytes(ggml_type)
    except KeyError:
        return 0


def gguf_bytes(
    entries: Iterable[tuple[str | bytes, int, object]] = (),
    tensors: Sequence[RawTensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    magic: bytes = b"GGUF",
    n_entries: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A whole file. Whatever is passed is written as it is; nothing is validated."""
    entries = list(entries)
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(entries) if n_entries is None else n_entries,
    )
    for key, value_type, value in entries:
        head += pack_string(key) + struct.pack("<I", value_type) + pack_value(value_type, value)
    body = b""
    for tensor in tensors:
        data = tensor.data
        if data is None:
            data = bytes(tensor_bytes(tensor.dims, tensor.ggml_type))
        offset = len(body) if tensor.offset is None else tensor.offset
        head += pack_string(tensor.name)
        head += struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        head += struct.pack("<IQ", tensor.ggml_type, offset)
        body += data + bytes(-len(data) % alignment)
    return head + bytes(-len(head) % alignment) + body if tensors else head


# --- weights ---

# Byte offsets of the fp16 scale and of the fp16 minimum in a block of random codes.
_SCALES: dict[GgmlType, tuple[int, int | None]] = {
    GgmlType.Q2_K: (80, 82),
    GgmlType.Q3_K: (108, None),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208, None),
    GgmlType.IQ2_XXS: (0, None),
    GgmlType.IQ2_XS: (0, None),
    GgmlType.IQ2_S: (0, None),
    GgmlType.IQ3_XXS: (0, None),
    GgmlType.IQ3_S: (0, None),
    GgmlType.IQ1_S: (0, None),
    GgmlType.IQ4_NL: (0, None),
    GgmlType.IQ4_XS: (0, None),
}


def random_blocks(
    ggml_type: GgmlType, n_blocks: int, rng: np.random.Generator, std: float = 1.0
) -> Bytes:
    """[n_blocks, block_bytes]: random codes under scales that give weights of that spread."""
    if ggml_type not in _SCALES:
        values = rng.normal(0, std, (n_blocks, block_weights(ggml_type))).astype(np.float32)
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType(ggml_type))
        return np.ascontiguousarray(raw).view(np.uint8).reshape(n_blocks, block_bytes(ggml_type))
    blocks = rng.integers(0, 256, (n_blocks, block_bytes(ggml_type)), dtype=np.uint8)
    scale_at, minimum_at = _SCALES[ggml_type]
    scale = np.float32(1.0)
    minimum = np.float32(0.0)
    _put_half(blocks, scale_at, scale)
    if minimum_at is not None:
        _put_half(blocks, minimum_at, minimum)
        mean = _dequantized(ggml_type, blocks).mean()
        _put_half(blocks, scale_at, np.float32(0))
        _put_half(blocks, minimum_at, np.float32(1))
        minimum = -mean / _dequantized(ggml_type, blocks).mean()
        _put_half(blocks, scale_at, scale)
        _put_half(blocks, minimum_at, minimum)
    factor = std / _dequantized(ggml_type, blocks).std()
    spread = rng.uniform(0.5, 1.5, n_blocks).astype(np.float32) * np.float32(factor)
    _put_half(blocks, scale_at, scale * spread)
    if minimum_at is not None:
        _put_half(blocks, minimum_at, minimum * spread)
    return blocks


def _put_half(blocks: Bytes, at: int, value: np.float32 | npt.NDArray[np.float32]) -> None:
    halves = np.broadcast_to(np.asarray(value, np.float16), len(blocks))
    blocks[:, at : at + 2] = np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 2)


def _dequantized(ggml_type: GgmlType, blocks: Bytes) -> npt.NDArray[np.float32]:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(ggml_type)).astype(np.float32)


def random_tensor(
    shape: Sequence[int], ggml_type: GgmlType, rng: np.random.Generator, std: float = 1.0
) -> Bytes:
    """Bytes of a tensor of numpy `shape` (last axis contiguous), last axis counted in bytes."""
    *outer, n = shape
    n_blocks = int(np.prod(outer, dtype=np.int64)) * n // block_weights(ggml_type)
    blocks = random_blocks(ggml_type, n_blocks, rng, std)
    return blocks.reshape(*outer, n // block_weights(ggml_type) * block_bytes(ggml_type))


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[Sequence[int], GgmlType]],
    *,
    arch: str = "llama",
    seed: int = 0,
) -> Path:
    """A GGUF of random tensors, given as name -> (dims in GGUF order, type), and no vocabulary."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    for name, (dims, ggml_type) in tensors.items():
        _add(writer, name, random_tensor(list(reversed(dims)), ggml_type, rng), ggml_type)
    return _finish(writer, path)


def _add(writer: gguf.GGUFWriter, name: str, data: Bytes, ggml_type: GgmlType) -> None:
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(ggml_type))


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- vocabularies ---

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Pieces in merge order; "_" stands for the space. Each is made of two earlier ones.
_PIECES = (
    "_t he in er _a on _the re at en or _s nd _w is it ou _and _b an ing _c es _f _o ed _p "
    "_m al _h ar _to _of _in st _be _d _e le _l us er_ ss ti ion _re _is id ha _that"
).split()  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """Tokens with their types (1 normal, 2 unknown, 3 control, 5 unused, 6 byte) and metadata."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    bos: int = 0
    eos: int = 0
    add_bos: bool = False


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(extra)) for b in range(256)]


def _halves(piece: str, known: set[str]) -> tuple[str, str] | None:
    for cut in range(len(piece) - 1, 0, -1):
        if piece[:cut] in known and piece[cut:] in known:
            return piece[:cut], piece[cut:]
    return None


def bpe_vocabulary(n_tokens: int = 320, pre: str = "smollm") -> Vocabulary:
    """Three control tokens, 256 byte tokens, merged pieces, then unused ones up to n_tokens."""
    tokens = [*_CONTROL, *byte_alphabet()]
    known = set(tokens)
    merges = []
    for piece in _PIECES:
        text = piece.replace("_", "\u0120")
        halves = _halves(text, known)
        if halves and text not in known:
            merges.append(" ".join(halves))
            tokens.append(text)
            known.add(text)
    types = [3] * len(_CONTROL) + [1] * (len(tokens) - len(_CONTROL))
    _pad(tokens, types, n_tokens)
    return Vocabulary("gpt2", pre, tokens, types, merges=merges, bos=1, eos=2)


def spm_vocabulary(n_tokens: int = 384) -> Vocabulary:
    """SentencePiece style: <unk>, <s>, </s>, byte tokens, characters and pieces with scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3] + [6] * 256
    pieces = [p.replace("_", "\u2581") for p in _PIECES]
    letters = [chr(c) for c in range(33, 127)]
    normal = ["\u2581", *letters, *pieces]
    scores = [0.0] * len(tokens)
    scores += [-1000.0 - i for i in range(1 + len(letters))]
    scores += [-float(i) for i in range(len(pieces))]
    tokens += normal
    types += [1] * len(normal)
    n_tokens = max(n_tokens, len(tokens))
    _pad(tokens, types, n_tokens)
    scores += [0.0] * (n_tokens - len(scores))
    return Vocabulary("llama", "default", tokens, types, scores=scores, bos=1, eos=2)


def _pad(tokens: list[str], types: list[int], n_tokens: int) -> None:
    for index in range(len(tokens), n_tokens):
        tokens.append(f"[UNUSED{index}]")
        types.append(5)


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """All that a file says of its tokens."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    writer.add_add_bos_token(vocabulary.model == "llama" or vocabulary.add_bos)
    writer.add_add_space_prefix(vocabulary.model == "llama")


# --- a llama ---


@dataclass(frozen=True)
class TinyLlama:
    """A random model of the llama family. `weights` are dealt to the matrices in turn."""

    n_layers: int = 2
    width: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int | None = None  # None: width / n_heads
    ffn: int = 128
    context: int = 256
    weights: Sequence[GgmlType] = (GgmlType.Q8_0,)
    embedding: GgmlType = GgmlType.Q8_0
    output: GgmlType | None = GgmlType.Q8_0  # None: tied to the embedding
    biases: bool = False
    rope_freqs: bool = False
    vocabulary: Vocabulary = field(default_factory=bpe_vocabulary)
    chat_template: str | None = CHAT_TEMPLATE
    # More metadata, or other values: int -> UINT32 or UINT64, float -> FLOAT32, bool, str, and
    # lists of them; None removes.
    metadata: Mapping[str, Value | Sequence[Value] | None] = field(default_factory=dict)
    seed: int = 0


def write_llama(path: Path, spec: TinyLlama | None = None) -> Path:
    """Writes the model to `path` and returns it. K and IQ types need widths of 256."""
    spec = spec or TinyLlama()
    writer = gguf.GGUFWriter(path, "llama")
    _add_llama_metadata(writer, spec)
    add_vocabulary(writer, spec.vocabulary)
    if spec.chat_template is not None:
        writer.add_chat_template(spec.chat_template)
    for key, value in spec.metadata.items():
        _override(writer, key, value)
    _add_llama_tensors(writer, spec)
    return _finish(writer, path)


def _add_llama_metadata(writer: gguf.GGUFWriter, spec: TinyLlama) -> None:
    head_dim = spec.head_dim or spec.width // spec.n_heads
    writer.add_name("tiny llama")
    writer.add_block_count(spec.n_layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(spec.vocabulary.tokens))
    writer.add_rope_dimension_count(head_dim)
    if spec.head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def _override(writer: gguf.GGUFWriter, key: str, value: Value | Sequence[Value] | None) -> None:
    writer.kv_data[0].pop(key, None)
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value < 1 << 32 else writer.add_uint64)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _add_llama_tensors(writer: gguf.GGUFWriter, spec: TinyLlama) -> None:
    rng = np.random.default_rng(spec.seed)
    head_dim = spec.head_dim or spec.width // spec.n_heads
    q_rows, kv_rows = spec.n_heads * head_dim, spec.n_kv_heads * head_dim
    dealt = 0

    def floats(name: str, n: int, mean: float, std: float) -> None:
        writer.add_tensor(name, rng.normal(mean, std, n).astype(np.float32))

    def matrix(name: str, rows: int, cols: int, ggml_type: GgmlType | None = None) -> None:
        nonlocal dealt
        if ggml_type is None:
            ggml_type = spec.weights[dealt % len(spec.weights)]
            dealt += 1
        data = random_tensor((rows, cols), ggml_type, rng, cols**-0.5)
        _add(writer, name + ".weight", data, ggml_type)
        if spec.biases and name.startswith("blk."):
            floats(name + ".bias", rows, 0.0, 0.1)

    embedding = random_tensor((len(spec.vocabulary.tokens), spec.width), spec.embedding, rng)
    _add(writer, "token_embd.weight", embedding, spec.embedding)
    if spec.rope_freqs:
        writer.add_tensor("rope_freqs.weight", rng.uniform(1, 4, head_dim // 2).astype(np.float32))
    for layer in range(spec.n_layers):
        prefix = f"blk.{layer}."
        floats(prefix + "attn_norm.weight", spec.width, 1.0, 0.1)
        matrix(prefix + "attn_q", q_rows, spec.width)
        matrix(prefix + "attn_k", kv_rows, spec.width)
        matrix(prefix + "attn_v", kv_rows, spec.width)
        matrix(prefix + "attn_output", spec.width, q_rows)
        floats(prefix + "ffn_norm.weight", spec.width, 1.0, 0.1)
        matrix(prefix + "ffn_gate", spec.ffn, spec.width)
        matrix(prefix + "ffn_up", spec.ffn, spec.width)
        matrix(prefix + "ffn_down", spec.width, spec.ffn)
    floats("output_norm.weight", spec.width, 1.0, 0.1)
    if spec.output is not None:
        matrix("output", len(spec.vocabulary.tokens), spec.width, spec.output)
