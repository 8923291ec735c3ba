"""The table of layouts is what was measured, and what was not measured here stays in it."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import pytest

from ds4_common.allocation import Layout
from ds4_common.quants import QuantType
from ds4_common.quants.measured import PACKED_TO_RAW
from ds4_common.quants.native import Isa, library
from ds4_worker.bench import kernels, layouts


def test_the_written_table_holds_the_mean_ratios_of_every_set_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(quant: QuantType, layout: Layout, columns: int, isa: Isa, rounds: int) -> float:
        return 1e9 * (columns if layout is Layout.X8 else 1)

    monkeypatch.setattr(kernels, "cpu_rate", rate)
    monkeypatch.setattr(layouts, "PACKED_TO_RAW", {"NOT_HERE": {"Q4_0": 1.5}})
    out = tmp_path / "measured.py"
    rows = layouts.run(argparse.Namespace(runs=1, out=str(out)))
    table = runpy.run_path(str(out))["PACKED_TO_RAW"]
    running = {isa.name for isa in Isa if isa != Isa.SCALAR and library().ds4_isa_runs(isa)}
    assert set(table) == {"NOT_HERE"} | running
    assert table["NOT_HERE"] == {"Q4_0": 1.5}
    expected = round((1 * 8 * 256) ** (1 / 3), 2)
    assert all(ratio == expected for name in running for ratio in table[name].values())
    assert len(rows) == sum(3 * len(table[name]) for name in running)


def test_the_table_in_the_source_knows_every_type_that_can_be_packed() -> None:
    packed = {t.name for t in QuantType if library().ds4_pack_possible(t, 8, 256)}
    assert {"AVX2", "AVX512", "AMX"} <= set(PACKED_TO_RAW)
    assert all(set(ratios) == packed for ratios in PACKED_TO_RAW.values())
