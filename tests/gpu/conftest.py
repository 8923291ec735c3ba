"""`make gpu-test` on a machine without a usable device ends at once, with the probe's own line."""

from __future__ import annotations

import os

import pytest

from helpers.driver import programs


@pytest.fixture(scope="session", autouse=True)
def asked_for_device() -> None:
    if os.environ.get("DS4_TEST_GPU") != "1":
        return
    program = "from ds4_common.cuda.device import probe; print(probe().describe())"
    done = programs.attempt(program, programs.plain_environment())
    if done.returncode:
        pytest.exit(f"DS4_TEST_GPU=1: {done.stderr.strip()}", done.returncode)
    print(done.stdout.strip())
