"""The rules of residual streams that exchange and of attention over compressed rows.

Owns: which buffers fit the ops of the second half of `ops.py`. Same promise as `op_rules`, which
looks them up: what passes here is in bounds for any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.operands import MAX_EXTENT, TOKENS, Operands, describe
from ds4_common.contract.ops import SmallFloat
from ds4_common.contract.strict import fail

MAX_STREAMS = 16
MAX_ROW = 4096  # dims of a row, rows chosen per token


def check_paging(op: Operands) -> None:
    """The three inputs that say where a token's sequence lies."""
    op.index("positions", pb.POSITIONS)
    op.index("banks", pb.SLOT)
    op.index("page_table", pb.PAGE_TABLE, rank=2)


def _hyper_weights(op: Operands) -> None:
    streams = op.whole("streams", 1, MAX_STREAMS)
    width = op.activation("mix")
    if width not in (streams, streams * (2 + streams)):
        wanted = f"{streams} or {streams * (2 + streams)} values for {streams} streams"
        raise fail(op.at("mix"), f"width {width}", wanted)
    op.weight("scale", 1 if width == streams else 3)
    op.weight("base", width)
    op.number("eps", 0.0, 1.0)
    op.whole("iterations", 1, 1000)
    op.result("w", width, op.kind("mix"))


def _streams(op: Operands) -> int:
    """How many streams the weights are for, all of them or those to read by."""
    width = op.activation("w", None, op.kind("s"))
    return next((n for n in range(1, MAX_STREAMS + 1) if n * (2 + n) == width), width)


def _hyper_read(op: Operands) -> None:
    width, streams = op.activation("s"), _streams(op)
    if streams > MAX_STREAMS or width % streams:
        raise fail(op.at("s"), f"width {width}", f"a multiple of the {streams} streams of w")
    op.result("x", width // streams, op.kind("s"))


def _hyper_write(op: Operands) -> None:
    width, streams = op.activation("s"), _streams(op)
    if op.activation("w") != streams * (2 + streams) or width % streams:
        raise fail(op.at("w"), describe(op.inputs["w"]), "weights of streams that divide s")
    op.activation("y", width // streams, op.kind("s"))
    op.result("s", width, op.kind("s"))


def _hadamard(op: Operands) -> None:
    width, heads = op.activation("x"), op.whole("heads", 1)
    dim = width // heads
    if width % heads or dim & (dim - 1) or dim > MAX_ROW:
        raise fail(op.at("x"), f"{width} for {heads} heads", f"a power of two up to {MAX_ROW} each")
    op.result("y", width, op.kind("x"))


def _round_floats(op: Operands) -> None:
    width, heads = op.activation("x"), op.whole("heads", 1)
    op.whole("format", 0, max(SmallFloat))
    block = op.whole("block", 1, MAX_EXTENT)
    if width % heads:
        raise fail(op.at("attribute heads"), heads, f"a divisor of the width {width}")
    if op.whole("dims", 1, width // heads) % block:
        raise fail(op.at("attribute dims"), op.attributes["dims"], f"whole blocks of {block}")
    op.result("y", width, op.kind("x"))


def _compress(op: Operands) -> None:
    width = op.activation("k", None, TOKENS)
    op.activation("gate", width, TOKENS)
    check_paging(op)
    op.weight("bias", op.whole("ratio", 1, 1024), width)
    state = op.outputs["state"]
    dim = state.shape[-1]
    copies = width // dim
    fits = list(state.shape[1:]) == [1, 3 * copies, dim] and width == copies * dim
    if state.space != pb.CACHE or state.dtype != pb.F32 or not fits or copies not in (1, 2):
        wanted = f"CACHE F32 [0, 1, 3, {width}] or [0, 1, 6, {width // 2}]"
        raise fail(op.at("state"), describe(state), wanted)
    if dim > MAX_ROW:
        raise fail(op.at("state"), describe(state), f"rows of at most {MAX_ROW}")
    _first_store(op, "state")
    op.result("y", dim, TOKENS)


def _first_store(op: Operands, role: str) -> None:
    plane = op.outputs[role].name
    if plane in op.row_kinds:
        raise fail(op.at(role), f"a second store into {plane!r}", "one store per plane")
    op.row_kinds[plane] = TOKENS


def _store_rows(op: Operands) -> None:
    dim = op.activation("x", None, TOKENS)
    check_paging(op)
    op.whole("ratio", 1, 1024)
    tiles = op.whole("tiles", 0, 1)
    _rows(op, op.outputs["plane"], "plane", dim)
    if tiles and op.outputs["plane"].shape[1] % 8:
        wanted = "a multiple of 8 rows per page for tiles"
        raise fail(op.at("plane"), describe(op.outputs["plane"]), wanted)
    _first_store(op, "plane")


def _rows(op: Operands, buffer: pb.Buffer, role: str, dim: int) -> None:
    op.plane(buffer, role, 1, dim)
    if buffer.dtype != pb.F16 or dim > MAX_ROW:
        raise fail(op.at(role), describe(buffer), f"F16 rows of at most {MAX_ROW}")


def _stored(op: Operands, role: str, dim: int) -> None:
    _rows(op, op.inputs[role], role, dim)
    if op.inputs[role].name not in op.row_kinds:
        raise fail(op.at(role), "a plane not stored yet in this step", "store_rows before it")


def _index_rows(op: Operands) -> None:
    heads = op.whole("heads", 1)
    width = op.activation("q", None, TOKENS)
    op.activation("w", heads, TOKENS)
    if width % heads:
        raise fail(op.at("attribute heads"), heads, f"a divisor of the width {width}")
    check_paging(op)
    _stored(op, "plane", width // heads)
    op.whole("ratio", 1, 1024)
    op.number("scale", 1e-9, 1e9)
    rows = op.outputs["rows"]
    chosen = rows.shape[-1] if len(rows.shape) == 2 else 0
    if not 1 <= chosen <= MAX_ROW:
        raise fail(op.at("rows"), describe(rows), f"1 to {MAX_ROW} wide")
    op.result("rows", chosen, TOKENS)


def _attend_rows(op: Operands) -> None:
    heads = op.whole("heads", 1)
    width = op.activation("q", None, TOKENS)
    if width % heads or width // heads % 8:
        raise fail(op.at("q"), f"width {width}", f"{heads} heads of a multiple of 8")
    check_paging(op)
    _stored(op, "recent", width // heads)
    op.whole("window", 1)
    op.whole("ratio", 1, 1024)
    op.number("scale", 1e-9, 1e9)
    if "compressed" in op.inputs:
        _stored(op, "compressed", width // heads)
    if "chosen" in op.inputs:
        if "compressed" not in op.inputs:
            raise fail(op.at("chosen"), "a choice of no rows", "it with compressed rows only")
        op.activation("chosen", None, TOKENS)
    if "sinks" in op.inputs:
        op.weight("sinks", heads)
    op.result("y", width, TOKENS)


ROW_RULES: dict[str, Callable[[Operands], None]] = {
    "hyper_weights": _hyper_weights,
    "hyper_read": _hyper_read,
    "hyper_write": _hyper_write,
    "hadamard": _hadamard,
    "round_floats": _round_floats,
    "compress": _compress,
    "store_rows": _store_rows,
    "index_rows": _index_rows,
    "attend_rows": _attend_rows,
}
