"""docs/flags.md knows every flag that a program knows, and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
# program: its module, and the subcommands that have flags of their own
PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ds4-weight-server": (
        "ds4_owner.cli",
        ("status", "stop", "reexec", "verify", "replace", "preflight", "top"),
    ),
    "ds4-server": ("ds4_worker.cli", ()),
    "ds4": ("ds4_worker.oneshot", ()),
    "ds4-bench": ("ds4_worker.bench.cli", ()),
}
FLAG = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9-]*")


def section(program: str) -> str:
    """The part of the page under the program's heading."""
    _, _, rest = PAGE.read_text().partition(f"\n## `{program}`")
    assert rest, f"no section for {program}"
    return rest.partition("\n## ")[0]


def help_of(module: str, *command: str) -> set[str]:
    """The flags that a program's help names."""
    done = subprocess.run(
        [sys.executable, "-m", module, *command, "--help"],
        capture_output=True,
        text=True,
        env=dict(os.environ, COLUMNS="200"),
        check=True,
    )
    return set(FLAG.findall(done.stdout)) - {"--help", "--version"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_flags_page_knows_every_flag_of_the_program_and_no_other(program: str) -> None:
    module, commands = PROGRAMS[program]
    known = help_of(module)
    beyond = {flag for command in commands for flag in help_of(module, command)}
    written = set(FLAG.findall(section(program)))
    # A switch and its negation are one entry of the page.
    assert {f for f in known if not f.startswith("--no-repack")} - written == set()
    assert {f for f in written if not f.startswith("--no-")} - known - beyond == set()
