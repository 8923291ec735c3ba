"""Small programs upon the driver layer, run to their exit code in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping

from helpers import cuda_stand_in

FRAME = """
import os, sys
from ds4_common.errors import Ds4Error
try:
{body}
except Ds4Error as error:
    print(f"{{type(error).__name__}}: {{error}}", file=sys.stderr)
    sys.exit(error.exit_code)
"""
SECONDS = 60  # a driver that is missing must not hang its caller


def command(body: str) -> list[str]:
    return [sys.executable, "-c", FRAME.format(body=textwrap.indent(textwrap.dedent(body), "    "))]


def own_environment() -> dict[str, str]:
    """Whatever driver the tests themselves see."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def plain_environment() -> dict[str, str]:
    """Without the stand-in, whatever started the tests."""
    left_out = ("DS4_SIM_", "DS4_CUDA_")
    return {k: v for k, v in own_environment().items() if not k.startswith(left_out)}


def on_stand_in(body: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return attempt(body, cuda_stand_in.environment(plain_environment(), **settings))


def attempt(body: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """What the program printed, and the exit code of the error that ended it."""
    return subprocess.run(
        command(body),
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
