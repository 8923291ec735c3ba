"""The rules of ops over exchanging streams and compressed rows refuse what does not fit."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.lower import lower_cpu
from ds4_common.contract.op_rules_rows import ROW_RULES
from ds4_common.contract.validate import parse_bundle, validate
from ds4_common.errors import ContractError
from golden import tiny
from golden.deepseek4.cases import CASES
from helpers.bundles import buffer, op, ops, put_input
from helpers.prepared import prepare_file

Change = Callable[[pb.Bundle], object]


@functools.cache
def contract() -> bytes:
    case = next(case for case in CASES if case.name == "short_ratios")
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write_gguf(case, Path(folder) / "m.gguf")
        return prepare_file(path).bundle.SerializeToString()


def attribute(kernel: str, name: str, value: float) -> Change:
    return lambda b: op(b, kernel).attr.__setitem__(name, value)


def operand(kernel: str, index: int, name: str) -> Change:
    return lambda b: put_input(op(b, kernel), index, name)


def extent(name: str, index: int, value: int) -> Change:
    return lambda b: buffer(b, name).shape.__setitem__(index, value)


def listed(index: int, name: str) -> Change:
    """Of the first choice of experts, which is by a table."""
    return operand("route_experts", index, name)


def chosen(b: pb.Bundle) -> Any:
    """The first attention with an index."""
    return next(o for o in ops(b) if o.kernel == "attend_rows" and getattr(o, "in")[6])


STATE = "cache.1.attn_state"
REFUSALS: dict[str, tuple[Change, str]] = {
    "streams": (attribute("hyper_weights", "streams", 5), "5 or 35 values for 5 streams"),
    "too many streams": (attribute("hyper_weights", "streams", 17), "streams: got 17"),
    "scale": (operand("hyper_weights", 1, "output_hc_scale.weight"), "expected WEIGHT [3]"),
    "base": (operand("hyper_weights", 2, "output_hc_base.weight"), "expected WEIGHT [24]"),
    "iterations": (attribute("hyper_weights", "iterations", 0), "iterations: got 0"),
    "mixing": (attribute("hyper_weights", "eps", -1), "eps: got -1"),
    "read": (operand("hyper_read", 1, "streams"), "a multiple of the"),
    "read into": (lambda b: op(b, "hyper_read").out.__setitem__(0, "short_q2"), "short_q2"),
    "write by": (operand("hyper_write", 2, "x"), "weights of streams that divide s"),
    "write": (operand("hyper_write", 0, "mixed"), "expected SCRATCH F32 [0, 32]"),
    "heads of a transform": (attribute("hadamard", "heads", 3), "a power of two up to 4096 each"),
    "format": (attribute("round_floats", "format", 2), "format: got 2"),
    "block": (attribute("round_floats", "block", 5), "whole blocks of 5"),
    "dims": (attribute("round_floats", "dims", 64), "dims: got 64"),
    "heads of a rounding": (attribute("round_floats", "heads", 5), "a divisor of the width 32"),
    "gate": (operand("compress", 1, "x"), "expected SCRATCH F32 [0, 64]"),
    "ratio of a window": (attribute("compress", "ratio", 5), "expected WEIGHT [5, 64]"),
    "state": (extent(STATE, 2, 3), "expected CACHE F32 [0, 1, 3, 64] or [0, 1, 6, 32]"),
    "state of halves": (lambda b: setattr(buffer(b, STATE), "dtype", pb.F16), "CACHE F32"),
    "rows of floats": (
        lambda b: setattr(buffer(b, "cache.0.rows"), "dtype", pb.F32),
        "F16 rows of at most 4096",
    ),
    "row": (operand("store_rows", 0, "q"), "CACHE [0, page tokens, 1, 128]"),
    "queries of an index": (attribute("index_rows", "heads", 15), "expected SCRATCH F32 [0, 15]"),
    "plane of an index": (operand("index_rows", 2, "cache.1.rows"), "cache.1.rows"),
    "plane stored later": (operand("index_rows", 2, "cache.3.indexer_compressed"), "not stored"),
    "scale of an index": (attribute("index_rows", "scale", 0), "scale: got 0"),
    "heads of rows": (attribute("attend_rows", "heads", 32), "heads of a multiple of 8"),
    "window": (attribute("attend_rows", "window", 0), "window: got 0"),
    "sinks of rows": (operand("attend_rows", 7, "output_norm.weight"), "expected WEIGHT [4]"),
    "a choice of nothing": (
        lambda b: put_input(chosen(b), 5, ""),
        "it with compressed rows only",
    ),
    "inverse": (attribute("rope", "inverse", 2), "inverse: got 2"),
    "shift": (attribute("rope", "shift", 1025), "shift: got 1025"),
    "table without tokens": (listed(2, ""), "expected both, for all tokens"),
    "table of floats": (
        lambda b: setattr(buffer(b, "blk.0.ffn_gate_tid2eid.weight"), "ggml_type", 0),
        "expected ggml type I32",
    ),
    "table and a bias": (listed(1, "blk.2.exp_probs_b.bias"), "a bias or groups beside it"),
    "table of others": (listed(3, "output.weight"), "expected WEIGHT ['any', 3]"),
    "records": (
        lambda b: setattr(b.serving.model.cache.histories[1], "tokens_per_record", 48),
        "a divisor of the page of 64 tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_op_that_does_not_fit_is_refused(name: str) -> None:
    change, message = REFUSALS[name]
    bundle = parse_bundle(contract())
    validate(bundle)
    change(bundle)
    with pytest.raises(ContractError) as raised:
        validate(bundle)
    assert message in str(raised.value)


def test_every_rule_of_these_ops_is_tried() -> None:
    kernels = {message.kernel for message in ops(parse_bundle(contract()))}
    assert kernels >= ROW_RULES.keys()


LOWERING: dict[str, tuple[Change, str]] = {
    "rows that fill no page": (attribute("store_rows", "ratio", 2), "64 tokens a page"),
    "rows of another ratio": (
        lambda b: chosen(b).attr.__setitem__("ratio", 8),
        "kind 1, a row for 4 tokens",
    ),
    "an index over rows": (
        lambda b: next(
            o for o in ops(b) if o.kernel == "store_rows" and o.attr.get("tiles")
        ).attr.__setitem__("tiles", 0),
        "kind 1, a row for 4 tokens, expected kind 2",
    ),
}


@pytest.mark.parametrize("name", LOWERING)
def test_what_this_executor_cannot_run_is_refused_by_lowering(name: str) -> None:
    change, message = LOWERING[name]
    bundle = parse_bundle(contract())
    change(bundle)
    with pytest.raises(ContractError) as raised:
        lower_cpu(bundle)
    assert message in str(raised.value)
