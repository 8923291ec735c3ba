"""Every command says which build it is."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from ds4_common.version import VERSION

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_the_package_has_the_same_version() -> None:
    assert PROJECT["version"] == VERSION


@pytest.mark.parametrize("target", sorted(set(PROJECT["scripts"].values())))
def test_every_command_says_its_version(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, name = target.partition(":")
    main: Callable[[list[str]], int] = getattr(import_module(module), name)
    try:
        code = main(["--version"])
    except SystemExit as end:  # of argparse
        code = end.code if isinstance(end.code, int) else -1
    assert code == 0
    program, version = capsys.readouterr().out.split()
    assert program in PROJECT["scripts"]
    assert version == VERSION
