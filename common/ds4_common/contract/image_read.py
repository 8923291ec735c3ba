"""The records of an image as objects again: for executors that plan in Python.

Owns the inverse of `image.write_image`. The CPU's engine reads the bytes itself, in C.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ds4_common.contract import image as im
from ds4_common.errors import ContractError


def read_image(data: bytes | memoryview) -> im.Image:
    """Raises ContractError for anything but an image of this format, whole."""
    im.read_header(data)
    fields = im.HEADER.unpack_from(data)
    vocabulary, context_tokens, page_tokens, logits_slot = fields[5:9]
    *counts, forward_only, token_bytes, row_bytes = fields[9:]
    records = _Records(data, im.HEADER.size)
    n_allocations, n_weights, n_slots, n_ropes, n_planes, n_ops, n_sections = counts
    try:
        allocations = [(id_, size) for id_, _, size in records.take(im.ALLOCATION, n_allocations)]
        weights = [_weight(*record) for record in records.take(im.WEIGHT, n_weights)]
        slots = [_slot(*record) for record in records.take(im.SLOT, n_slots)]
        ropes = [_rope(*record) for record in records.take(im.ROPE, n_ropes)]
        planes = [_plane(*record) for record in records.take(im.PLANE, n_planes)]
        ops = [_op(*record) for record in records.take(im.OP, n_ops)]
        sections = [
            im.Section(kind, space, tuple(ops[first : first + count]))
            for kind, space, first, count in records.take(im.SECTION, n_sections)
        ]
    except (struct.error, TypeError, ValueError) as error:
        raise ContractError(f"image: a record cannot be read: {error}") from error
    if records.at != len(data):
        raise ContractError(f"image: {len(data) - records.at} bytes behind its last record")
    return im.Image(
        vocabulary, context_tokens, page_tokens, logits_slot, bool(forward_only), token_bytes,
        row_bytes, allocations, weights, slots, ropes, planes, sections,
    )  # fmt: skip


class _Records:
    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self._data, self.at = data, at

    def take(self, kind: struct.Struct, count: int) -> Iterator[tuple[int, ...]]:
        for _ in range(count):
            yield kind.unpack_from(self._data, self.at)
            self.at += kind.size


def _weight(
    allocation: int, ggml_type: int, layout: int, experts: int, offset: int, rows: int, cols: int,
    n_bytes: int,
) -> im.Weight:  # fmt: skip
    return im.Weight(allocation, ggml_type, layout, offset, rows, cols, n_bytes, experts)


def _slot(
    space: int, width: int, act_format: int, columns: int, offset: int, n_bytes: int
) -> im.Slot:
    return im.Slot(space, width, act_format, offset, n_bytes, columns)


def _rope(
    rope_dim: int, style: int, factors: int, long_factors: int, truncate: int, shift: int,
    base: float, freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float,
    beta_slow: float, original_context: float,
) -> im.Rope:  # fmt: skip
    return im.Rope(
        rope_dim, style, factors, long_factors, truncate, base, freq_scale, ext_factor, attn_factor,
        beta_fast, beta_slow, original_context, shift,
    )  # fmt: skip


def _plane(kind: int, kv_heads: int, dim: int, value_dim: int, ratio: int, window: int) -> im.Plane:
    return im.Plane(kv_heads, dim, value_dim, kind, ratio, window)


def _op(kind: int, one: int, two: int, three: int, *rest: int) -> im.ImageOp:
    inputs = [one, two, three]
    while inputs and inputs[-1] == im.NONE:  # what is not there is written as NONE
        inputs.pop()
    (out, weight, bias, rope, plane, heads, dim, first, width, mode, window, groups, groups_used,
     normalize, other_plane, value, limit, alpha) = rest  # fmt: skip
    return im.ImageOp(
        kind, tuple(inputs), out, weight, bias, rope, plane, other_plane, heads, dim, first, width,
        mode, window, groups, groups_used, normalize, value, limit, alpha,
    )  # fmt: skip
