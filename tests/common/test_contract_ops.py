"""Every op rule refuses operands and attributes that do not fit, and names them."""

from __future__ import annotations

import math
import re
from enum import IntEnum
from pathlib import Path

import pytest

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.op_rules import RULES
from ds4_common.contract.ops import OPS, GatedUnit, RouteScore
from ds4_common.native import build
from helpers.bundles import Refusal, buffer, check_refusal, op, ops, put_input


def add(left: str, right: str) -> pb.Op:
    message = pb.Op(kernel="add", out=[left])
    getattr(message, "in").extend((left, right))
    return message


REFUSALS: list[Refusal] = [
    ("kernel", lambda b: setattr(ops(b)[0], "kernel", "magic"), "op 0: got kernel 'magic'"),
    (
        "inputs",
        lambda b: getattr(op(b, "glu"), "in").append("x"),
        "(glu), inputs: got 3, expected 2: gate, up",
    ),
    ("outputs", lambda b: op(b, "glu").ClearField("out"), "(glu), outputs: got 0, expected 1: y"),
    (
        "unknown attribute",
        lambda b: op(b, "glu").attr.__setitem__("depth", 1.0),
        "attributes ['depth'], expected only ['act', 'alpha', 'limit']",
    ),
    (
        "missing attribute",
        lambda b: op(b, "glu").attr.__delitem__("act"),
        "(glu), attribute act: got nothing",
    ),
    ("dangling input", lambda b: put_input(op(b, "glu"), 0, "nothing"), "gate: got 'nothing'"),
    ("absent required input", lambda b: put_input(op(b, "glu"), 0, ""), "gate: got ''"),
    (
        "matmul in place",
        lambda b: op(b, "matmul").out.__setitem__(0, "normed"),
        "x: got 'normed', also the output, expected another buffer",
    ),
    ("act", lambda b: op(b, "glu").attr.__setitem__("act", 0.5), "attribute act: got 0.5"),
    ("NaN eps", lambda b: op(b, "rms_norm").attr.__setitem__("eps", math.nan), "got nan"),
    (
        "read before write",
        lambda b: put_input(op(b, "rms_norm"), 0, "branch"),
        "got 'branch', not written yet",
    ),
    (
        "rows that are none",
        lambda b: put_input(op(b, "rms_norm"), 0, "positions"),
        "expected SCRATCH F32 [0, width]",
    ),
    (
        "mixed rows",
        lambda b: ops(b).insert(-1, add("wanted", "x")),
        "b: got tokens rows, expected wanted rows",
    ),
    (
        "wrong output width",
        lambda b: op(b, "rms_norm").out.__setitem__(0, "gate"),
        "expected SCRATCH F32 [0, 64]",
    ),
    (
        "matmul extents",
        lambda b: put_input(op(b, "matmul"), 1, "blk.0.ffn_down.weight"),
        "weight: got 'blk.0.ffn_down.weight' (WEIGHT GGML_BLOCKS [64, 128])",
    ),
    (
        "bias extent",
        lambda b: put_input(op(b, "matmul"), 2, "blk.0.attn_k.bias"),
        "bias: got 'blk.0.attn_k.bias'",
    ),
    (
        "weight that is none",
        lambda b: put_input(op(b, "rms_norm"), 1, "x"),
        "weight: got 'x' (SCRATCH F32 [0, 64]), expected WEIGHT [64]",
    ),
    (
        "vector of blocks",
        lambda b: buffer(b, "output_norm.weight").MergeFrom(pb.Buffer(ggml_type=8, bytes=68)),
        "expected a vector of F32, F16, BF16",
    ),
    (
        "tokens that are none",
        lambda b: put_input(op(b, "embed"), 0, "page_table"),
        "tokens: got 'page_table'",
    ),
    ("scale", lambda b: op(b, "embed").attr.__setitem__("scale", math.inf), "attribute scale"),
    ("rope heads", lambda b: op(b, "rope").attr.__setitem__("heads", 5), "expected SCRATCH F32"),
    ("no heads", lambda b: op(b, "rope").attr.__setitem__("heads", 0), "attribute heads: got 0"),
    ("rope dim", lambda b: op(b, "rope").attr.__setitem__("rope_dim", 18), "rope_dim: got 18"),
    ("odd rope", lambda b: op(b, "rope").attr.__setitem__("rope_dim", 7), "an even number"),
    ("style", lambda b: op(b, "rope").attr.__setitem__("style", 2), "attribute style: got 2"),
    ("base", lambda b: op(b, "rope").attr.__setitem__("base", 1.0), "attribute base"),
    (
        "YaRN without context",
        lambda b: op(b, "rope").attr.__setitem__("ext_factor", 1.0),
        "attribute original_context: got 0",
    ),
    (
        "factors",
        lambda b: put_input(op(b, "rope"), 2, "output_norm.weight"),
        "factors: got 'output_norm.weight'",
    ),
    (
        "plane dims",
        lambda b: op(b, "kv_store").attr.__setitem__("kv_heads", 1),
        "expected SCRATCH F32 [0, 16]",
    ),
    (
        "cache geometry",
        lambda b: buffer(b, "cache.0.k").shape.__setitem__(3, 8),
        "kcache: got 'cache.0.k' (CACHE F16 [0, 64, 2, 8])",
    ),
    (
        "one plane for both",
        lambda b: op(b, "kv_store").out.__setitem__(1, "cache.0.k"),
        "got one plane for keys and values",
    ),
    (
        "head groups",
        lambda b: op(b, "attend_paged").attr.__setitem__("heads", 3),
        "heads: got 3, expected a multiple of the 2 kv heads",
    ),
    (
        "attention scale",
        lambda b: op(b, "attend_paged").attr.__setitem__("scale", -1.0),
        "attribute scale: got -1",
    ),
    (
        "attention before its store",
        lambda b: ops(b).remove(op(b, "kv_store")),
        "got a plane not stored yet in this step",
    ),
    (
        "page table operand",
        lambda b: put_input(op(b, "attend_paged"), 5, "banks"),
        "page_table: got 'banks'",
    ),
    (
        "positions that are banks",
        lambda b: put_input(op(b, "rope"), 1, "banks"),
        "positions: got 'banks' fed by ['SLOT'], expected by ['POSITIONS']",
    ),
    (
        "two stores into one plane",
        lambda b: ops(b).insert(list(ops(b)).index(op(b, "kv_store")), op(b, "kv_store")),
        "got a second store into 'cache.0.k', expected one store per plane",
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal[0])
def test_an_op_that_does_not_fit_is_refused(refusal: Refusal) -> None:
    check_refusal(refusal)


def test_every_op_of_the_registry_has_a_rule() -> None:
    assert RULES.keys() == OPS.keys()


@pytest.mark.parametrize(
    ("numbers", "header", "prefix"),
    [(GatedUnit, "op_math.h", "DS4_GLU_"), (RouteScore, "image.h", "DS4_SCORE_")],
)
def test_modes_have_the_same_numbers_in_the_kernels(
    numbers: type[IntEnum], header: str, prefix: str
) -> None:
    source = (Path(build.__file__).parent / header).read_text()
    found = {name: int(value) for name, value in re.findall(rf"{prefix}(\w+) = (\d+)", source)}
    assert found == {mode.name: mode.value for mode in numbers}
