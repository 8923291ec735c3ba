"""All layouts of two-bit experts are measured in one run, and draw the same tokens."""

from __future__ import annotations

import ctypes

import pytest
from msgspec.structs import replace

from ds4_common.errors import Ds4Error
from ds4_worker.bench import experts
from ds4_worker.bench.synthetic import SHAPES
from helpers.models import smollm2_path

SMALL = replace(
    SHAPES["moe-4b"], width=256, layers=1, heads=4, kv_heads=2, head_dim=64, inner=512,
    experts=(4, 2, 256),
)  # fmt: skip


def test_every_form_has_rows_and_stands_beside_raw_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    rows = experts.run("small", "Q8_0,IQ2_XXS,Q2_K", smollm2_path(), 1, 2, 3)
    found = {row.name: row for row in rows}
    assert len(found) == 2 * len(experts.FORMS)
    assert all(row.runs == 3 for row in rows)
    for name in experts.FORMS:
        reference = found[f"experts {name}: decode"].reference
        assert (reference is None) == (name == "raw")


def test_forms_that_draw_other_tokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    write = experts._write

    def broken(buffer: object, *rest: object) -> None:
        write(buffer, *rest)  # type: ignore[arg-type]
        ctypes.memset(rest[2], 0x3C, 64)  # type: ignore[arg-type]

    monkeypatch.setattr(experts, "_write", broken)
    with pytest.raises(Ds4Error, match="experts aligned: other tokens than from raw blocks"):
        experts.run("small", "Q8_0,IQ2_XXS,Q2_K", smollm2_path(), 1, 8, 3)
