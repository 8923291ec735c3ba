"""Owners that refuse to start, or to load: what they say, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from ds4_common import client
from ds4_common.gguf import GgmlType
from helpers.owner_processes import (
    flags,
    launch,
    leftovers,
    start,
    start_helper,
    start_stuck,
    wait_gone,
)
from helpers.tiny_gguf import write_tensors


def test_a_second_owner_of_the_lock_exits_1_naming_the_first(model: Path, run: Path) -> None:
    first = start(model, run)
    first.wait_for("ready manifest=")
    second = launch("ds4_owner.cli", *flags(model, run), "--manifest", str(run / "other"))
    assert second.wait() == 1
    pid = first.process.pid
    assert f"another weight server owns lock {run}/lock pid={pid}" in second.text
    assert first.stop() == 0


def test_a_second_owner_of_the_manifest_exits_1_and_harms_nothing(model: Path, run: Path) -> None:
    first = start(model, run)
    first.wait_for("ready manifest=")
    second = start(model, run, "--no-lock")
    assert second.wait() == 1
    assert str(run / "w") in second.text
    with client.connect(str(run / "w"), role="worker", name="test") as owner:
        assert owner.owner_pid == first.process.pid
    assert first.stop() == 0


@pytest.mark.parametrize(("step", "change"), [("plan", "inode"), ("fill", "modification time")])
def test_a_file_that_changes_between_plan_and_load_is_refused_naming_the_change(
    model: Path, run: Path, tmp_path: Path, step: str, change: str
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    program, pid, pidfd = start_stuck(step, copy, run)
    if step == "plan":
        (tmp_path / "new").write_bytes(model.read_bytes())
        (tmp_path / "new").replace(copy)
    else:
        os.utime(copy, ns=(1, 1))
    os.kill(pid, signal.SIGUSR1)
    assert program.wait() == 1
    wait_gone(pidfd)
    assert re.search(rf"copy\.gguf changed between plan and load: .*{change}", program.text)
    assert leftovers(run) == set()


def test_a_malformed_model_exits_1_naming_file_and_offset(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    program = start(path, run)
    assert program.wait() == 1
    assert re.search(r"bad\.gguf: at byte \d+: ", program.text)
    assert leftovers(run) == set()


def test_too_few_descriptors_are_refused_before_loading(tmp_path: Path, run: Path) -> None:
    tensors: dict[str, tuple[tuple[int, ...], GgmlType]] = {}
    for block in range(9):  # every norm becomes a raw range of its own, the matrices a group
        tensors[f"blk.{block}.attn_norm.weight"] = (256,), GgmlType.F32
        tensors[f"blk.{block}.attn_q.weight"] = (256, 1024), GgmlType.Q4_0
    path = write_tensors(tmp_path / "many.gguf", tensors)
    program = start_helper("--limit", "NOFILE=32", *flags(path, run))
    assert program.wait() == 1
    assert re.search(r"the plan needs \d+ file descriptors .* the limit is 32", program.text)
    assert leftovers(run) == set()


def test_32_descriptors_suffice_for_a_plan_of_few_ranges(model: Path, run: Path) -> None:
    program = start_helper("--limit", "NOFILE=32", *flags(model, run, "--cpu-layout", "raw"))
    program.wait_for("ready manifest=")
    assert program.stop() == 0


@pytest.mark.parametrize("backend", ["memfd", "shm"])
def test_a_limit_on_file_sizes_is_an_error_and_not_a_signal(
    model: Path, run: Path, backend: str
) -> None:
    arguments = flags(model, run, "--cpu-layout", "raw", "--backend", backend)
    program = start_helper("--limit", "FSIZE=65536", *arguments)
    assert program.wait() == 1
    assert "File too large" in program.text
    assert leftovers(run) == set()


def test_a_plan_above_the_memory_is_refused_unless_the_check_is_off(model: Path, run: Path) -> None:
    program = start(model, run, "--reserve-gb", "1000000")
    assert program.wait() == 1
    refusal = "refusing upload; not enough allocatable CUDA memory for full upload plan"
    assert refusal in program.text
    assert leftovers(run) == set()
    for more, environment in (
        (("--reserve-gb", "0"), {}),
        (("--reserve-gb", "1000000"), {"DS4_WEIGHT_SERVER_NO_PREFLIGHT": "1"}),
    ):
        program = start(model, run, *more, **environment)
        program.wait_for("ready manifest=")
        assert program.stop() == 0


def test_a_dry_run_prints_the_budget_and_leaves_nothing(model: Path, run: Path) -> None:
    arguments = ("--base", str(model), "--scope", "base", "--backend", "memfd", "--dry-run")
    program = launch("ds4_owner.cli", *arguments)
    assert program.wait() == 0
    assert program.lines[-1].endswith("dry-run complete; no allocations or manifest were created")
    assert "base CPU groups" in program.text
    assert "acquired lock" not in program.text
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "file", "unwritable", "long", "spaces", "foreign"])
def test_a_manifest_path_that_cannot_work_exits_1_before_loading(
    model: Path, run: Path, kind: str
) -> None:
    (run / "lock-file").write_text("x")
    (run / "lock-foreign").write_text("some file of the user's\n")
    manifest = {
        "missing": run / "none" / "w",
        "file": run / "lock-file" / "w",
        "unwritable": Path("/sys/w"),  # for root too
        "long": run / ("x" * 110),
        "spaces": run / "a b",
        "foreign": run / "lock-foreign",
    }[kind]
    program = launch("ds4_owner.cli", *flags(model, run), "--manifest", str(manifest))
    assert program.wait() == (2 if kind == "foreign" else 1)
    assert str(manifest) in program.text
    assert "content fingerprint" not in program.text
    assert (run / "lock-foreign").read_text() == "some file of the user's\n"


def test_an_unwritable_lock_path_exits_1_naming_the_remedy(model: Path, run: Path) -> None:
    program = start(model, run, "--lock-file", str(run / "none" / "lock"))
    assert program.wait() == 1
    assert "lock open failed" in program.text
    assert "--lock-file" in program.text
