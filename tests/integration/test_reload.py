"""--reload over a copy of the sources: real edits, a real compiler, real takeovers."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ds4_common
import ds4_worker
from helpers import stack
from helpers.stack import Program


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The worker's packages, built, where a test may break them."""
    for package in (ds4_common, ds4_worker):
        source = Path(package.__path__[0])
        shutil.copytree(
            source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    built = Path(ds4_common.__path__[0]).parents[1] / "build" / "native"
    if built.is_dir():  # only what a test changes is compiled again
        shutil.copytree(built, tmp_path.parent / "build" / "native", dirs_exist_ok=True)
    return tmp_path


@contextmanager
def reloading(tree: Path, manifest: Path, port: int, *paths: str) -> Iterator[Program]:
    program = Program.start(
        "ds4_worker.cli",
        *("--manifest", str(manifest), "--port", str(port), "--reload", *paths),
        PYTHONPATH=str(tree),
    )
    try:
        program.wait_for("ready http")
        yield program
        assert program.stop() == 0
    finally:
        if program.process.poll() is None:
            program.stop(signal.SIGTERM)


def edit(path: Path, old: str, new: str) -> None:
    """Replaces a text as editors do: by a new file under the old name."""
    text = path.read_text()
    assert old in text
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text.replace(old, new, 1))
    os.replace(fresh, path)


def test_an_edit_is_served_after_a_takeover_and_a_broken_one_is_not(
    tree: Path, manifest: Path
) -> None:
    port = stack.free_port()
    app = tree / "ds4_worker" / "http" / "app.py"
    with reloading(tree, manifest, port) as program:
        assert stack.request(port, "GET", "/v1/models")[1]["object"] == "list"
        models = tree / "ds4_worker" / "http" / "models.py"
        edit(models, 'object: str = "list"', 'object: str = "edited"')
        program.wait_for("has taken over from")
        assert stack.request(port, "GET", "/v1/models")[1]["object"] == "edited"
        pid = stack.request(port, "GET", "/health")[1]["pid"]
        edit(app, "class App:", "class App(")
        program.wait_for(f"before it was ready; pid {pid} goes on")
        assert "SyntaxError" in program.text
        assert stack.request(port, "GET", "/v1/models")[1]["object"] == "edited"
        edit(app, "class App(", "class App:")
        program.wait_for_count("has taken over from", 2)
        assert stack.request(port, "GET", "/health")[1]["pid"] != pid


def test_c_is_compiled_first_and_an_error_of_the_compiler_changes_nothing(
    tree: Path, manifest: Path
) -> None:
    port = stack.free_port()
    source = tree / "ds4_common" / "native" / "version.c"
    with reloading(tree, manifest, port) as program:
        pid = stack.request(port, "GET", "/health")[1]["pid"]
        edit(source, "return 1;", "return one;")
        program.wait_for("cannot be built")
        assert "one" in program.text
        assert stack.request(port, "GET", "/health")[1]["pid"] == pid
        edit(source, "return one;", "return 1; /* edited */")
        program.wait_for("the native library is rebuilt")
        program.wait_for("has taken over from")
        assert stack.request(port, "GET", "/health")[1]["pid"] != pid


def test_further_paths_are_watched_and_a_dead_worker_waits_for_a_change(
    tree: Path, manifest: Path
) -> None:
    port = stack.free_port()
    notes = tree / "notes"
    notes.write_text("1")
    with reloading(tree, manifest, port, str(notes)) as program:
        os.kill(stack.request(port, "GET", "/health")[1]["pid"], signal.SIGKILL)
        program.wait_for("waiting for a change")
        notes.write_text("22")
        program.wait_for_count("ready http", 2)
        assert stack.request(port, "GET", "/health")[0] == 200
