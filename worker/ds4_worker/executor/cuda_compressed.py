"""Kernel launches of ops over residual streams that exchange and over compressed rows of a cache.

Owns: their translation, as `cuda_rows` does for the ordinary ops. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds4_common.contract import image as im
from ds4_worker.cuda import kernels as ks
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.executor.cuda_places import index_rows_of
from ds4_worker.executor.cuda_rows import Planned, RowLaunches


def row_parts(image: im.Image, config: ExecutorConfig, op: im.ImageOp) -> int:
    """The most parts of the rows that one token attends to."""
    rows = min(op.window, config.context_tokens)
    if len(op.inputs) > 1:
        rows += image.slots[op.inputs[1]].width
    elif op.other_plane != im.NONE:
        rows += config.context_tokens // image.planes[op.other_plane].ratio
    return -(-rows // ks.ROW_PART)


class CompressedLaunches(RowLaunches):
    def _streams(self, name: str, space: int, op: im.ImageOp, **fields: int | float) -> Planned:
        y = self._at.slot(op.out)
        return self._planned(name, ks.Streams(
            y=y.address, y_stride=y.stride, live=self._at.live(space), rows=self._rows[space],
            streams=op.groups, **fields,
        ))  # fmt: skip

    def _operand(self, name: str, slot: int) -> dict[str, int]:
        rows = self._at.slot(slot)
        return {name: rows.address, f"{name}_stride": rows.stride}

    def _hyper_weights(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        yield self._streams(
            "hyper_weights", space, op, **self._operand("x", op.inputs[0]),
            scale=self._at.vector(op.weight), base=self._at.vector(op.bias),
            width=self._width(op.out), iterations=op.window, eps=op.value,
        )  # fmt: skip

    def _hyper_read(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        yield self._streams(
            "hyper_read", space, op, **self._operand("s", op.inputs[0]),
            **self._operand("w", op.inputs[1]), width=self._width(op.out),
        )  # fmt: skip

    def _hyper_write(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        yield self._streams(
            "hyper_write", space, op, **self._operand("x", op.inputs[0]),
            **self._operand("s", op.inputs[1]), **self._operand("w", op.inputs[2]),
            width=self._width(op.inputs[0]),
        )  # fmt: skip

    def _hadamard(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        yield self._streams(
            "hadamard", space, op, **self._operand("x", op.inputs[0]), heads=op.heads,
            dim=self._width(op.out) // op.heads,
        )  # fmt: skip

    def _round_floats(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        yield self._streams(
            "round_floats", space, op, **self._operand("x", op.inputs[0]), heads=op.heads,
            dim=self._width(op.out) // op.heads, dims=op.dim, block=op.width, format=op.mode,
        )  # fmt: skip

    # ---- rows of the cache -----------------------------------------------------------------------

    def _plane(self, index: int) -> ks.Plane:
        if index == im.NONE:
            return ks.Plane()
        held, at = self._image.planes[index], self._at.plane(index)
        return ks.Plane(
            pages=at.address, page_stride=at.page_stride, page_table=at.page_table,
            pages_per_bank=self._places.pages_per_bank, page_tokens=self._image.page_tokens,
            dim=held.dim, ratio=held.ratio,
        )  # fmt: skip

    def _compress(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        y = self._at.slot(op.out)
        yield self._planned("compress", ks.Compress(
            state=self._plane(op.plane), **self._operand("k", op.inputs[0]),
            **self._operand("gate", op.inputs[1]), bias=self._at.vector(op.bias),
            y=y.address, y_stride=y.stride,
            positions=self._positions, banks=self._banks, live=self._at.live(space),
            tokens=self._tokens, copies=self._image.planes[op.plane].kv_heads // 3,
            window=op.window, **self._kept(op),
        ))  # fmt: skip

    def _kept(self, op: im.ImageOp) -> dict[str, int]:
        """What is kept of each bank's last slice, where it can be taken back."""
        address, step = self._at.kept(op), self._places.step
        if not address:
            return {}
        return {
            "kept": address, "kept_stride": self._places.kept.bank_bytes,
            "again": self._at.step + step.again, "keeps": self._at.step + step.keeps,
        }  # fmt: skip

    def _store_rows(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        tiles = self._image.planes[op.plane].kind == im.PLANE_TILES
        yield self._planned("store_rows", ks.StoreRows(
            plane=self._plane(op.plane), **self._operand("x", op.inputs[0]),
            positions=self._positions, banks=self._banks, live=self._at.live(space),
            tokens=self._tokens, tiles=tiles,
        ))  # fmt: skip

    def _index_rows(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        p = ks.Index(
            plane=self._plane(op.plane), **self._operand("q", op.inputs[0]),
            **self._operand("w", op.inputs[1]), **self._operand("rows", op.out),
            positions=self._positions, banks=self._banks, live=self._at.live(space),
            scores=self._at.scores, tokens=self._tokens, heads=op.heads, k=self._width(op.out),
            most_rows=index_rows_of(self._image, self._config), scale=op.value,
        )  # fmt: skip
        yield self._planned("index_scores", p)
        yield self._planned("index_pick", p)

    def _attend_rows(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        p = ks.AttendRows(
            recent=self._plane(op.plane), compressed=self._plane(op.other_plane),
            **self._operand("q", op.inputs[0]), **self._operand("y", op.out),
            positions=self._positions, banks=self._banks, live=self._at.live(space),
            sinks=self._at.vector(op.weight), parts=self._at.partials, tokens=self._tokens,
            heads=op.heads, window=op.window, most_parts=row_parts(self._image, self._config, op),
            scale=op.value,
        )  # fmt: skip
        if len(op.inputs) > 1:
            chosen = self._at.slot(op.inputs[1])
            p.chosen, p.chosen_stride = chosen.address, chosen.stride
            p.most_chosen = self._width(op.inputs[1])
        split = self._tokens <= self._split_tokens
        for name in ("attend_rows_parts", "attend_rows_fold") if split else ("attend_rows",):
            yield self._planned(name, p)
