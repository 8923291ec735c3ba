"""The tables of layouts are what was measured, and what was not measured here stays in them."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import pytest

from ds4_common import quants
from ds4_common.allocation import Layout
from ds4_common.errors import Ds4Error
from ds4_common.quants import ALIGNED_LAYOUTS, QuantType, aligned_is_fastest, cpu_layout
from ds4_common.quants.measured import ALIGNED_TO_RAW, PACKED_TO_RAW, PLANES_TO_RAW
from ds4_common.quants.native import Isa, best_isa, library
from ds4_worker.bench import kernels, layouts


def rate(quant: QuantType, layout: Layout, columns: int, isa: Isa, rounds: int) -> float:
    return 1e9 * (1 if layout is Layout.RAW else columns)


MEAN = round((1 * 8 * 256) ** (1 / 3), 2)  # of these rates
RUNNING = {isa.name for isa in Isa if isa != Isa.SCALAR and library().ds4_isa_runs(isa)}


def test_the_written_tables_hold_the_mean_ratios_of_every_set_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "cpu_rate", rate)
    known = {"NOT_HERE": {"Q4_0": 1.5}}
    monkeypatch.setattr(layouts, "TABLES", dict.fromkeys(layouts.TABLES, known))
    out = tmp_path / "measured.py"
    rows = layouts.run(argparse.Namespace(runs=1, out=str(out), only=None))
    written = runpy.run_path(str(out))
    for name in layouts.TABLES:
        table = written[name]
        assert set(table) == {"NOT_HERE"} | RUNNING
        assert table["NOT_HERE"] == {"Q4_0": 1.5}
        assert all(ratio == MEAN for isa in RUNNING for ratio in table[isa].values())
    each = [ratios for name in layouts.TABLES for ratios in written[name].values()]
    assert len(rows) == 3 * (sum(map(len, each)) - len(layouts.TABLES))


def test_types_that_were_not_asked_for_keep_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "cpu_rate", rate)
    out = tmp_path / "measured.py"
    layouts.run(argparse.Namespace(runs=1, out=str(out), only="Q2_K"))
    written = runpy.run_path(str(out))
    for isa in RUNNING:
        assert written["ALIGNED_TO_RAW"][isa]["Q2_K"] == MEAN
        assert written["PACKED_TO_RAW"][isa] == PACKED_TO_RAW.get(isa, {}) | {"Q2_K": MEAN}


def test_a_type_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(Ds4Error, match=r"--only: got 'Q9', expected names of F32, "):
        layouts.run(argparse.Namespace(runs=1, out=None, only="Q2_K,Q9"))


def test_the_tables_in_the_source_know_every_type_that_has_the_layout() -> None:
    packed = {t.name for t in QuantType if library().ds4_pack_possible(t, 8, 256)}
    for name in ("AVX2", "AVXVNNI", "AVX512"):
        assert set(PACKED_TO_RAW[name]) == packed
    assert set(PACKED_TO_RAW["AMX"]) <= packed  # the others go by AVX512
    assert {"AVX2", "AVXVNNI", "AVX512"} <= set(ALIGNED_TO_RAW)
    aligned = {t.name for t in ALIGNED_LAYOUTS}
    assert all(set(ratios) == aligned for ratios in ALIGNED_TO_RAW.values())
    assert set(PLANES_TO_RAW) == set(ALIGNED_TO_RAW)
    assert all(set(ratios) == {"IQ2_XXS", "IQ2_XS"} for ratios in PLANES_TO_RAW.values())


@pytest.mark.parametrize("isa", [Isa.NEON, Isa.I8MM])
def test_on_arm_types_are_packed_until_they_measured_slower(
    monkeypatch: pytest.MonkeyPatch, isa: Isa
) -> None:
    monkeypatch.setattr(quants, "best_isa", lambda: isa)
    monkeypatch.setattr(quants, "PACKED_TO_RAW", {"NEON": {"Q4_K": 0.9}})
    monkeypatch.setattr(quants, "PLANES_TO_RAW", {isa.name: {"IQ2_XS": 1.3}})
    assert cpu_layout(QuantType.Q4_K, 8, 256) is Layout.RAW
    assert cpu_layout(QuantType.Q6_K, 8, 256) is Layout.X8
    assert cpu_layout(QuantType.Q6_K, 7, 256) is Layout.RAW
    assert cpu_layout(QuantType.Q8_0, 8, 32) is Layout.X8
    assert cpu_layout(QuantType.IQ2_XXS, 8, 256) is Layout.RAW
    assert cpu_layout(QuantType.IQ2_XS, 8, 256) is Layout.IQ2_PLANES
    assert not any(aligned_is_fastest(t) for t in ALIGNED_LAYOUTS)


def test_scalar_kernels_get_raw_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quants, "best_isa", lambda: Isa.SCALAR)
    assert {cpu_layout(t, 8, 256) for t in QuantType} == {Layout.RAW}


def test_a_type_lies_where_its_kernels_measured_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = best_isa().name
    monkeypatch.setattr(quants, "PACKED_TO_RAW", {isa: {"Q2_K": 1.2}})
    aligned = {isa: {"Q2_K": 1.1, "IQ2_XXS": 1.1, "IQ2_XS": 1.1}}
    monkeypatch.setattr(quants, "ALIGNED_TO_RAW", aligned)
    monkeypatch.setattr(quants, "PLANES_TO_RAW", {isa: {"IQ2_XXS": 1.12, "IQ2_XS": 1.3}})
    # 74 bytes instead of 66: 1.12 times as fast is no gain
    assert {t for t in ALIGNED_LAYOUTS if aligned_is_fastest(t)} == {QuantType.IQ2_XXS}
    assert cpu_layout(QuantType.IQ2_XXS, 7, 256) is Layout.RAW
    assert cpu_layout(QuantType.Q2_K, 8, 256) is Layout.X8
    assert cpu_layout(QuantType.Q2_K, 7, 256) is Layout.RAW
    assert cpu_layout(QuantType.IQ2_XS, 7, 256) is Layout.IQ2_PLANES
    for table in ("PACKED_TO_RAW", "ALIGNED_TO_RAW", "PLANES_TO_RAW"):
        monkeypatch.setattr(quants, table, {isa: {}})
    assert not any(aligned_is_fastest(t) for t in ALIGNED_LAYOUTS)
    assert all(cpu_layout(t, 8, 256) is Layout.RAW for t in ALIGNED_LAYOUTS)
