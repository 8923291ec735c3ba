"""The ARM kernels on a machine that has none: cross-compiled, run and counted by an emulator.

Owns: compiling the kernels as build.py would on an ARM machine, running a program with them, and
counting the instructions of every kernel. `python -m helpers.arm [COLUMNS ...]` prints the counts
per thousand multiply-adds. Counts compare kernels; they are no times.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ds4_common.allocation import Layout
from ds4_common.native.build import CFLAGS, NATIVE, flags_for
from ds4_common.quants import QuantType
from ds4_common.quants.native import Isa

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PROGRAMS = Path(__file__).parents[1] / "native"
KERNELS = ("act", "aligned", "kv", "matmul", "op_vector", "pack", "planes", "quants", "repack")


def run(*command: str | Path) -> tuple[str, str]:
    """What it says on stdout and on stderr. It must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def compiled(folder: Path) -> list[Path]:
    """The kernels, compiled as build.py would on an ARM machine."""
    made = []
    for source in sorted(NATIVE.glob("*.c")):
        if source.name.startswith(KERNELS):
            made.append(folder / f"{source.stem}.o")
            run(COMPILER, *CFLAGS, *flags_for(source, "aarch64"), "-c", source, "-o", made[-1])
    return made


def program(objects: list[Path], source: Path, target: Path) -> Path:
    run(COMPILER, *CFLAGS, "-static", f"-I{NATIVE}", source, *objects, "-lm", "-o", target)
    return target


@dataclass(frozen=True)
class Count:
    """Instructions of one product, per thousand multiply-adds."""

    quant: QuantType
    layout: Layout
    isa: Isa
    columns: int
    instructions: float


def counts(objects: list[Path], folder: Path, columns: tuple[int, ...]) -> list[Count]:
    """Of every type, layout and instruction set, for each number of columns."""
    plugin = folder / "count.so"
    run("cc", "-O2", "-fPIC", "-shared", PROGRAMS / "count_plugin.c", "-o", plugin)
    counted = program(objects, PROGRAMS / "kernel_count.c", folder / "kernel_count")
    said, figures = run(EMULATOR, "-plugin", plugin, counted, *map(str, columns))
    made = []
    for line, figure in zip(said.splitlines(), figures.splitlines(), strict=True):
        quant, layout, isa, n, products = map(int, line.split())
        per_thousand = 1000 * int(figure) / products
        made.append(Count(QuantType(quant), Layout(layout), Isa(isa), n, per_thousand))
    return made


def main(arguments: list[str]) -> None:
    columns = tuple(map(int, arguments)) or (1, 8, 256)
    table: dict[tuple[str, str, str], list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in counts(compiled(Path(folder)), Path(folder), columns):
            key = count.quant.name, count.isa.name, count.layout.name
            table.setdefault(key, []).append(f"{count.instructions:.0f}")
    for key, figures in table.items():
        print(*key, " / ".join(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
