"""`make gpu-test` on a machine without a usable device ends at once, with the probe's own line.

And what tests of whole programs on a device share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.device_stack import Device
from helpers.device_worker import Model, this_device, tiny_model
from helpers.driver import programs


@pytest.fixture(scope="session", autouse=True)
def asked_for_device() -> None:
    if os.environ.get("DS4_TEST_GPU") != "1":
        return
    program = "from ds4_common.cuda.device import probe; print(probe().describe())"
    done = programs.attempt(program, programs.own_environment())
    if done.returncode:
        pytest.exit(f"DS4_TEST_GPU=1: {done.stderr.strip()}", done.returncode)
    print(done.stdout.strip())


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def expected(model: Model) -> str:
    """The text of a tiny answer, by the CPU."""
    return model.text()


@pytest.fixture
def run() -> Iterator[Path]:
    """Short enough for sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def on_device() -> Iterator[Device]:
    with this_device(host="hidden") as made:
        yield made
