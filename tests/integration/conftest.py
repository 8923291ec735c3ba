"""One owner of the split real model for all tests of this room, and workers on demand."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import replacing, stack
from helpers.models import smollm2_path
from helpers.split import split_gguf
from helpers.tiny_gguf import TinyLlama, write_llama


@pytest.fixture(scope="session")
def shards() -> Iterator[list[Path]]:
    """The real model as three shards."""
    with tempfile.TemporaryDirectory(prefix="ds4-shards-") as folder:
        yield split_gguf(smollm2_path(), Path(folder) / "smollm2", 3)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two small ones, `a` and `b`, to replace each other."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_llama(folder / f"{name}.gguf", TinyLlama(seed=seed))
        for seed, name in enumerate("ab")
    }


@pytest.fixture
def run() -> Iterator[Path]:
    """A folder for an owner and its replacements, all of which end with it."""
    with replacing.folder() as made:
        yield made


@pytest.fixture(scope="session")
def run_folder() -> Iterator[Path]:
    """A short path: the broker's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ds4-run-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def owner(shards: list[Path], run_folder: Path) -> Iterator[stack.Program]:
    with stack.owner(shards[0], run_folder) as program:
        yield program


@pytest.fixture(scope="session")
def manifest(owner: stack.Program, run_folder: Path) -> Path:
    assert owner.process.poll() is None
    return run_folder / "w"


@pytest.fixture(scope="module")
def port(manifest: Path) -> Iterator[int]:
    """Of a worker that calls its model "local" and wants the key "k"."""
    port = stack.free_port()
    with stack.worker(manifest, port, "--api-key", "k", "--served-id", "local", "--ctx", "512"):
        yield port
