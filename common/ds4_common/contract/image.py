"""The CPU image: the lowered form of a contract that a worker maps and runs without protobuf.

Owns: the byte format of the image (records of native/image.h, little-endian, in this order: header,
allocations, weights, slots, ropes, planes, ops, sections), its ABI number, and re-lowering when the
ABI of this installation is another one. Refuses: nothing about the contents - the native engine
checks every extent when it opens an image.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import zlib
from collections.abc import Sequence

import msgspec

from ds4_common.contract.ops import OPS
from ds4_common.errors import ContractError
from ds4_common.native import lib

MAGIC = b"DS4CPU\x00\x01"
FORMAT = 4  # raise it when lowering writes another program for the same contract
NONE = 0xFFFFFFFF  # an absent index

HEADER = struct.Struct("<8sIIQQ4I8IQQ")
ALLOCATION = struct.Struct("<IIQ")
WEIGHT = struct.Struct("<4IQqqQ")
SLOT = struct.Struct("<IIiIQQ")
ROPE = struct.Struct("<5Ii7d")
PLANE = struct.Struct("<6I")
OP = struct.Struct("<19I3f")
SECTION = struct.Struct("<4I")
RECORDS = (HEADER, ALLOCATION, WEIGHT, SLOT, ROPE, PLANE, OP, SECTION)

# Section kinds and op kinds of native/image.h.
(
    SECTION_ROWS,
    SECTION_MATMUL,
    SECTION_ATTEND,
    SECTION_EXPERTS,
    SECTION_COMPRESS,
    SECTION_INDEX,
    SECTION_ATTEND_ROWS,
) = range(7)
(
    OP_EMBED,
    OP_RMS_NORM,
    OP_ROPE,
    OP_KV_STORE,
    OP_ADD,
    OP_GLU,
    OP_GATHER,
    OP_QUANTIZE,
    OP_SOFT_CAP,
    OP_GATE_ROW,
    OP_SLICE_HEADS,
    OP_JOIN_HEADS,
    OP_ROUTE,
    OP_COMBINE,
    OP_MATMUL,
    OP_ATTEND,
    OP_MATMUL_EXPERTS,
    OP_HYPER_WEIGHTS,
    OP_HYPER_READ,
    OP_HYPER_WRITE,
    OP_HADAMARD,
    OP_ROUND_FLOATS,
    OP_STORE_ROWS,
    OP_COMPRESS,
    OP_INDEX_ROWS,
    OP_ATTEND_ROWS,
    OP_SCALE_PARTS,
) = range(27)
PLANE_KV, PLANE_ROWS, PLANE_TILES, PLANE_STATE, PLANE_LATENT = range(5)
SPACE_TOKENS, SPACE_OUTPUTS = 0, 1
ACT_NONE = -1  # a slot of plain floats


class Weight(msgspec.Struct, frozen=True):
    """A tensor in an allocation. rows = outputs, cols = inputs; `allocation` indexes the table.
    `experts` matrices of that size follow each other."""

    allocation: int
    ggml_type: int
    layout: int
    offset: int
    rows: int
    cols: int
    n_bytes: int
    experts: int = 1


class Slot(msgspec.Struct, frozen=True):
    """Scratch of one value: `n_bytes` per row at `offset` (both multiples of 64; the engine scales
    them by its capacity). `space` says whether rows are the step's tokens or its outputs. A row of
    quantized values is `columns` activation columns of `width`."""

    space: int
    width: int
    act_format: int
    offset: int
    n_bytes: int
    columns: int = 1


class Rope(msgspec.Struct, frozen=True):
    rope_dim: int
    style: int
    factors: int  # weight index or NONE
    long_factors: int  # where the engine's context is longer than original_context
    truncate: int
    base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    original_context: float
    shift: int = 0  # added to every position


class Plane(msgspec.Struct, frozen=True):
    """What every page holds of one layer: keys and values; rows of `dim`, one for each `ratio`
    tokens, one after the other or (tiles) dim by dim; `kv_heads` running vectors of `dim`; or one
    vector (latent) that is key and value of all heads."""

    kv_heads: int
    dim: int
    value_dim: int = 0
    kind: int = PLANE_KV
    ratio: int = 1
    window: int = 0  # positions before the last so many are read no more; 0: all are kept


class ImageOp(msgspec.Struct, frozen=True):
    kind: int
    inputs: tuple[int, ...]
    out: int = NONE
    weight: int = NONE
    bias: int = NONE
    rope: int = NONE
    plane: int = NONE
    other_plane: int = NONE
    heads: int = 0
    dim: int = 0
    first: int = 0  # dim of a head
    width: int = 0  # dims of a head; of a route: the scores that a group counts as; of a block
    mode: int = 0  # act, score or format; 1: an inverse rotation
    window: int = 0  # also: iterations
    groups: int = 0
    groups_used: int = 0
    normalize: int = 0
    value: float = 0.0  # eps, cap, or a scale
    limit: float = 0.0  # of a gated unit; soft cap of an attention
    alpha: float = 0.0


class Section(msgspec.Struct, frozen=True):
    """Ops that run in one parallel phase: token by token (ROWS), one pool of output rectangles
    (MATMUL), matrices of one choice of experts (EXPERTS), or a single op of the kind named."""

    kind: int
    space: int
    ops: tuple[ImageOp, ...]


class Image(msgspec.Struct):
    vocabulary: int = 0
    context_tokens: int = 0
    page_tokens: int = 0
    logits_slot: int = NONE
    forward_only: bool = False  # some history cannot be computed again from an earlier position
    token_bytes: int = 0
    row_bytes: int = 0
    allocations: list[tuple[int, int]] = msgspec.field(default_factory=list)  # (id, bytes needed)
    weights: list[Weight] = msgspec.field(default_factory=list)
    slots: list[Slot] = msgspec.field(default_factory=list)
    ropes: list[Rope] = msgspec.field(default_factory=list)
    planes: list[Plane] = msgspec.field(default_factory=list)
    sections: list[Section] = msgspec.field(default_factory=list)


@functools.cache
def image_abi() -> int:
    """The number an image must carry to be run as it is: op registry, record sizes, kernel ABI."""
    native = lib.load().ds4_image_abi
    native.restype, native.argtypes = ctypes.c_uint32, []
    sizes = ",".join(str(record.size) for record in RECORDS)
    registry = zlib.crc32(f"{FORMAT};{sizes};{OPS!r}".encode())
    return registry << 32 | int(native())


def write_image(image: Image) -> bytes:
    """Serialises an image. Values that fit no field raise ContractError."""
    try:
        return _write(image)
    except (struct.error, OverflowError) as error:
        raise ContractError(f"CPU image: a value does not fit its field: {error}") from error


def _write(image: Image) -> bytes:
    ops = [op for section in image.sections for op in section.ops]
    body = b"".join(
        (
            *(ALLOCATION.pack(id_, 0, n_bytes) for id_, n_bytes in image.allocations),
            *map(_pack_weight, image.weights),
            *map(_pack_slot, image.slots),
            *map(_pack_rope, image.ropes),
            *(
                PLANE.pack(p.kind, p.kv_heads, p.dim, p.value_dim, p.ratio, p.window)
                for p in image.planes
            ),
            *map(_pack_op, ops),
            *_pack_sections(image.sections),
        )
    )
    header = HEADER.pack(
        MAGIC, FORMAT, HEADER.size, image_abi(), HEADER.size + len(body),
        image.vocabulary, image.context_tokens, image.page_tokens, image.logits_slot,
        len(image.allocations), len(image.weights), len(image.slots), len(image.ropes),
        len(image.planes), len(ops), len(image.sections), image.forward_only,
        image.token_bytes, image.row_bytes,
    )  # fmt: skip
    return header + body


def _pack_weight(w: Weight) -> bytes:
    return WEIGHT.pack(
        w.allocation, w.ggml_type, w.layout, w.experts, w.offset, w.rows, w.cols, w.n_bytes
    )


def _pack_slot(s: Slot) -> bytes:
    return SLOT.pack(s.space, s.width, s.act_format, s.columns, s.offset, s.n_bytes)


def _pack_rope(r: Rope) -> bytes:
    return ROPE.pack(
        r.rope_dim, r.style, r.factors, r.long_factors, r.truncate, r.shift,
        r.base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow,
        r.original_context,
    )  # fmt: skip


def _pack_op(op: ImageOp) -> bytes:
    inputs = (*op.inputs, NONE, NONE, NONE)[:3]
    return OP.pack(
        op.kind, *inputs, op.out, op.weight, op.bias, op.rope, op.plane, op.heads, op.dim,
        op.first, op.width, op.mode, op.window, op.groups, op.groups_used, op.normalize,
        op.other_plane,
        op.value, op.limit, op.alpha,
    )  # fmt: skip


def _pack_sections(sections: Sequence[Section]) -> list[bytes]:
    packed, first = [], 0
    for section in sections:
        packed.append(SECTION.pack(section.kind, section.space, first, len(section.ops)))
        first += len(section.ops)
    return packed


class ImageHeader(msgspec.Struct, frozen=True):
    """What a worker wants to know of an image before opening it."""

    abi: int
    n_bytes: int
    vocabulary: int
    context_tokens: int
    page_tokens: int
    allocations: tuple[int, ...]  # ids of the allocations that the weights lie in


def read_header(image: bytes | memoryview) -> ImageHeader:
    """Reads the header and the list of allocations needed. Raises ContractError."""
    if len(image) < HEADER.size:
        raise ContractError(f"CPU image: got {len(image)} bytes, expected {HEADER.size} at least")
    fields = HEADER.unpack_from(image)
    magic, format_, header_bytes, abi, n_bytes, vocabulary, context_tokens, page_tokens = fields[:8]
    if (magic, format_, header_bytes) != (MAGIC, FORMAT, HEADER.size):
        raise ContractError(
            f"CPU image: got magic {magic!r}, format {format_}, header of {header_bytes} bytes; "
            f"expected {MAGIC!r}, {FORMAT}, {HEADER.size}; lower the contract again"
        )
    count = fields[9]
    if n_bytes != len(image) or HEADER.size + count * ALLOCATION.size > n_bytes:
        raise ContractError(
            f"CPU image: got {len(image)} bytes, expected the {n_bytes} of its header"
        )
    ids = tuple(
        ALLOCATION.unpack_from(image, HEADER.size + i * ALLOCATION.size)[0] for i in range(count)
    )
    return ImageHeader(abi, n_bytes, vocabulary, context_tokens, page_tokens, ids)


def load_image(
    image: bytes | memoryview, contract: bytes | memoryview, *, any_layout: bool = False
) -> tuple[bytes, bool]:
    """The image to run, and whether it had to be lowered again, with `any_layout` if so.

    An image of this installation's ABI comes back as it is. Otherwise - a rebuilt worker with other
    kernels or ops - the contract blob is lowered anew (about 0.1 s, protobuf is imported then).
    """
    try:
        current = read_header(image).abi == image_abi()
    except ContractError:
        current = False
    if current:
        return bytes(image), False
    from ds4_common.contract.lower import lower_contract

    return lower_contract(bytes(contract), any_layout=any_layout), True
