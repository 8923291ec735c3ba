"""A small model and a folder for an owner's manifest, sockets and lock."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.tiny_gguf import write_llama


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(original.read_bytes())
    return copy


@pytest.fixture
def run() -> Iterator[Path]:
    """Short enough for socket paths."""
    with tempfile.TemporaryDirectory(prefix="ds4-") as folder:
        yield Path(folder)
