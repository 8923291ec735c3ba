"""Which build this is: what every command says to `--version`."""

from __future__ import annotations

VERSION = "0.1.0"  # pyproject.toml has the same


def version_line(program: str) -> str:
    """E.g. `ds4-server 0.1.0`."""
    return f"{program} {VERSION}"
