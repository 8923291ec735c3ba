"""A small model, a folder for an owner's manifest, sockets and lock, an owner and a broker."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4_common.contract import prepared_model_pb2 as pb
from helpers import owner_processes
from helpers.brokers import Stage, broker
from helpers.descriptors import open_fds
from helpers.prepared import Build, prepare_file
from helpers.stack import Program
from helpers.tiny_gguf import TinyLlama, write_llama


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
    """Short enough for socket paths. Ends what a failed test left running in it."""
    with tempfile.TemporaryDirectory(prefix="ds4-") as folder:
        yield Path(folder)
        owner_processes.end_started()


@pytest.fixture
def owner(model: Path, run: Path) -> Program:
    """A ready one, in a process of its own."""
    program = owner_processes.start(model, run)
    program.wait_for("ready manifest=")
    return program


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A ready broker, which leaves nothing behind."""
    before, threads = open_fds(), set(threading.enumerate())
    with broker(tmp_path) as made:
        made.ready()
        yield made
    assert open_fds() <= before
    assert set(threading.enumerate()) <= threads
    assert os.listdir(tmp_path) == []


@pytest.fixture
def prepared(tmp_path: Path) -> Build:
    """Prepares a tiny model; keyword arguments are those of TinyLlama."""

    def build(**changes: Any) -> pb.Bundle:
        return prepare_file(write_llama(tmp_path / "tiny.gguf", TinyLlama(**changes))).bundle

    return build
