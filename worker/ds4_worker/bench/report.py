"""Rows of figures, as a table for people and CSV for programs.

Owns: the shape of a result and how it is printed. A figure always says what it is compared with:
the `reference` was measured in the same run, `ratio` is figure / reference.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: the median of `runs` samples, with their spread."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    runs: int
    reference: float | None = None
    reference_name: str = ""
    goal: str = ""

    @property
    def ratio(self) -> float | None:
        return self.median / self.reference if self.reference else None


def summarise(
    name: str,
    unit: str,
    samples: Sequence[float],
    *,
    reference: float | None = None,
    reference_name: str = "",
    goal: str = "",
) -> Row:
    """Median, minimum and maximum of at least one sample."""
    return Row(
        name,
        unit,
        statistics.median(samples),
        min(samples),
        max(samples),
        len(samples),
        reference,
        reference_name,
        goal,
    )


def print_table(rows: Sequence[Row], out: TextIO = sys.stdout) -> None:
    """Aligned plain text, one row a figure."""
    header = ("figure", "median", "min", "max", "unit", "n", "ratio", "reference", "goal")
    body = [
        (
            row.name,
            f"{row.median:.2f}",
            f"{row.low:.2f}",
            f"{row.high:.2f}",
            row.unit,
            str(row.runs),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.reference is None else f"{row.reference_name} {row.reference:.2f}",
            row.goal,
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    numeric = {1, 2, 3, 5, 6}
    for line in (header, *body):
        cells = (
            cell.rjust(width) if i in numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip(), file=out)


def write_csv(rows: Sequence[Row], out: TextIO) -> None:
    """The same rows for programs; unrounded."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ("figure", "median", "min", "max", "unit", "n", "reference", "reference_name", "goal")
    )
    for row in rows:
        figures = (row.name, row.median, row.low, row.high, row.unit, row.runs)
        writer.writerow((*figures, row.reference, row.reference_name, row.goal))
