"""The operands of one op, looked up by role, and the questions its rule may ask about them.

Owns: what a fitting activation, weight, index and cache plane is. `op_rules.py` holds the rule of
each op. Activations carry a row kind - "tokens" of the step, or the "wanted" ones that
`gather_rows` picks - and an op never mixes the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.strict import fail

MAX_EXTENT = 1 << 24
_FLOAT_TYPES = {0: "F32", 1: "F16", 30: "BF16"}
TOKENS, WANTED = "tokens", "wanted"


@dataclass(frozen=True, slots=True)
class Operands:
    """An op with its buffers looked up by role; absent optional inputs are not in `inputs`."""

    where: str
    inputs: Mapping[str, pb.Buffer]
    outputs: Mapping[str, pb.Buffer]
    attributes: Mapping[str, float]
    sources: Mapping[str, Set[int]]  # transport buffer -> what the host feeds into it
    row_kinds: dict[str, str]  # scratch buffer or plane -> kind of the rows it holds now

    def at(self, role: str) -> str:
        return f"{self.where}, {role}"

    def whole(self, name: str, low: int, high: int = MAX_EXTENT) -> int:
        """An attribute that must be an integer within [low, high]."""
        value = self.attributes[name]
        if not math.isfinite(value) or value != int(value) or not low <= value <= high:
            raise fail(self.at(f"attribute {name}"), value, f"an integer from {low} to {high}")
        return int(value)

    def number(self, name: str, low: float, high: float) -> float:
        """An attribute that must be a finite number within [low, high]."""
        value = self.attributes[name]
        if not math.isfinite(value) or not low <= value <= high:
            raise fail(self.at(f"attribute {name}"), value, f"a number from {low:g} to {high:g}")
        return value

    def activation(self, role: str, width: int | None = None, kind: str | None = None) -> int:
        """Input `role` must be float rows that were written before; returns their width."""
        buffer = self.inputs[role]
        _check_rows(self.at(role), buffer, width)
        held = self.row_kinds.get(buffer.name)
        if held is None:
            raise fail(self.at(role), f"{buffer.name!r}, not written yet", "a written buffer")
        if kind is not None and held != kind:
            raise fail(self.at(role), f"{held} rows", f"{kind} rows")
        return buffer.shape[1]

    def kind(self, role: str) -> str:
        return self.row_kinds[self.inputs[role].name]

    def result(self, role: str, width: int, kind: str) -> None:
        """Output `role` must be float rows of that width; they now hold `kind` rows."""
        buffer = self.outputs[role]
        _check_rows(self.at(role), buffer, width)
        self.row_kinds[buffer.name] = kind

    def weight(self, role: str, *shape: int | None) -> pb.Buffer:
        """Input `role` must be a weight of that shape, None leaving an extent open. A vector must
        be of a float type."""
        buffer = self.inputs[role]
        fits = len(buffer.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, buffer.shape, strict=True)
        )
        if buffer.space != pb.WEIGHT or not fits:
            wanted = ["any" if extent is None else extent for extent in shape]
            raise fail(self.at(role), describe(buffer), f"WEIGHT {wanted}")
        if len(shape) == 1 and buffer.ggml_type not in _FLOAT_TYPES:
            names = ", ".join(_FLOAT_TYPES.values())
            raise fail(self.at(role), f"ggml type {buffer.ggml_type}", f"a vector of {names}")
        return buffer

    def index(self, role: str, *sources: int, rank: int = 1) -> None:
        """Input `role` must be int32 with a leading open extent, fed from those sources."""
        buffer = self.inputs[role]
        if (
            buffer.space != pb.TRANSPORT
            or buffer.dtype != pb.I32
            or len(buffer.shape) != rank
            or buffer.shape[0] != 0
        ):
            wanted = "[0]" if rank == 1 else "[0, pages of a sequence]"
            raise fail(self.at(role), describe(buffer), f"TRANSPORT I32 {wanted}")
        fed = self.sources.get(buffer.name, frozenset())
        if not fed or not fed <= set(sources):
            names = [[pb.Source.Name(n) for n in sorted(held)] for held in (fed, sources)]
            raise fail(self.at(role), f"{buffer.name!r} fed by {names[0]}", f"by {names[1]}")

    def plane(self, buffer: pb.Buffer, role: str, heads: int, dim: int) -> None:
        """A cache plane must be [pages, page tokens, heads, dim]."""
        if buffer.space != pb.CACHE or list(buffer.shape[2:]) != [heads, dim]:
            raise fail(self.at(role), describe(buffer), f"CACHE [0, page tokens, {heads}, {dim}]")


def describe(buffer: pb.Buffer) -> str:
    """A buffer in an error message."""
    space, dtype = pb.Space.Name(buffer.space), pb.DType.Name(buffer.dtype)
    return f"{buffer.name!r} ({space} {dtype} {list(buffer.shape)})"


def _check_rows(where: str, buffer: pb.Buffer, width: int | None) -> None:
    fits = (
        buffer.dtype == pb.F32
        and buffer.space in (pb.SCRATCH, pb.TRANSPORT)
        and len(buffer.shape) == 2
        and buffer.shape[0] == 0
        and width in (None, buffer.shape[1])
    )
    if not fits:
        wanted = "width" if width is None else width
        raise fail(where, describe(buffer), f"SCRATCH F32 [0, {wanted}]")
