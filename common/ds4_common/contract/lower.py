"""Lowers a prepared contract to the CPU image.

Owns: turning the flat op list of the step program into nodes over values. Every write of a scratch
buffer becomes a value of its own, so reuse of names in the list orders nothing. A matmul's input
gains a `quantize` in the format its weight's kernels want; one quantized value serves all matmuls
that read the same input. `schedule.py` then groups the nodes and lays out their scratch. Refuses
what validation lets through but this executor cannot run, with the op and the reason.
"""

from __future__ import annotations

from msgspec.structs import replace

from ds4_common.contract import image as im
from ds4_common.contract import ops
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.lower_rows import ROW_TABLE_INPUTS, RowTranslations
from ds4_common.contract.schedule import Node, lay_out, schedule
from ds4_common.contract.validate import parse_bundle, validate
from ds4_common.errors import ContractError

_TABLE_INPUTS = {
    "embed": {0: ops.TOKENS},
    "rope": {1: ops.POSITIONS},
    "kv_store": {2: ops.POSITIONS, 3: ops.BANKS, 4: ops.PAGE_TABLE},
    "attend_paged": {3: ops.POSITIONS, 4: ops.BANKS, 5: ops.PAGE_TABLE},
    "latent_store": {1: ops.POSITIONS, 2: ops.BANKS, 3: ops.PAGE_TABLE},
    "attend_latent": {2: ops.POSITIONS, 3: ops.BANKS, 4: ops.PAGE_TABLE},
    "gather_rows": {1: ops.OUTPUT_ROWS},
    **ROW_TABLE_INPUTS,
}  # inputs that the engine itself provides, by position


def lower_contract(contract: bytes, *, any_layout: bool = False) -> bytes:
    """Parses, validates and lowers a contract blob. Raises ContractError."""
    bundle = parse_bundle(contract)
    validate(bundle)
    return lower_cuda(bundle) if any_layout else lower_cpu(bundle)


def lower_cpu(bundle: pb.Bundle) -> bytes:
    """The CPU image of a validated bundle, as bytes. Raises as `lower_image`."""
    return im.write_image(lower_image(bundle))


def lower_cuda(bundle: pb.Bundle) -> bytes:
    """The same for an executor that looks at the layouts of weights itself."""
    return im.write_image(lower_image(bundle, any_layout=True))


def lower_image(bundle: pb.Bundle, *, any_layout: bool = False) -> im.Image:
    """The image of a validated bundle. Raises ContractError naming the op at fault, and
    UnsupportedModel for a weight that no CPU kernel reads. `any_layout` is for an executor with
    kernels of its own: it looks at the layouts of weights itself."""
    lowering = _Lowering(bundle, any_layout)
    for index, op in enumerate(_step_program(bundle).ops):
        lowering.add(index, op)
    logits = lowering.current.get(ops.LOGITS)
    if logits is None:
        raise ContractError(f"program: no op writes {ops.LOGITS!r}")
    sections = schedule(lowering.nodes)
    image = lowering.image
    image.logits_slot = lay_out(image, lowering.values, sections, logits)
    return image


def _step_program(bundle: pb.Bundle) -> pb.OpList:
    names = [p.name for p in bundle.serving.model.programs if p.operation == pb.MIXED]
    bodies = {p.name: p for p in bundle.execution.programs}
    for name in names:
        if name in bodies and bodies[name].WhichOneof("body") == "ops":
            return bodies[name].ops
    raise ContractError(
        f"contract: got programs {sorted(bodies)}, expected one of operation MIXED with an op list"
    )


