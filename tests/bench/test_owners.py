"""The rows about owners that end: taken from real owners, with their goals."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ds4_worker.bench import owners, processes
from helpers.tiny_gguf import write_llama


def test_a_reexec_is_timed_by_the_owner_and_by_a_client_that_attaches_meanwhile(
    tmp_path: Path,
) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    with tempfile.TemporaryDirectory(prefix="ds4-") as run:
        with processes.owner(model, Path(run)) as manifest:
            rows = owners.reexec(manifest, runs=2)
    assert [(row.runs, row.goal) for row in rows] == [(2, "<= 100")] * 2
    assert all(row.low > 0 for row in rows)


def test_adoption_is_timed_from_exec_to_ready_and_needs_no_memory(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    whole, step = owners.adoption(model, runs=2, ranges=8, gigabytes=64)
    assert whole.name == "adoption of 64 GB in 8 ranges, exec to ready"
    assert 0 < step.median < whole.median
