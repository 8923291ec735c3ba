"""Compilers that do not know every instruction set build the native library too, and say so."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from ds4_common.native import build

OPTIONAL = {name.lower(): suffix for suffix, (name, _) in build.OPTIONAL.items()}


def part_of_the_sources(folder: Path) -> Path:
    """The dispatcher and the kernels of the sets in question: the whole takes a minute."""
    folder.mkdir()
    patterns = ("*.h", "matmul.c", *(f"*{suffix}" for suffix in OPTIONAL.values()))
    for source in {path for pattern in patterns for path in build.NATIVE.glob(pattern)}:
        (folder / source.name).symlink_to(source)
    return folder


def kernels_called(library: Path) -> set[str]:
    command = ["nm", "-D", "--undefined-only", str(library)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {symbol.split("_")[2] for symbol in symbols if symbol.startswith("ds4_matmul_")}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the sets in question are x86's")
def test_a_compiler_without_an_instruction_set_builds_the_library_without_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "old-cc"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-mavxvnni*|*-mamx*) exit 1;; esac\nexec cc "$@" -O0 -g0\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(build, "NATIVE", part_of_the_sources(tmp_path / "native"))
    library = build.build(tmp_path, tmp_path / "objects")
    said = capsys.readouterr().err.splitlines()
    for line, (name, suffix) in zip(said, OPTIONAL.items(), strict=True):
        flag = build.flags_for(Path(suffix), "x86_64")[-1]
        assert f"{compiler} does not know {name.upper()} ({flag}): the library gets no" in line
    called = kernels_called(library)
    assert "avx2" in called
    assert not called & set(OPTIONAL)
