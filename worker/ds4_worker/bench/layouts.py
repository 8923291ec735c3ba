"""Which CPU layout a type runs fastest in: measured, and kept in the source as tables.

Owns: `ds4-bench layouts --out common/ds4_common/quants/measured.py`, the tables that `cpu_layout`
reads: rate in another layout / rate of raw blocks, the geometric mean over one, eight and 256
columns, in CPU time, for every instruction set that this CPU runs. Sets that it does not run keep
their figures; so do the types that `--only` leaves out.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ds4_common.allocation import Layout
from ds4_common.errors import Ds4Error
from ds4_common.quants import ALIGNED_LAYOUTS, QuantType
from ds4_common.quants.measured import ALIGNED_TO_RAW, PACKED_TO_RAW, PLANES_TO_RAW
from ds4_common.quants.native import Isa, library
from ds4_worker.bench import kernels
from ds4_worker.bench.report import Row, summarise

COLUMNS = (1, 8, 256)
_NAMES = {Layout.X8: "packed", Layout.IQ2_PLANES: "planes"}
Table = dict[str, dict[str, float]]  # instruction set -> type -> ratio
HEAD = '''"""How much faster than raw blocks a type runs in other layouts, by instruction set:
packed (X8), the published aligned artifacts, and planes.

Written by `ds4-bench layouts --out` this file; not by hand. Read by `ds4_common.quants`.
"""
'''
TABLES: dict[str, Table] = {
    "PACKED_TO_RAW": PACKED_TO_RAW,
    "ALIGNED_TO_RAW": ALIGNED_TO_RAW,
    "PLANES_TO_RAW": PLANES_TO_RAW,
}


def _layout(table: str, quant: QuantType) -> Layout:
    """The layout of a type that a table is about; RAW where it has none."""
    if table == "ALIGNED_TO_RAW":
        return ALIGNED_LAYOUTS.get(quant, Layout.RAW)
    return Layout.X8 if table == "PACKED_TO_RAW" else Layout.IQ2_PLANES


def _rows(quant: QuantType, layout: Layout, isa: Isa, rounds: int) -> list[Row]:
    """Arithmetic per CPU second, the layout beside raw, for each number of columns."""
    rows = []
    for columns in COLUMNS:
        raw, other = (
            2e-9 * columns * kernels.cpu_rate(quant, each, columns, isa, rounds)
            for each in (Layout.RAW, layout)
        )
        name = f"{isa.name} {quant.name} {_NAMES.get(layout, 'aligned')}, {columns} columns"
        rows.append(summarise(name, "GOP/CPU-s", [other], reference=raw, reference_name="raw"))
    return rows


def _mean(rows: list[Row]) -> float:
    return math.exp(sum(math.log(row.ratio or 1.0) for row in rows) / len(rows))


def _types(only: str | None) -> list[QuantType]:
    names = only.split(",") if only else QuantType.__members__
    for name in names:
        if name not in QuantType.__members__:
            expected = ", ".join(QuantType.__members__)
            raise Ds4Error(f"--only: got {name!r}, expected names of {expected}")
    return [QuantType[name] for name in names]


def _text(name: str, table: Table) -> str:
    return f"\n{name}: dict[str, dict[str, float]] = {{\n" + "".join(
        f'    "{isa}": {{\n'
        + "".join(f'        "{quant}": {ratio:.2f},\n' for quant, ratio in ratios.items())
        + "    },\n"
        for isa, ratios in sorted(table.items())
    ) + "}\n"  # fmt: skip


def run(options: argparse.Namespace) -> list[Row]:
    """A row per type, layout, instruction set and columns; with --out, the tables."""
    tables, rows = {name: dict(table) for name, table in TABLES.items()}, list[Row]()
    types = _types(options.only)
    for isa in Isa:
        if isa == Isa.SCALAR or not library().ds4_isa_runs(isa):
            continue
        for name, table in tables.items():
            ratios = dict(table.get(isa.name, {})) if options.only else {}
            for quant in types:
                layout = _layout(name, quant)
                if layout and library().ds4_matmul_kernel(quant, layout, isa):
                    found = _rows(quant, layout, isa, options.runs)
                    ratios[quant.name] = _mean(found)
                    rows += found
            order = [quant.name for quant in QuantType if quant.name in ratios]
            table[isa.name] = {quant: ratios[quant] for quant in order}
    if options.out:
        text = HEAD + "".join(_text(name, table) for name, table in tables.items())
        Path(options.out).write_text(text)
    return rows
