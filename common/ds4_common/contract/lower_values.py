"""Values, weights and nodes of a program that is being lowered: what the ops' translations share.

Owns: the tables that a translation fills, looking up what an op reads, and adding what it writes.
`lower.py` and `lower_rows.py` hold the translations. Refuses with the op that is being translated.
"""

from __future__ import annotations

from msgspec.structs import replace

from ds4_common.contract import image as im
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.schedule import Node, Value
from ds4_common.errors import ContractError, UnsupportedModel
from ds4_common.quants.native import Isa, library

# Histories in which a token changes what earlier ones left: no position can be computed again.
FORWARD_ONLY = (pb.RECURRENT, pb.CONTINUATION)


class Translation:
    """The program so far: nodes over values, and the image's tables."""

    def __init__(self, bundle: pb.Bundle, any_layout: bool) -> None:
        serving = bundle.serving
        self._any_layout = any_layout
        self.image = im.Image(
            vocabulary=serving.model.vocabulary,
            context_tokens=serving.context_tokens,
            page_tokens=serving.model.cache.page_tokens,
            forward_only=any(
                history.kind in FORWARD_ONLY for history in serving.model.cache.histories
            ),
        )
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.current: dict[str, int] = {}  # buffer name -> value of its latest write
        self._buffers = {buffer.name: buffer for buffer in bundle.execution.buffers}
        self._weights: dict[str, int] = {}
        self._allocations: dict[int, int] = {}
        self._planes: dict[tuple[str, str], int] = {}
        self._windows = {
            name: history.window_tokens
            for history in serving.model.cache.histories
            if history.kind == pb.SLIDING_WINDOW
            for name in history.planes
        }
        self._quantized: dict[tuple[int, int, int], int] = {}
        self._where = ""

    def _slide(self, names: tuple[str, ...], plane: im.Plane) -> im.Plane:
        """The plane with the window of its history."""
        windows = {self._windows.get(name, 0) for name in names if name}
        if len(windows) != 1:
            raise self._refuse(f"cache {names}", f"windows {sorted(windows)}", "one window")
        window = windows.pop()
        if window and (plane.kind in (im.PLANE_TILES, im.PLANE_STATE) or plane.ratio > 1):
            raise self._refuse(f"cache {names}", f"a window of {window}", "all positions kept")
        return replace(plane, window=window)

    def _within(self, held: im.Plane, window: int) -> None:
        """Refuses an attention that sees more than the history keeps."""
        if held.window and not 1 <= window <= held.window:
            raise self._refuse("attribute window", window, f"1 to the history's {held.window}")

    def _elementwise(self, op: im.ImageOp, out: str) -> None:
        shapes = {(self.values[v].space, self.values[v].width) for v in op.inputs}
        if len(shapes) != 1:
            raise self._refuse("inputs", f"(space, width) {sorted(shapes)}", "the same of both")
        self._rows(op, out, *shapes.pop())

    def _quantize(self, x: int, weight: im.Weight, columns: int) -> int:
        """The value of `x` as `columns` activation columns that the weight's kernels can read."""
        value = self.values[x]
        if weight.cols * columns != value.width:
            raise self._refuse("width of the input", value.width, str(weight.cols * columns))
        layout = 0 if self._any_layout else weight.layout
        key = (x, _act_format(weight.ggml_type, layout, self._where), columns)
        if key not in self._quantized:
            act = self._new_value(value.space, weight.cols, key[1], columns)
            op = im.ImageOp(im.OP_QUANTIZE, (x,), out=act)
            self.nodes.append(Node(op, im.SECTION_ROWS, value.space, (x,), act))
            self._quantized[key] = act
        return self._quantized[key]

    def _experts(
        self, op: im.ImageOp, out: str, x: int, width: int, company: tuple[int, ...]
    ) -> None:
        space = self.values[x].space
        y = self._new_value(space, width)
        done = replace(op, out=y)
        node = Node(done, im.SECTION_EXPERTS, space, op.inputs, y, company)
        self.nodes.append(node)
        self.current[out] = y

    def _rows(self, op: im.ImageOp, out: str, space: int, width: int) -> None:
        y = self._new_value(space, width)
        done = replace(op, out=y)
        self.nodes.append(Node(done, im.SECTION_ROWS, space, op.inputs, y))
        self.current[out] = y

    def _width(self, name: str) -> int:
        """Of a scratch buffer's rows."""
        return int(self._buffers[name].shape[-1])

    def _new_value(
        self, space: int, width: int, act_format: int = im.ACT_NONE, columns: int = 1
    ) -> int:
        self.values.append(Value(space, width, act_format, columns))
        return len(self.values) - 1

    def _read(self, name: str) -> int:
        value = self.current.get(name)
        if value is None:
            raise self._refuse("input", repr(name), "a buffer that an op above has written")
        return value

    def _vector(self, name: str, width: int) -> int:
        index = self._weight(name)
        held = self.image.weights[index]
        if held.rows * held.experts != 1 or held.cols != width:
            raise self._refuse(name, f"[{held.rows}, {held.cols}]", f"a vector of {width}")
        return index

    def _weight(self, name: str) -> int:
        if name in self._weights:
            return self._weights[name]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.space != pb.WEIGHT:
            raise self._refuse("input", repr(name), "a WEIGHT buffer of the contract")
        kind, _, number = buffer.resource.partition(":")
        if kind != "alloc" or not number.isdecimal():
            raise self._refuse(f"resource of {name}", buffer.resource, "alloc:<number>")
        if not 1 <= len(buffer.shape) <= 3:
            raise self._refuse(f"shape of {name}", list(buffer.shape), "one to three extents")
        allocation = self._allocations.setdefault(int(number), len(self._allocations))
        end = buffer.offset + buffer.bytes
        if allocation == len(self.image.allocations):
            self.image.allocations.append((int(number), end))
        elif self.image.allocations[allocation][1] < end:
            self.image.allocations[allocation] = (int(number), end)
        shape = tuple(buffer.shape)
        self.image.weights.append(
            im.Weight(
                allocation=allocation,
                ggml_type=buffer.ggml_type,
                layout=buffer.layout,
                offset=buffer.offset,
                rows=shape[-2] if len(shape) > 1 else 1,
                cols=shape[-1],
                n_bytes=buffer.bytes,
                experts=shape[0] if len(shape) == 3 else 1,
            )
        )
        self._weights[name] = len(self.image.weights) - 1
        return self._weights[name]

    def _refuse(self, what: str, got: object, expected: str) -> ContractError:
        return ContractError(f"{self._where}: {what}: got {got}, expected {expected}")


def _act_format(ggml_type: int, layout: int, where: str) -> int:
    """The activation format that the kernels of a weight want. Refuses one without kernels."""
    kernels = library()
    if not kernels.ds4_matmul_kernel(ggml_type, layout, Isa.SCALAR):
        raise UnsupportedModel(
            f"{where}: no matmul kernel for ggml type {ggml_type} in layout "
            f"{layout}; the CPU executor cannot run this weight"
        )
    return int(kernels.ds4_act_format(ggml_type))
