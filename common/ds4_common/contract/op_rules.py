"""Checks one op against the registry: operands, extents, attributes.

Owns: for every op of `ops.py`, which buffers fit it. Executors rely on it: what passes here is in
bounds for any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.op_rules_rows import ROW_RULES, check_paging
from ds4_common.contract.operands import MAX_EXTENT, TOKENS, WANTED, Operands, describe
from ds4_common.contract.ops import OPS, GatedUnit, RouteScore
from ds4_common.contract.strict import fail
from ds4_common.gguf.types import GgmlType

__all__ = ["MAX_EXTENT", "RULES", "check_op", "describe"]


def check_op(
    where: str,
    op: pb.Op,
    buffers: Mapping[str, pb.Buffer],
    sources: Mapping[str, Set[int]],
    row_kinds: dict[str, str],
) -> None:
    """Checks one op and records in `row_kinds` what its outputs now hold. Raises ContractError."""
    spec = OPS.get(op.kernel)
    if spec is None:
        raise fail(where, f"kernel {op.kernel!r}", f"one of {', '.join(OPS)}")
    where = f"{where} ({op.kernel})"
    inputs, outputs = list(getattr(op, "in")), list(op.out)
    for what, got, roles in (("inputs", inputs, spec.inputs), ("outputs", outputs, spec.outputs)):
        if len(got) != len(roles):
            raise fail(f"{where}, {what}", len(got), f"{len(roles)}: {', '.join(roles)}")
    unknown = sorted(op.attr.keys() - spec.attributes.keys())
    if unknown:
        raise fail(where, f"attributes {unknown}", f"only {sorted(spec.attributes)}")
    attributes: dict[str, float] = {}
    for name, default in spec.attributes.items():
        if name not in op.attr and default is None:
            raise fail(f"{where}, attribute {name}", "nothing", "a value")
        attributes[name] = op.attr[name] if name in op.attr else default or 0.0
    operands = Operands(
        where,
        _lookup(where, spec.inputs, inputs, buffers),
        _lookup(where, spec.outputs, outputs, buffers),
        attributes,
        sources,
        row_kinds,
    )
    for role, name in zip(spec.inputs, inputs, strict=True):
        if name and name in outputs and role.rstrip("?") not in spec.in_place:
            raise fail(operands.at(role), f"{name!r}, also the output", "another buffer")
    RULES[op.kernel](operands)


def _lookup(
    where: str, roles: tuple[str, ...], names: list[str], buffers: Mapping[str, pb.Buffer]
) -> dict[str, pb.Buffer]:
    found = {}
    for role, name in zip(roles, names, strict=True):
        if name in buffers:
            found[role.rstrip("?")] = buffers[name]
        elif name or not role.endswith("?"):
            raise fail(f"{where}, {role.rstrip('?')}", repr(name), "the name of a buffer")
    return found


def _embed(op: Operands) -> None:
    op.index("tokens", pb.PROMPT_TOKENS, pb.PENDING_TOKEN)
    table = op.weight("table", None, None)
    op.number("scale", -1e6, 1e6)
    op.result("x", table.shape[1], TOKENS)


def _rms_norm(op: Operands) -> None:
    width, heads = op.activation("x"), op.whole("heads", 1)
    if width % heads:
        raise fail(op.at("attribute heads"), heads, f"a divisor of the width {width}")
    if "weight" in op.inputs:
        op.weight("weight", width // heads)
    op.number("eps", 0.0, 1.0)
    op.result("y", width, op.kind("x"))


def _matmul(op: Operands) -> None:
    width = op.activation("x")
    weight = op.weight("weight", None, width)
    if "bias" in op.inputs:
        op.weight("bias", weight.shape[0])
    op.result("y", weight.shape[0], op.kind("x"))


def _matmul_heads(op: Operands) -> None:
    heads, out, width = op.weight("weight", None, None, None).shape
    op.activation("x", heads * width)
    op.result("y", heads * out, op.kind("x"))


def _rope(op: Operands) -> None:
    heads, dim = op.whole("heads", 1), op.whole("dim", 2)
    rope_dim = op.whole("rope_dim", 2, dim)
    if rope_dim % 2:
        raise fail(op.at("attribute rope_dim"), rope_dim, "an even number")
    op.whole("offset", 0, dim - rope_dim)
    op.whole("style", 0, 1)
    op.number("base", 1.0001, 1e12)
    op.number("freq_scale", 1e-9, 1e9)
    op.number("attn_factor", 1e-6, 1e6)
    if op.number("ext_factor", 0.0, 1.0) > 0:
        op.number("freq_scale", 1e-9, 1.0)
        op.number("beta_fast", 1e-3, 1e12)
        op.number("beta_slow", 1e-3, 1e12)
        op.whole("original_context", 1)
    width = op.activation("x", heads * dim, TOKENS)
    op.index("positions", pb.POSITIONS)
    op.whole("truncate", 0, 1)
    op.whole("inverse", 0, 1)
    op.whole("shift", -1024, 1024)
    for role in ("factors", "long_factors"):
        if role in op.inputs:
            op.weight(role, rope_dim // 2)
    if "long_factors" in op.inputs:
        op.whole("original_context", 1)
    op.result("y", width, TOKENS)


def _kv_store(op: Operands) -> None:
    kv_heads, dim, value_dim = (op.whole(name, 1) for name in ("kv_heads", "dim", "value_dim"))
    op.activation("k", kv_heads * dim, TOKENS)
    op.activation("v", kv_heads * value_dim, TOKENS)
    check_paging(op)
    op.plane(op.outputs["kcache"], "kcache", kv_heads, dim)
    op.plane(op.outputs["vcache"], "vcache", kv_heads, value_dim)
    if op.outputs["kcache"].name == op.outputs["vcache"].name:
        raise fail(op.where, "one plane for keys and values", "two planes")
    _stored(op, "kcache", "vcache")


def _stored(op: Operands, *roles: str) -> None:
    for role in roles:
        plane = op.outputs[role].name
        if plane in op.row_kinds:
            raise fail(op.at(role), f"a second store into {plane!r}", "one store per plane")
        op.row_kinds[plane] = TOKENS


def _latent_store(op: Operands) -> None:
    dim = op.whole("dim", 1)
    op.activation("x", dim, TOKENS)
    check_paging(op)
    op.plane(op.outputs["plane"], "plane", 1, dim)
    _stored(op, "plane")


def _attend_paged(op: Operands) -> None:
    heads, kv_heads = op.whole("heads", 1), op.whole("kv_heads", 1)
    dim, value_dim = op.whole("dim", 1), op.whole("value_dim", 1)
    if heads % kv_heads:
        raise fail(op.at("attribute heads"), heads, f"a multiple of the {kv_heads} kv heads")
    op.plane(op.inputs["kcache"], "kcache", kv_heads, dim)
    op.plane(op.inputs["vcache"], "vcache", kv_heads, value_dim)
    _attend(op, heads, dim, value_dim, "kcache", "vcache")


def _attend_latent(op: Operands) -> None:
    heads, dim = op.whole("heads", 1), op.whole("dim", 1)
    op.plane(op.inputs["plane"], "plane", 1, dim)
    _attend(op, heads, dim, op.whole("value_dim", 1, dim), "plane")


def _attend(op: Operands, heads: int, dim: int, value_dim: int, *roles: str) -> None:
    op.number("scale", 1e-9, 1e9)
    op.activation("q", heads * dim, TOKENS)
    for role in roles:
        if op.inputs[role].name not in op.row_kinds:
            raise fail(op.at(role), "a plane not stored yet in this step", "a store before it")
    check_paging(op)
    op.whole("window", 0)
    op.number("soft_cap", 0.0, 1e6)
    if "sinks" in op.inputs:
        op.weight("sinks", heads)
    op.result("y", heads * value_dim, TOKENS)


def _add(op: Operands) -> None:
    width = op.activation("a")
    op.activation("b", width, op.kind("a"))
    op.result("y", width, op.kind("a"))


def _glu(op: Operands) -> None:
    op.whole("act", 0, max(GatedUnit))
    op.number("limit", 0.0, 1e6)
    op.number("alpha", 1e-3, 1e3)
    width = op.activation("gate")
    op.activation("up", width, op.kind("gate"))
    op.result("y", width, op.kind("gate"))


def _soft_cap(op: Operands) -> None:
    op.number("cap", 1e-3, 1e6)
    op.result("y", op.activation("x"), op.kind("x"))


def _gate_row(op: Operands) -> None:
    width = op.activation("x")
    op.activation("gate", 1, op.kind("x"))
    op.result("y", width, op.kind("x"))


def _scale_parts(op: Operands) -> None:
    width, routed = op.activation("x"), "routes" in op.inputs
    used = op.activation("routes", None, op.kind("x")) // 2 if routed else 1
    if not used or width % used:
        raise fail(op.at("x"), f"width {width}", f"a multiple of the {used} experts per token")
    op.weight("scales", None if routed else 1)
    if "bias" in op.inputs:
        if routed:
            raise fail(op.at("bias"), "a bias of experts", "none beside routes")
        op.weight("bias", width)
    op.result("y", width, op.kind("x"))


def _slice_heads(op: Operands) -> None:
    heads, dim, width = (op.whole(name, 1) for name in ("heads", "dim", "width"))
    first = op.whole("first", 0)
    if first + width > dim:
        raise fail(op.at("attributes first, width"), f"{first} + {width}", f"at most {dim}")
    op.activation("x", heads * dim)
    op.result("y", heads * width, op.kind("x"))


def _join_heads(op: Operands) -> None:
    heads, left, right = op.whole("heads", 1), op.activation("a"), op.activation("b")
    if left % heads:
        raise fail(op.at("a"), f"width {left}", f"a multiple of the {heads} heads")
    op.activation("b", None, op.kind("a"))
    if "y" in op.outputs and op.outputs["y"].shape[-1] == left + heads * right:
        op.result("y", left + heads * right, op.kind("a"))  # one head of b serves all
        return
    if right % heads:
        raise fail(op.at("b"), f"width {right}", f"a multiple of the {heads} heads, or one head")
    op.result("y", left + right, op.kind("a"))


def _route_experts(op: Operands) -> None:
    experts = op.activation("logits")
    groups, score = op.whole("groups", 1), op.whole("score", 0, max(RouteScore))
    if experts % groups:
        raise fail(op.at("attribute groups"), groups, f"a divisor of the {experts} experts")
    used = op.whole("groups_used", 1, groups)
    op.whole("group_top", 1, experts // groups)
    op.whole("normalize", 0, 1)
    op.number("scale", 1e-6, 1e6)
    if "bias" in op.inputs:
        if score == RouteScore.LOGITS:
            raise fail(op.at("bias"), "a bias of raw logits", "none with score 3")
        op.weight("bias", experts)
    routes = op.outputs["routes"]
    width = routes.shape[-1] if len(routes.shape) == 2 else 0
    most = experts // groups * used
    if width % 2 or not 1 <= width // 2 <= most:
        raise fail(op.at("routes"), describe(routes), f"twice 1 to {most} experts wide")
    if "tokens" in op.inputs or "table" in op.inputs:
        _check_table(op, width // 2)
    op.result("routes", width, op.kind("logits"))


def _check_table(op: Operands, used: int) -> None:
    """Experts by token: both inputs, no choice by score beside it."""
    if not {"tokens", "table"} <= op.inputs.keys() or op.kind("logits") != TOKENS:
        raise fail(op.at("tokens, table"), "one of them, or wanted rows", "both, for all tokens")
    op.index("tokens", pb.PROMPT_TOKENS, pb.PENDING_TOKEN)
    if op.weight("table", None, used).ggml_type != GgmlType.I32:
        raise fail(op.at("table"), describe(op.inputs["table"]), "ggml type I32")
    if "bias" in op.inputs or op.attributes["groups"] != 1:
        raise fail(op.at("table"), "a bias or groups beside it", "neither")


def _matmul_experts(op: Operands) -> None:
    routes = op.activation("routes", None, op.kind("x"))
    weight = op.weight("weight", None, None, None)
    experts, out, width = weight.shape
    if op.inputs["x"].shape[-1] != width:
        op.activation("x", routes // 2 * width)
    if "bias" in op.inputs and op.weight("bias", experts, out).ggml_type != 0:
        raise fail(op.at("bias"), describe(op.inputs["bias"]), "ggml type F32")
    op.result("y", routes // 2 * out, op.kind("x"))


def _combine_experts(op: Operands) -> None:
    width = op.activation("x")
    used = op.activation("routes", None, op.kind("x")) // 2
    if width % used:
        raise fail(op.at("x"), f"width {width}", f"a multiple of the {used} experts per token")
    op.result("y", width // used, op.kind("x"))


def _gather_rows(op: Operands) -> None:
    width = op.activation("x", None, TOKENS)
    op.index("rows", pb.OUTPUT_ROWS)
    op.result("y", width, WANTED)


RULES: dict[str, Callable[[Operands], None]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "matmul": _matmul,
    "matmul_heads": _matmul_heads,
    "rope": _rope,
    "kv_store": _kv_store,
    "attend_paged": _attend_paged,
    "latent_store": _latent_store,
    "attend_latent": _attend_latent,
    "add": _add,
    "glu": _glu,
    "soft_cap": _soft_cap,
    "gate_row": _gate_row,
    "scale_parts": _scale_parts,
    "slice_heads": _slice_heads,
    "join_heads": _join_heads,
    "route_experts": _route_experts,
    "matmul_experts": _matmul_experts,
    "combine_experts": _combine_experts,
    "gather_rows": _gather_rows,
    **ROW_RULES,
}
