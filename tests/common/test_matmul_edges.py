"""Kernels read and write nothing beyond weights, activations and results (helpers/edges.py)."""

from __future__ import annotations

import signal
import subprocess
import sys

from helpers.stack import process_environment


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "helpers.edges", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=process_environment()
    )


def test_no_kernel_touches_a_byte_beyond_its_tensor() -> None:
    done = ended()
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 1000


def test_a_tensor_without_its_last_byte_ends_the_process() -> None:
    assert ended("SHORT", "IQ2_XXS").returncode == -signal.SIGSEGV
