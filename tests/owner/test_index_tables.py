"""Tables of experts by token: an entry that names no expert is refused before the load."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds4_common.errors import GgufError
from ds4_common.gguf import LogicalModel
from ds4_owner import index_tables
from ds4_owner.index_tables import check_index_tables
from golden import tiny
from golden.deepseek4.cases import CASES, COUNT, USED
from helpers.prepared import prepare_places, raw_places
from helpers.split import split_gguf
from helpers.stack import process_environment

CASE = next(case for case in CASES if case.name == "short_ratios")
TABLE = "blk.1.ffn_gate_tid2eid.weight"


def write(path: Path, row: int, entry: int, expert: int) -> Path:
    """The case with one entry of the second layer's table changed."""
    table = CASE.tensors[TABLE].copy()
    table[row, entry] = expert
    case = dataclasses.replace(CASE, tensors={**CASE.tensors, TABLE: table})
    return tiny.write_gguf(case, path)


def check(path: Path) -> None:
    with LogicalModel.open(path) as model:
        check_index_tables(model, prepare_places(model.metadata, raw_places(model)))


@pytest.mark.parametrize("part_bytes", [4 << 20, USED * 4 * 7])
@pytest.mark.parametrize(("row", "entry"), [(0, 0), (17, 2), (tiny.VOCABULARY - 1, USED - 1)])
@pytest.mark.parametrize("expert", [COUNT, -1, 2**31 - 1, -(2**31)])
def test_the_refusal_names_tensor_row_entry_and_what_there_is(
    row: int, entry: int, expert: int, part_bytes: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(index_tables, "_PART_BYTES", part_bytes)
    path = write(tmp_path / "m.gguf", row, entry, expert)
    with pytest.raises(GgufError) as raised:
        check(path)
    error = raised.value
    assert f"tensor {TABLE}, row {row}, entry {entry}: got {expert}, " in str(error)
    assert str(error).endswith(f"expected an expert from 0 to {COUNT - 1}")
    at = path.read_bytes()[error.offset : error.offset + 4]
    assert int(np.frombuffer(at, "<i4")[0]) == expert


def test_the_first_and_the_last_expert_are_accepted(tmp_path: Path) -> None:
    check(write(tmp_path / "first.gguf", 0, 0, 0))
    check(write(tmp_path / "last.gguf", tiny.VOCABULARY - 1, USED - 1, COUNT - 1))


def test_a_table_in_another_shard_is_refused_by_that_file(tmp_path: Path) -> None:
    shards = split_gguf(write(tmp_path / "m.gguf", 5, 1, COUNT), tmp_path / "parts", 3)
    with LogicalModel.open(shards[0]) as model:
        places = raw_places(model)
        tensor = model.tensor(TABLE)
        assert tensor is not None
        with pytest.raises(GgufError) as raised:
            check_index_tables(model, prepare_places(model.metadata, places))
    assert raised.value.path == str(shards[tensor.shard])


@pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--cpu-layout", "raw")])
def test_an_owner_refuses_such_a_file_with_one_line_and_exit_code_1(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", 5, 1, COUNT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ds4_owner.cli", "--base", str(path), "--scope", "base"),
            *("--backend", "memfd", "--manifest", str(tmp_path / "w"), *flags),
            *("--lock-file", str(tmp_path / "lock")),
        ],
        env=process_environment(), text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if TABLE in line]
    assert len(told) == 1, done.stderr
    assert f"{TABLE}, row 5, entry 1: got {COUNT}, expected an expert from 0 to 7" in told[0]
    assert not (tmp_path / "w").exists()
