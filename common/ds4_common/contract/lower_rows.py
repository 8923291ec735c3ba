"""Lowers residual streams that exchange, and attention over compressed rows.

Owns: one method per op of the second half of `ops.py`. A plane of rows that is stored is a value of
width 0, so that whoever reads it comes in a later section.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ds4_common.contract import image as im
from ds4_common.contract import ops
from ds4_common.contract.lower_values import Translation
from ds4_common.contract.schedule import Node
from ds4_common.gguf.types import GgmlType

# Inputs that the engine itself provides, by position.
ROW_TABLE_INPUTS = {
    "compress": {3: ops.POSITIONS, 4: ops.BANKS, 5: ops.PAGE_TABLE},
    "store_rows": {1: ops.POSITIONS, 2: ops.BANKS, 3: ops.PAGE_TABLE},
    "index_rows": {3: ops.POSITIONS, 4: ops.BANKS, 5: ops.PAGE_TABLE},
    "attend_rows": {2: ops.POSITIONS, 3: ops.BANKS, 4: ops.PAGE_TABLE},
}


class RowTranslations(Translation):
    """The translations; `_Lowering` finds them by the ops' names."""

    def _table(self, inputs: Sequence[str]) -> int:
        """The weight that names each token's experts, if there is one."""
        tokens, table = inputs
        if not table:
            return im.NONE
        if tokens != ops.TOKENS:
            raise self._refuse("input 2", tokens, repr(ops.TOKENS))
        weight = self._weight(table)
        held = self.image.weights[weight]
        if held.ggml_type != GgmlType.I32 or held.layout:
            raise self._refuse(table, f"type {held.ggml_type}, layout {held.layout}", "raw I32")
        return weight

    def _scale_parts(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        read = tuple(self._read(name) for name in (inputs[0], inputs[2]) if name)
        value = self.values[read[0]]
        op = im.ImageOp(
            im.OP_SCALE_PARTS,
            read,
            weight=self._vector(inputs[1], self._width(inputs[1])),
            bias=self._vector(inputs[3], value.width) if inputs[3] else im.NONE,
        )
        self._rows(op, out[0], value.space, value.width)

    def _hyper_weights(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        mix, streams = self._read(inputs[0]), int(attr["streams"])
        width = self.values[mix].width
        op = im.ImageOp(
            im.OP_HYPER_WEIGHTS,
            (mix,),
            weight=self._vector(inputs[1], 1 if width == streams else 3),
            bias=self._vector(inputs[2], width),
            groups=streams,
            window=int(attr["iterations"]),
            value=attr["eps"],
        )
        self._elementwise(op, out[0])

    def _hyper_read(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        s, w = self._read(inputs[0]), self._read(inputs[1])
        streams = self.values[s].width // self._width(out[0])
        op = im.ImageOp(im.OP_HYPER_READ, (s, w), groups=streams)
        self._rows(op, out[0], self.values[s].space, self._width(out[0]))

    def _hyper_write(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        y, s, w = (self._read(name) for name in inputs)
        streams = self.values[s].width // self.values[y].width
        op = im.ImageOp(im.OP_HYPER_WRITE, (y, s, w), groups=streams)
        self._rows(op, out[0], self.values[s].space, self.values[s].width)

    def _hadamard(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        op = im.ImageOp(im.OP_HADAMARD, (self._read(inputs[0]),), heads=int(attr["heads"]))
        self._elementwise(op, out[0])

    def _round_floats(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        op = im.ImageOp(
            im.OP_ROUND_FLOATS,
            (self._read(inputs[0]),),
            heads=int(attr["heads"]),
            dim=int(attr["dims"]),
            width=int(attr["block"]),
            mode=int(attr["format"]),
        )
        self._elementwise(op, out[0])

    def _compress(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        k, gate = self._read(inputs[0]), self._read(inputs[1])
        bias, dim = self._weight(inputs[2]), self._width(out[1])
        running = 3 * (self.values[k].width // dim)
        plane = im.Plane(running, dim, 0, im.PLANE_STATE, self.image.page_tokens)
        if self.image.page_tokens % int(attr["ratio"]):
            raise self._refuse("attribute ratio", attr["ratio"], "a divisor of the page's tokens")
        op = im.ImageOp(
            im.OP_COMPRESS, (k, gate), bias=bias, plane=self._new_plane(out[0], plane),
            dim=dim, window=int(attr["ratio"]),
        )  # fmt: skip
        self._single(op, im.SECTION_COMPRESS, out[1], dim, (k, gate))

    def _store_rows(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x, ratio = self._read(inputs[0]), int(attr["ratio"])
        records = self._buffers[out[0]].shape[1]
        if records * ratio != self.image.page_tokens:
            got = f"{records} rows a page for every {ratio} tokens"
            raise self._refuse(f"plane {out[0]}", got, f"{self.image.page_tokens} tokens a page")
        kind = im.PLANE_TILES if attr["tiles"] else im.PLANE_ROWS
        plane = self._new_plane(out[0], im.Plane(1, self.values[x].width, 0, kind, ratio))
        op = im.ImageOp(im.OP_STORE_ROWS, (x,), plane=plane)
        stored = self._new_value(im.SPACE_TOKENS, 0)
        self.current[out[0]] = stored
        self.nodes.append(Node(op, im.SECTION_ROWS, im.SPACE_TOKENS, (x,), stored))

    def _index_rows(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        q, w = self._read(inputs[0]), self._read(inputs[1])
        plane = self._stored_plane(inputs[2], im.PLANE_TILES, int(attr["ratio"]))
        op = im.ImageOp(
            im.OP_INDEX_ROWS, (q, w), plane=plane, heads=int(attr["heads"]), value=attr["scale"]
        )
        chosen = self._width(out[0])
        self._single(op, im.SECTION_INDEX, out[0], chosen, (q, w, self.current[inputs[2]]))

    def _attend_rows(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        q, heads = self._read(inputs[0]), int(attr["heads"])
        chosen = self._read(inputs[6]) if inputs[6] else im.NONE
        recent, compressed = self._stored_plane(inputs[1], im.PLANE_ROWS, 1), im.NONE
        self._within(self.image.planes[recent], int(attr["window"]))
        reads = [q, self.current[inputs[1]]]
        if inputs[5]:
            compressed = self._stored_plane(inputs[5], im.PLANE_ROWS, int(attr["ratio"]))
            reads.append(self.current[inputs[5]])
        op = im.ImageOp(
            im.OP_ATTEND_ROWS,
            (q, chosen) if inputs[6] else (q,),
            weight=self._vector(inputs[7], heads) if inputs[7] else im.NONE,
            plane=recent,
            other_plane=compressed,
            heads=heads,
            window=int(attr["window"]),
            value=attr["scale"],
        )
        if inputs[6]:
            reads.append(chosen)
        width = self.values[q].width
        self._single(op, im.SECTION_ATTEND_ROWS, out[0], width, tuple(reads))

    def _new_plane(self, name: str, plane: im.Plane) -> int:
        key = (name, "")
        if key in self._planes:
            raise self._refuse("cache", f"a second store into {name}", "one store per plane")
        self._planes[key] = len(self.image.planes)
        self.image.planes.append(self._slide(key, plane))
        return self._planes[key]

    def _stored_plane(self, name: str, kind: int, ratio: int) -> int:
        index = self._planes.get((name, ""))
        if index is None:
            raise self._refuse("cache", name, "a plane that an op above stores")
        held = self.image.planes[index]
        if (held.kind, held.ratio) != (kind, ratio):
            got = f"kind {held.kind}, a row for {held.ratio} tokens"
            raise self._refuse(f"plane {name}", got, f"kind {kind}, {ratio} tokens")
        return index

    def _single(
        self, op: im.ImageOp, section: int, out: str, width: int, reads: tuple[int, ...]
    ) -> None:
        """An op that is a section of its own, over the step's tokens."""
        y = self._new_value(im.SPACE_TOKENS, width)
        self.nodes.append(Node(replace(op, out=y), section, im.SPACE_TOKENS, reads, y))
        self.current[out] = y
