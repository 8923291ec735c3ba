"""Which CPU layout a type runs fastest in: measured, and kept in the source as a table.

Owns: `ds4-bench layouts --out common/ds4_common/quants/measured.py`, the table that `cpu_layout`
reads: packed rate / raw rate, the geometric mean over one, eight and 256 columns, in CPU time, for
every instruction set that this CPU runs. Sets that it does not run keep their figures.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ds4_common.allocation import Layout
from ds4_common.quants import QuantType
from ds4_common.quants.measured import PACKED_TO_RAW
from ds4_common.quants.native import Isa, library
from ds4_worker.bench import kernels
from ds4_worker.bench.report import Row, summarise

COLUMNS = (1, 8, 256)
HEAD = '''"""How much faster the packed layout of a type is than the raw one, by instruction set.

Written by `ds4-bench layouts --out` this file; not by hand. Read by `ds4_common.quants.cpu_layout`.
"""

PACKED_TO_RAW: dict[str, dict[str, float]] = {
'''


def _rows(quant: QuantType, isa: Isa, rounds: int) -> list[Row]:
    """Arithmetic per CPU second, packed beside raw, for each number of columns."""
    rows = []
    for columns in COLUMNS:
        raw, packed = (
            2e-9 * columns * kernels.cpu_rate(quant, layout, columns, isa, rounds)
            for layout in (Layout.RAW, Layout.X8)
        )
        name = f"{isa.name} {quant.name} packed, {columns} columns"
        rows.append(summarise(name, "GOP/CPU-s", [packed], reference=raw, reference_name="raw"))
    return rows


def _mean(rows: list[Row]) -> float:
    return math.exp(sum(math.log(row.ratio or 1.0) for row in rows) / len(rows))


def _write(path: Path, table: dict[str, dict[str, float]]) -> None:
    lines = [
        f'    "{isa}": {{\n'
        + "".join(f'        "{quant}": {ratio:.2f},\n' for quant, ratio in ratios.items())
        + "    },\n"
        for isa, ratios in sorted(table.items())
    ]
    path.write_text(HEAD + "".join(lines) + "}\n")


def run(options: argparse.Namespace) -> list[Row]:
    """A row per type, instruction set and columns; with --out, the table."""
    table, rows = dict(PACKED_TO_RAW), list[Row]()
    for isa in Isa:
        if isa == Isa.SCALAR or not library().ds4_isa_runs(isa):
            continue
        ratios = {}
        for quant in QuantType:
            if library().ds4_matmul_kernel(quant, Layout.X8, isa):
                found = _rows(quant, isa, options.runs)
                ratios[quant.name] = _mean(found)
                rows += found
        table[isa.name] = ratios
    if options.out:
        _write(Path(options.out), table)
    return rows
