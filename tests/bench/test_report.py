"""Rows keep their numbers; a ratio is figure / reference; tables and CSV hold every row."""

from __future__ import annotations

import csv
import io

from ds4_worker.bench.report import Row, print_table, summarise, write_csv


def test_a_row_is_the_median_of_its_samples_and_their_spread() -> None:
    row = summarise("x", "ms", [3.0, 1.0, 2.0])
    assert (row.median, row.low, row.high, row.runs) == (2.0, 1.0, 3.0, 3)
    assert row.ratio is None


def test_a_ratio_is_the_figure_over_its_reference() -> None:
    assert summarise("x", "GB/s", [6.0], reference=8.0, reference_name="cp").ratio == 0.75


def test_csv_holds_every_row_unrounded() -> None:
    rows = [summarise("a", "ms", [1 / 3]), Row("b", "GB/s", 2.0, 1.0, 3.0, 5, 4.0, "cp", ">= 0.7")]
    out = io.StringIO()
    write_csv(rows, out)
    read = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert [line["figure"] for line in read] == ["a", "b"]
    assert float(read[0]["median"]) == 1 / 3
    assert (read[1]["reference"], read[1]["goal"]) == ("4.0", ">= 0.7")


def test_the_table_names_reference_and_ratio() -> None:
    out = io.StringIO()
    print_table([Row("load", "GB/s", 1.5, 1.0, 2.0, 3, 2.0, "cp", ">= 0.70")], out)
    assert "0.75" in out.getvalue()
    assert "cp 2.00" in out.getvalue()
