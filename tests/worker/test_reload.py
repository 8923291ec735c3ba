"""--reload: what counts as a change, and which words reach the worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds4_common.errors import UsageError
from ds4_worker import flags, reload
from ds4_worker.cli import server_config


def config_error(*argv: str) -> str:
    with pytest.raises(UsageError) as raised:
        server_config(argv, {})
    return str(raised.value)


@pytest.mark.parametrize(
    ("argv", "paths", "rest"),
    [
        (["--reload"], (), []),
        (["--reload", "a", "b", "--port", "1"], ("a", "b"), ["--port", "1"]),
        (["--port", "1", "--reload=a", "b"], ("a", "b"), ["--port", "1"]),
        (["--reload", "a", "--cors", "--reload", "b"], ("a", "b"), ["--cors"]),
    ],
)
def test_reload_takes_any_number_of_paths(
    argv: list[str], paths: tuple[str, ...], rest: list[str]
) -> None:
    assert server_config(argv, {}).reload == paths
    assert flags.without(argv, "--reload") == rest


def test_without_the_flag_there_is_no_reload() -> None:
    assert server_config([], {}).reload is None


@pytest.mark.parametrize("flag", ["--standby", "--zygote", "--no-takeover"])
def test_reload_is_not_mixed_with_other_ways_to_start(flag: str) -> None:
    assert flag in config_error("--reload", flag)


def test_a_path_that_does_not_exist_is_named() -> None:
    with pytest.raises(UsageError, match="/nowhere"):
        reload.run([], ["/nowhere"])


def test_edits_new_files_and_removals_are_changes_and_builds_are_not(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    kept, gone = tmp_path / "package" / "kept.py", tmp_path / "package" / "gone.c"
    kept.write_text("1")
    gone.write_text("1")
    roots = [str(tmp_path)]
    before = reload.snapshot(roots)
    (tmp_path / "package" / "__pycache__").mkdir()
    (tmp_path / "package" / "__pycache__" / "kept.pyc").write_text("1")
    (tmp_path / "package" / "libds4.so").write_text("1")
    (tmp_path / "package" / ".kept.py.swp").write_text("1")
    assert reload.changed(before, reload.snapshot(roots)) == []
    gone.unlink()
    kept.write_text("22")
    (tmp_path / "new.py").write_text("")
    names = [os.path.basename(p) for p in reload.changed(before, reload.snapshot(roots))]
    assert names == ["new.py", "gone.c", "kept.py"]


def test_a_single_file_can_be_watched(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("1")
    before = reload.snapshot([str(path)])
    path.write_text("22")
    assert reload.changed(before, reload.snapshot([str(path)])) == [str(path)]
