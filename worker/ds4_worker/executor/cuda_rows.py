"""Kernel launches of ops that look only at their own row, and what all launches of a program share.

Owns: the translation of norms, rotations, sums, gated units and the like for a number of tokens,
and the few fusions that the kernels offer. Pure: addresses are numbers, nothing is launched. An op
that no kernel computes raises KeyError with what is missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds4_common.contract import image as im
from ds4_common.quants.native import QuantType
from ds4_worker.cuda import kernels as ks
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.executor.cuda_places import Addresses, Places, Turn

_ACT32, _ACT256 = 1, 2  # native/matmul.h ds4_act


class Planned(NamedTuple):
    """One launch."""

    unit: ks.Unit
    kernel: str
    parameters: ctypes.Structure
    launch: ks.Launch


class RowLaunches:
    """Launches for steps of at most `tokens` tokens, which the methods read from here."""

    def __init__(
        self, image: im.Image, config: ExecutorConfig, places: Places, addresses: Addresses
    ) -> None:
        self._image, self._config = image, config
        self._places, self._at = places, addresses
        self._tokens = 0
        self._rows = (0, 0)  # tokens, outputs
        self._split_tokens = 0  # the most whose attention is split

    def _planned(self, name: str, parameters: ctypes.Structure) -> Planned:
        kernel = ks.KERNELS.get(name)
        if kernel is None:
            raise KeyError(f"kernel {name}")
        return Planned(ks.Unit(kernel.file), name, parameters, kernel.launch(parameters))

    def _weight_unit(self, index: int) -> ks.Unit:
        weight = self._image.weights[index]
        try:
            return ks.weight_unit(weight.ggml_type, weight.layout)
        except KeyError as error:
            kind = QuantType(weight.ggml_type).name
            raise KeyError(f"weights of {kind} in layout {weight.layout}") from error

    def _pending(self) -> Planned:
        """Tokens that the step before drew take their places."""
        step = self._places.step
        return self._planned("pending_tokens", ks.Rowwise(
            x=self._at.drawn, b=self._at.step + step.sources, y=self._at.step + step.tokens,
            live=self._at.live(im.SPACE_TOKENS), rows=self._tokens, width=1,
        ))  # fmt: skip

    def _angles(self, turn: Turn) -> Planned:
        rope, how = self._at.rope(turn), self._image.ropes[turn.rope]
        half = how.rope_dim // 2
        positions = self._at.step + self._places.step.positions_of(how.shift)
        return self._planned("rope_angles", ks.RopeAngles(
            frequency=rope.frequency, positions=positions, cosine=rope.cosine,
            sine=rope.sine, live=self._at.live(im.SPACE_TOKENS), magnitude=rope.magnitude,
            tokens=self._tokens, half=half,
        ))  # fmt: skip

    @property
    def _positions(self) -> int:
        return self._at.step + self._places.step.positions

    @property
    def _banks(self) -> int:
        return self._at.step + self._places.step.banks

    def _rowwise(self, name: str, space: int, op: im.ImageOp, **fields: float) -> Planned:
        """A kernel over rows of one or two inputs."""
        x, y = self._at.slot(op.inputs[0]), self._at.slot(op.out)
        b = self._at.slot(op.inputs[1]) if len(op.inputs) > 1 else None
        if b is not None:
            fields.setdefault("b", b.address)
            fields.setdefault("b_stride", b.stride)
        return self._planned(name, ks.Rowwise(
            x=x.address, y=y.address, live=self._at.live(space), x_stride=x.stride,
            y_stride=y.stride, rows=self._rows[space], width=self._width(op.out), **fields,
        ))  # fmt: skip

    def _width(self, slot: int) -> int:
        return self._image.slots[slot].width

    def _embed(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        weight, y = self._image.weights[op.weight], self._at.slot(op.out)
        parameters = ks.Embed(
            table=self._at.weight(op.weight), tokens=self._at.step + self._places.step.tokens,
            y=y.address, live=self._at.live(space), table_rows=weight.rows, y_stride=y.stride,
            rows=self._rows[space], cols=weight.cols, factor=op.value,
        )  # fmt: skip
        unit = self._weight_unit(op.weight)
        yield Planned(unit, "embed", parameters, ks.embed_launch(parameters))

    def _rms_norm(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        """Perhaps with the sum before it and the quantizations after it."""
        add = ops[0] if ops[0].kind == im.OP_ADD else None
        norm, *quantized = ops[1:] if add else ops
        x = self._at.slot(add.inputs[0] if add else norm.inputs[0])
        y = self._at.slot(norm.out)
        p = ks.RmsNorm(
            x=x.address, x_stride=x.stride, y=y.address, y_stride=y.stride,
            weight=self._at.vector(norm.weight) or self._at.ones, live=self._at.live(space),
            rows=self._rows[space], heads=norm.heads,
            width=self._width(norm.out) // norm.heads, eps=norm.value,
        )  # fmt: skip
        if add:
            other, total = self._at.slot(add.inputs[1]), self._at.slot(add.out)
            p.add, p.add_stride = other.address, other.stride
            p.sum, p.sum_stride = total.address, total.stride
        for op in quantized:
            act = self._at.slot(op.out)
            name = "act32" if self._image.slots[op.out].act_format == _ACT32 else "act256"
            setattr(p, name, act.address)
            setattr(p, f"{name}_stride", act.stride)
        yield self._planned("rms_norm", p)

    def _rope(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        """One or two rows that turn alike."""
        op, *others = ops
        rope, how = self._at.rope(Turn(op.rope, bool(op.mode))), self._image.ropes[op.rope]
        x, y = self._at.slot(op.inputs[0]), self._at.slot(op.out)
        p = ks.Rope(
            x=x.address, y=y.address, cosine=rope.cosine, sine=rope.sine,
            live=self._at.live(space), x_stride=x.stride, y_stride=y.stride,
            tokens=self._rows[space], heads=op.heads, dim=op.dim, first=op.first,
            half=how.rope_dim // 2, style=how.style,
        )  # fmt: skip
        for other in others:
            x, y = self._at.slot(other.inputs[0]), self._at.slot(other.out)
            p.more_heads, p.more_x, p.more_y = other.heads, x.address, y.address
            p.more_x_stride, p.more_y_stride = x.stride, y.stride
        yield self._planned("rope", p)

    def _add(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        if len(ops) > 1:
            yield from self._rms_norm(space, ops)
        else:
            yield self._rowwise("add", space, ops[0])

    def _glu(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        op = ops[0]
        if len(ops) == 1:
            yield self._rowwise("glu", space, op, mode=op.mode, limit=op.limit, alpha=op.alpha)
            return
        p = self._quantization(space, ops[1])
        gate, up, y = (
            self._at.slot(op.inputs[0]),
            self._at.slot(op.inputs[1]),
            self._at.slot(op.out),
        )
        p.x, p.x_stride, p.up, p.up_stride = gate.address, gate.stride, up.address, up.stride
        p.y, p.y_stride = y.address, y.stride
        p.mode, p.limit, p.alpha = op.mode, op.limit, op.alpha
        yield self._planned("glu_quantize", p)

    def _quantize(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        yield self._planned("quantize", self._quantization(space, ops[0]))

    def _quantization(self, space: int, op: im.ImageOp) -> ks.Quantize:
        slot, x, act = self._image.slots[op.out], self._at.slot(op.inputs[0]), self._at.slot(op.out)
        return ks.Quantize(
            x=x.address, x_stride=x.stride, act=act.address, act_stride=act.stride,
            live=self._at.live(space), rows=self._rows[space], width=slot.width,
            columns=slot.columns, format=slot.act_format,
        )  # fmt: skip

    def _soft_cap(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        yield self._rowwise("soft_cap", space, ops[0], value=ops[0].value)

    def _gate_row(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        yield self._rowwise("gate_row", space, ops[0])

    def _scale_parts(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        used = self._width(op.inputs[1]) // 2 if len(op.inputs) > 1 else 0
        yield self._rowwise(
            "scale_parts", space, op, heads=used, dim=self._image.weights[op.weight].cols,
            scales=self._at.vector(op.weight), bias=self._at.vector(op.bias),
        )  # fmt: skip

    def _slice_heads(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        yield self._rowwise(
            "slice_heads", space, op, heads=op.heads, dim=op.dim, first=op.first, part=op.width
        )

    def _join_heads(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        left, right, whole = (self._width(s) for s in (*op.inputs, op.out))
        part = (whole - left) // op.heads
        shared = right == part  # one head of b serves all
        yield self._rowwise(
            "join_heads", space, op, heads=op.heads, part=part, dim=0 if shared else part
        )

    def _combine(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        yield self._rowwise("combine", space, op, heads=self._width(op.inputs[1]) // 2)

    def _gather(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        yield self._rowwise("gather_rows", space, op, b=self._at.step + self._places.step.rows)


def fused(ops: Sequence[im.ImageOp], formats: Sequence[int]) -> list[list[im.ImageOp]]:
    """Neighbours that one kernel computes together: a sum, the norm over it and the quantizations
    of that; a gated unit and its quantization; products of the same columns; two rotations that
    turn alike. All their values are still written. `formats`: activation format of each slot."""
    groups: list[list[im.ImageOp]] = []
    for op in ops:
        if groups and _joins(groups[-1], op, formats):
            groups[-1].append(op)
        else:
            groups.append([op])
    return groups


def _joins(group: Sequence[im.ImageOp], op: im.ImageOp, formats: Sequence[int]) -> bool:
    kinds = [member.kind for member in group]
    if op.kind == im.OP_MATMUL:  # a section's products do not depend on each other
        return kinds[0] == im.OP_MATMUL and op.inputs == group[0].inputs
    if op.kind == im.OP_ROPE:
        return kinds == [im.OP_ROPE] and _turns_alike(group[0], op)
    if op.kind == im.OP_RMS_NORM:
        return kinds == [im.OP_ADD] and op.heads == 1 and op.inputs == (group[0].out,)
    if op.kind != im.OP_QUANTIZE:
        return False
    if kinds == [im.OP_GLU]:
        return op.inputs == (group[0].out,)
    norm = next((member for member in group if member.kind == im.OP_RMS_NORM), None)
    if norm is None or norm.heads != 1 or op.inputs != (norm.out,):
        return False
    made = [formats[member.out] for member in group if member.kind == im.OP_QUANTIZE]
    return formats[op.out] in (_ACT32, _ACT256) and formats[op.out] not in made


def _turns_alike(op: im.ImageOp, other: im.ImageOp) -> bool:
    """And neither reads what the other one writes."""
    same = (op.rope, op.mode, op.dim, op.first) == (other.rope, other.mode, other.dim, other.first)
    return same and op.out not in (*other.inputs, other.out) and other.out not in op.inputs
