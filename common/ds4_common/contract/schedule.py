"""Groups the nodes of a lowered program into sections and lays out their scratch.

Owns: fusion and memory. Ops that look only at their own token (norm, quantize, rope, cache store,
add, glu) run token by token in one phase; matmuls that are ready together (q/k/v, gate/up) share
one pool of output rectangles. Values get byte offsets by first fit over the sections in which they
live. No result depends on any of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from ds4_common.contract import image as im
from ds4_common.quants.native import library

_ALIGN = 64  # of scratch rows: a cache line, and what activation columns need
_WINDOW = 64  # how far ahead of the first unscheduled op a section may look for company
_MAX_MATMULS = 16  # in one section; native/image.h DS4_MAX_PARTS
_SHARED = (im.SECTION_ROWS, im.SECTION_MATMUL, im.SECTION_EXPERTS)  # hold several ops


@dataclass(frozen=True, slots=True)
class Value:
    """What one op writes. A plane's state after a cache store is a value of width 0. A quantized
    row is `columns` activation columns of `width`."""

    space: int
    width: int
    act_format: int = im.ACT_NONE
    columns: int = 1


@dataclass(frozen=True, slots=True)
class Node:
    """An op over value numbers; `section` is the kind of section that may hold it, together with
    others of the same `company`: a choice of experts."""

    op: im.ImageOp
    section: int
    space: int
    reads: tuple[int, ...]
    writes: int
    company: tuple[int, ...] = ()


def schedule(nodes: list[Node]) -> list[list[Node]]:
    """Groups the nodes, which are in a valid order, into sections. Looks ahead a bounded window, so
    that the cost stays linear."""
    waiting = list(nodes)
    ready: set[int] = set()  # values written by earlier sections
    sections: list[list[Node]] = []
    while waiting:
        kind = (waiting[0].section, waiting[0].space, waiting[0].company)
        chosen: list[int] = []
        visible = set(ready)
        for i, node in enumerate(waiting[:_WINDOW]):
            if (node.section, node.space, node.company) != kind:
                continue
            if not visible.issuperset(node.reads):
                continue
            chosen.append(i)
            if node.section == im.SECTION_ROWS:
                visible.add(node.writes)  # its own token's row is written by then
            elif node.section not in _SHARED or len(chosen) == _MAX_MATMULS:
                break
        sections.append([waiting[i] for i in chosen])
        ready.update(node.writes for node in sections[-1])
        for i in reversed(chosen):
            del waiting[i]
    return sections


def lay_out(image: im.Image, values: list[Value], sections: list[list[Node]], logits: int) -> int:
    """Gives every value a slot, rewrites the ops to slot numbers and fills image.sections. Returns
    the slot of the logits, which outlive the program."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, section in enumerate(sections):
        for node in section:
            first.setdefault(node.writes, number)
            for value in (node.writes, *node.reads):
                last[value] = number
    last[logits] = len(sections)
    slot_of: dict[int, int] = {}
    numbers: dict[im.Slot, int] = {}
    totals = []
    for space in (im.SPACE_TOKENS, im.SPACE_OUTPUTS):
        mine = [v for v in first if values[v].space == space and values[v].width]
        placed, total = _first_fit(mine, values, first, last)
        totals.append(total)
        for value, slot in placed.items():
            slot_of[value] = numbers.setdefault(slot, len(numbers))
    image.slots = list(numbers)
    image.token_bytes, image.row_bytes = totals
    for section in sections:
        rewritten = tuple(_with_slots(node.op, slot_of) for node in section)
        image.sections.append(im.Section(section[0].section, section[0].space, rewritten))
    return slot_of[logits]


def _first_fit(
    mine: Iterable[int], values: list[Value], first: dict[int, int], last: dict[int, int]
) -> tuple[dict[int, im.Slot], int]:
    """Offsets such that values alive in the same section never overlap. Inputs and outputs of one
    section are both alive in it: threads work on different tokens at different ops."""
    placed: dict[int, im.Slot] = {}
    total = 0
    live: list[int] = []
    for value in sorted(mine, key=lambda v: (first[v], v)):
        held = values[value]
        n_bytes = _row_bytes(held)
        live = [other for other in live if last[other] >= first[value]]
        offset = 0
        for other in sorted(live, key=lambda v: placed[v].offset):
            if offset + n_bytes <= placed[other].offset:
                break
            offset = max(offset, placed[other].offset + placed[other].n_bytes)
        placed[value] = im.Slot(
            held.space, held.width, held.act_format, offset, n_bytes, held.columns
        )
        live.append(value)
        total = max(total, offset + n_bytes)
    return placed, total


def _row_bytes(value: Value) -> int:
    if value.act_format == im.ACT_NONE:
        return -(-value.width * 4 // _ALIGN) * _ALIGN
    return int(library().ds4_act_bytes(value.act_format, value.width)) * value.columns


def _with_slots(op: im.ImageOp, slot_of: dict[int, int]) -> im.ImageOp:
    inputs = tuple(slot_of[v] for v in op.inputs)
    return replace(op, inputs=inputs, out=slot_of.get(op.out, im.NONE))
