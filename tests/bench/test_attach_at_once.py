"""Many processes attach at once in the benchmark, beside a client that never reads."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ds4_worker.bench import attach, processes
from helpers.tiny_gguf import write_llama


def test_rows_compare_attaching_with_and_without_a_stalled_client(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    with tempfile.TemporaryDirectory(prefix="ds4-") as run:
        with processes.owner(model, Path(run)) as manifest:
            rows = attach.measure_many(manifest, runs=1, clients=4)
    assert [row.runs for row in rows] == [2] * 4
    assert [row.goal for row in rows] == ["", "<= 50", "<= 1.05", "<= 50"]
    assert rows[2].reference == rows[0].median
    assert all(0 < row.low <= row.high for row in rows)
