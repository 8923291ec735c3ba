"""The ARM kernels give the bits of the scalar ones, and packed blocks cost fewer instructions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ds4_common.allocation import Layout
from ds4_common.native.build import CFLAGS, NATIVE, flags_for
from ds4_common.quants import QuantType
from ds4_common.quants.native import Isa
from helpers.arm import COMPILER, EMULATOR, PROGRAMS, Count, compiled, counts, program, run
from helpers.quant_blocks import X8_TYPES

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR}: apt install gcc-aarch64-linux-gnu qemu-user",
)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compiled(tmp_path_factory.mktemp("arm"))


def test_every_arm_kernel_gives_the_bits_of_its_scalar_reference(
    objects: list[Path], tmp_path: Path
) -> None:
    check = program(objects, PROGRAMS / "vector_check.c", tmp_path / "check")
    kinds = [
        "activation columns: equal",
        "matrices: 27 types equal",
        "aligned layouts: 3 types equal",
        "planes: 2 types equal",
        "vector operations: equal",
        "caches: 4 types equal",
    ]
    sets = [f"instruction set {isa:d}" for isa in (Isa.NEON, Isa.I8MM)]
    assert run(EMULATOR, check)[0].splitlines() == [sets[0], *kinds, sets[1], *kinds]


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
    for options, best_and_running in (
        (("-cpu", "cortex-a53"), "0 1 0 0 0 0 0 0"),
        (("-cpu", "neoverse-n1"), "2 1 0 1 0 0 0 0"),
        (("-cpu", "max"), "6 1 0 1 0 0 0 1"),
        (("-cpu", "max", "-E", "DS4_ISA=neon"), "2 1 0 1 0 0 0 1"),
    ):
        assert run(EMULATOR, *options, isa)[0] == best_and_running, options


@pytest.fixture(scope="module")
def counted(objects: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Count]:
    return counts(objects, tmp_path_factory.mktemp("counts"), (1, 2, 3, 4, 8, 10, 256))


def instructions(found: list[Count]) -> dict[tuple[QuantType, Layout, Isa, int], float]:
    return {(c.quant, c.layout, c.isa, c.columns): c.instructions for c in found}


def test_packed_blocks_take_half_the_instructions_of_raw_ones_with_one_column_and_no_more_with_many(
    counted: list[Count],
) -> None:
    """Which is why `cpu_layout` packs on ARM without a measurement: the bytes are the same."""
    of = instructions(counted)
    packed = [count for count in counted if count.layout is Layout.X8]
    assert {count.quant for count in packed} == set(X8_TYPES)
    for count in packed:
        raw = of[count.quant, Layout.RAW, count.isa, count.columns]
        most = 0.52 if count.columns == 1 else 1.02
        assert count.instructions <= most * raw, (count, raw)


def test_products_of_matrices_take_at_most_a_twentieth_more_instructions_than_dot_products(
    counted: list[Count],
) -> None:
    of = instructions(counted)
    pairs = [count for count in counted if count.isa is Isa.I8MM]
    for count in pairs:
        dots = of[count.quant, count.layout, Isa.NEON, count.columns]
        assert count.instructions <= 1.05 * dots, (count, dots)


def test_the_whole_library_compiles_for_arm() -> None:
    for source in sorted(NATIVE.glob("*.c")):
        flags = [*CFLAGS, *flags_for(source, "aarch64"), "-fsyntax-only", "-Werror"]
        assert run(COMPILER, *flags, source) == ("", "")
