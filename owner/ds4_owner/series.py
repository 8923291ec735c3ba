"""Experts that a file keeps one by one: `blk.N.ffn_gate.E.weight` of old files.

Owns: their names, and when the experts of a layer follow each other so that they are one tensor.
Such files hold gate, down and up of one expert side by side, so the planner copies each series into
a group of its own (`plan.py`), and recipes see `blk.N.ffn_gate_exps.weight` (`joined`). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ds4_common.allocation import TensorPlace
from ds4_common.errors import UnsupportedModel

_EXPERT = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|down|up)\.(\d{1,6})\.weight")


def series_of(name: str) -> tuple[str, int] | None:
    """The tensor that an expert is a part of, and its number there; None for other tensors."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    layer, part, expert = match.groups()
    return f"blk.{layer}.ffn_{part}_exps.weight", int(expert)


def all_series(names: Iterable[str]) -> dict[str, list[str]]:
    """The experts of each series, in order of their numbers."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        series = series_of(name)
        if series is not None:
            found.setdefault(series[0], []).append((series[1], name))
    return {whole: [name for _, name in sorted(experts)] for whole, experts in found.items()}


def joined(places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """The places with each series as one tensor. Raises UnsupportedModel for one that cannot be:
    experts are missing, differ, or do not follow each other in memory."""
    result = dict(places)
    for whole, names in all_series(places).items():
        experts = [result.pop(name) for name in names]
        numbers = [series_of(name) for name in names]
        if whole in result or [n for _, n in filter(None, numbers)] != list(range(len(names))):
            raise UnsupportedModel(
                f"{whole}: got the experts {', '.join(names[:8])}, expected one tensor or all "
                "experts from 0 on"
            )
        first = experts[0]
        for number, (name, place) in enumerate(zip(names, experts, strict=True)):
            expected = (
                first.ggml_type, first.dims, first.layout, first.allocation,
                first.offset + number * first.n_bytes, first.n_bytes,
            )  # fmt: skip
            got = (
                place.ggml_type, place.dims, place.layout, place.allocation, place.offset,
                place.n_bytes,
            )  # fmt: skip
            if got != expected:
                raise UnsupportedModel(
                    f"{name}: got (type, dims, layout, allocation, offset, bytes) {got}, expected "
                    f"{expected}, right behind the expert before; serve this old file without "
                    "--cpu-layout raw, or convert it again into one tensor of all experts"
                )
        result[whole] = TensorPlace(
            first.model, whole, first.ggml_type, (*first.dims, len(names)), first.layout,
            first.allocation, first.offset, first.n_bytes * len(names),
        )  # fmt: skip
    return result
