"""The ARM kernels on a machine that has none: cross-compiled, run by an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ds4_common.native.build import CFLAGS, NATIVE, flags_for
from ds4_common.quants.native import Isa

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
CHECK = Path(__file__).parents[1] / "native" / "vector_check.c"
KERNELS = ("act", "aligned", "kv", "matmul", "op_vector", "pack", "planes", "quants", "repack")

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR}: apt install gcc-aarch64-linux-gnu qemu-user",
)


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The kernels, compiled as build.py would on an ARM machine."""
    folder, made = tmp_path_factory.mktemp("arm"), []
    for source in sorted(NATIVE.glob("*.c")):
        if source.name.startswith(KERNELS):
            made.append(folder / f"{source.stem}.o")
            run(COMPILER, *CFLAGS, *flags_for(source, "aarch64"), "-c", source, "-o", made[-1])
    return made


def program(objects: list[Path], source: Path, target: Path) -> Path:
    run(COMPILER, *CFLAGS, "-static", f"-I{NATIVE}", source, *objects, "-lm", "-o", target)
    return target


def test_every_arm_kernel_gives_the_bits_of_its_scalar_reference(
    objects: list[Path], tmp_path: Path
) -> None:
    said = run(EMULATOR, program(objects, CHECK, tmp_path / "check"))
    kinds = [
        "activation columns: equal",
        "matrices: 27 types equal",
        "aligned layouts: 3 types equal",
        "planes: 2 types equal",
        "vector operations: equal",
        "caches: 4 types equal",
    ]
    sets = [f"instruction set {isa:d}" for isa in (Isa.NEON, Isa.I8MM)]
    assert said.splitlines() == [sets[0], *kinds, sets[1], *kinds]


def test_a_cpu_runs_the_kernels_of_its_instructions_and_no_others(
    objects: list[Path], tmp_path: Path
) -> None:
    source = tmp_path / "isa.c"
    source.write_text(
        '#include <stdio.h>\n#include "matmul.h"\n'
        "int main(void) {\n"
        '    printf("%d", ds4_isa_best());\n'
        '    for (int isa = 0; isa < DS4_ISAS; isa++) printf(" %d", ds4_isa_runs(isa));\n'
        "}\n"
    )
    isa = program(objects, source, tmp_path / "isa")
    assert run(EMULATOR, "-cpu", "cortex-a53", isa) == "0 1 0 0 0 0 0"
    assert run(EMULATOR, "-cpu", "neoverse-n1", isa) == "2 1 0 1 0 0 0"
    assert run(EMULATOR, "-cpu", "max", isa) == "5 1 0 1 0 0 1"
    assert run(EMULATOR, "-cpu", "max", "-E", "DS4_ISA=neon", isa) == "2 1 0 1 0 0 1"


def test_the_whole_library_compiles_for_arm() -> None:
    for source in sorted(NATIVE.glob("*.c")):
        flags = [*CFLAGS, *flags_for(source, "aarch64"), "-fsyntax-only", "-Werror"]
        assert run(COMPILER, *flags, source) == ""