class _Lowering(RowTranslations):
    """Translates ops one by one into nodes over values, collecting the image's tables."""

    def add(self, index: int, op: pb.Op) -> None:
        """Translates one op of the list."""
        self._where = f"program op {index} ({op.kernel})"
        spec = ops.OPS.get(op.kernel)
        if spec is None:
            raise self._refuse("kernel", op.kernel, f"one of {sorted(ops.OPS)}")
        inputs: list[str] = list(getattr(op, "in"))
        least = sum(not name.endswith("?") for name in spec.inputs)
        if not least <= len(inputs) <= len(spec.inputs):
            raise self._refuse("inputs", len(inputs), f"{least} to {len(spec.inputs)}")
        inputs += [""] * (len(spec.inputs) - len(inputs))
        if len(op.out) != len(spec.outputs):
            raise self._refuse("outputs", len(op.out), str(len(spec.outputs)))
        for position, name in _TABLE_INPUTS.get(op.kernel, {}).items():
            if inputs[position] != name:
                raise self._refuse(f"input {position}", inputs[position], repr(name))
        attributes: dict[str, float] = {}
        for key, default in spec.attributes.items():
            if key not in op.attr and default is None:
                raise self._refuse("attribute", "none", repr(key))
            attributes[key] = op.attr[key] if key in op.attr else float(default or 0.0)
        getattr(self, f"_{op.kernel}")(inputs, list(op.out), attributes)

    # One method per op of the registry.

    def _embed(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        table = self._weight(inputs[1])
        width = self.image.weights[table].cols
        op = im.ImageOp(im.OP_EMBED, (), weight=table, value=attr["scale"])
        self._rows(op, out[0], im.SPACE_TOKENS, width)

    def _rms_norm(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x = self._read(inputs[0])
        heads = int(attr["heads"])
        width = self.values[x].width // heads
        weight = self._vector(inputs[1], width) if inputs[1] else im.NONE
        op = im.ImageOp(im.OP_RMS_NORM, (x,), weight=weight, heads=heads, value=attr["eps"])
        self._elementwise(op, out[0])

    def _rope(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x = self._read(inputs[0])
        pairs = int(attr["rope_dim"]) // 2
        rope = im.Rope(
            rope_dim=int(attr["rope_dim"]),
            style=int(attr["style"]),
            factors=self._vector(inputs[2], pairs) if inputs[2] else im.NONE,
            long_factors=self._vector(inputs[3], pairs) if inputs[3] else im.NONE,
            truncate=int(attr["truncate"]),
            shift=int(attr["shift"]),
            **{key: attr[key] for key in (
                "base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow",
                "original_context",
            )},
        )  # fmt: skip
        if rope not in self.image.ropes:
            self.image.ropes.append(rope)
        index = self.image.ropes.index(rope)
        heads, dim = int(attr["heads"]), int(attr["dim"])
        if heads * dim != self.values[x].width:
            raise self._refuse("heads * dim", heads * dim, str(self.values[x].width))
        first = int(attr["offset"])
        op = im.ImageOp(
            im.OP_ROPE,
            (x,),
            rope=index,
            heads=heads,
            dim=dim,
            first=first,
            mode=int(attr["inverse"]),
        )
        self._elementwise(op, out[0])

    def _kv_store(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        reads = (self._read(inputs[0]), self._read(inputs[1]))
        plane = im.Plane(int(attr["kv_heads"]), int(attr["dim"]), int(attr["value_dim"]))
        self._store(reads, (out[0], out[1]), plane)

    def _latent_store(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        dim = int(attr["dim"])
        plane = im.Plane(1, dim, dim, im.PLANE_LATENT)
        self._store((self._read(inputs[0]),), (out[0], ""), plane)

    def _store(self, reads: tuple[int, ...], key: tuple[str, str], plane: im.Plane) -> None:
        if key in self._planes:
            raise self._refuse("cache", f"a second store into {key}", "one store per layer")
        self._planes[key] = len(self.image.planes)
        self.image.planes.append(self._slide(key, plane))
        op = im.ImageOp(im.OP_KV_STORE, reads, plane=self._planes[key])
        stored = self._new_value(im.SPACE_TOKENS, 0)
        for name in filter(None, key):
            self.current[name] = stored
        self.nodes.append(Node(op, im.SECTION_ROWS, im.SPACE_TOKENS, reads, stored))

    def _attend_paged(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        asked = im.Plane(int(attr["kv_heads"]), int(attr["dim"]), int(attr["value_dim"]))
        self._attend(inputs[0], (inputs[1], inputs[2]), inputs[6], asked, out[0], attr)

    def _attend_latent(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        dim = int(attr["dim"])
        asked = im.Plane(1, dim, dim, im.PLANE_LATENT)
        self._attend(inputs[0], (inputs[1], ""), inputs[5], asked, out[0], attr)

    def _attend(
        self,
        query: str,
        key: tuple[str, str],
        sinks: str,
        asked: im.Plane,
        out: str,
        attr: dict[str, float],
    ) -> None:
        q, plane = self._read(query), self._planes.get(key)
        if plane is None:
            raise self._refuse("cache", key, "planes that an op above stores")
        held = self.image.planes[plane]
        self._within(held, int(attr["window"]))
        if asked != replace(held, window=0):
            raise self._refuse("cache", asked, f"the stored {held}")
        heads, value_dim = int(attr["heads"]), int(attr["value_dim"])
        y = self._new_value(im.SPACE_TOKENS, heads * value_dim)
        op = im.ImageOp(
            im.OP_ATTEND,
            (q,),
            out=y,
            plane=plane,
            heads=heads,
            width=value_dim,
            weight=self._vector(sinks, heads) if sinks else im.NONE,
            window=int(attr["window"]),
            value=attr["scale"],
            limit=attr["soft_cap"],
        )
        reads = (q, self.current[key[0]])
        self.nodes.append(Node(op, im.SECTION_ATTEND, im.SPACE_TOKENS, reads, y))
        self.current[out] = y

    def _matmul(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x = self._read(inputs[0])
        weight = self._weight(inputs[1])
        held = self.image.weights[weight]
        if held.cols != self.values[x].width:
            raise self._refuse(f"width of {inputs[0]}", self.values[x].width, str(held.cols))
        bias = self._vector(inputs[2], held.rows) if inputs[2] else im.NONE
        space = self.values[x].space
        act = self._quantize(x, held, 1)
        y = self._new_value(space, held.rows)
        op = im.ImageOp(im.OP_MATMUL, (act,), out=y, weight=weight, bias=bias)
        self.nodes.append(Node(op, im.SECTION_MATMUL, space, (act,), y))
        self.current[out[0]] = y

    def _matmul_heads(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x, weight = self._read(inputs[0]), self._weight(inputs[1])
        held = self.image.weights[weight]
        act = self._quantize(x, held, held.experts)
        op = im.ImageOp(im.OP_MATMUL_EXPERTS, (act,), weight=weight)
        self._experts(op, out[0], x, held.experts * held.rows, company=(held.experts,))

    def _matmul_experts(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x, routes, weight = self._read(inputs[0]), self._read(inputs[1]), self._weight(inputs[2])
        held, used = self.image.weights[weight], self.values[routes].width // 2
        act = self._quantize(x, held, 1 if self.values[x].width == held.cols else used)
        bias = self._weight(inputs[3]) if inputs[3] else im.NONE
        op = im.ImageOp(im.OP_MATMUL_EXPERTS, (act, routes), weight=weight, bias=bias)
        self._experts(op, out[0], x, used * held.rows, company=(held.experts, routes))

    def _route_experts(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x = self._read(inputs[0])
        op = im.ImageOp(
            im.OP_ROUTE,
            (x,),
            weight=self._vector(inputs[1], self.values[x].width) if inputs[1] else im.NONE,
            bias=self._table(inputs[2:4]),
            mode=int(attr["score"]),
            width=int(attr["group_top"]),
            groups=int(attr["groups"]),
            groups_used=int(attr["groups_used"]),
            normalize=int(attr["normalize"]),
            value=attr["scale"],
        )
        self._rows(op, out[0], self.values[x].space, self._width(out[0]))

    def _combine_experts(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x, routes = self._read(inputs[0]), self._read(inputs[1])
        width = self.values[x].width // (self.values[routes].width // 2)
        self._rows(im.ImageOp(im.OP_COMBINE, (x, routes)), out[0], self.values[x].space, width)

    def _soft_cap(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        op = im.ImageOp(im.OP_SOFT_CAP, (self._read(inputs[0]),), value=attr["cap"])
        self._elementwise(op, out[0])

    def _gate_row(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x, gate = self._read(inputs[0]), self._read(inputs[1])
        value = self.values[x]
        self._rows(im.ImageOp(im.OP_GATE_ROW, (x, gate)), out[0], value.space, value.width)

    def _slice_heads(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x = self._read(inputs[0])
        names = ("heads", "dim", "first", "width")
        op = im.ImageOp(im.OP_SLICE_HEADS, (x,), **{name: int(attr[name]) for name in names})
        self._rows(op, out[0], self.values[x].space, op.heads * op.width)

    def _join_heads(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        left, right = self._read(inputs[0]), self._read(inputs[1])
        op = im.ImageOp(im.OP_JOIN_HEADS, (left, right), heads=int(attr["heads"]))
        self._rows(op, out[0], self.values[left].space, self._width(out[0]))

    def _add(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        op = im.ImageOp(im.OP_ADD, (self._read(inputs[0]), self._read(inputs[1])))
        self._elementwise(op, out[0])

    def _glu(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        op = im.ImageOp(
            im.OP_GLU,
            (self._read(inputs[0]), self._read(inputs[1])),
            mode=int(attr["act"]),
            limit=attr["limit"],
            alpha=attr["alpha"],
        )
        self._elementwise(op, out[0])

    def _gather_rows(self, inputs: list[str], out: list[str], attr: dict[str, float]) -> None:
        x = self._read(inputs[0])
        if self.values[x].space != im.SPACE_TOKENS:
            raise self._refuse("input", inputs[0], "a value with one row per token")
        op = im.ImageOp(im.OP_GATHER, (x,))
        self._rows(op, out[0], im.SPACE_OUTPUTS, self.values[x].width)
