"""Builds the one native library of the project, incrementally.

Owns: which sources, which flags, where the objects and the library go. Used by setup.py for wheels
and editable installs, and by developers as `python common/ds4_common/native/build.py`. Refuses to
guess: a failing compiler command is shown whole and nothing half-built replaces a working library.

Files named `*_avx2.c` get AVX2+FMA+F16C on x86-64, `*_avxvnni.c` also AVX-VNNI, `*_avx512.c` what
Ice Lake added to AVX2 and `*_amx.c` also int8 tiles, files named `*_neon.c` ARMv8.2 with dot
products on 64-bit ARM and `*_i8mm.c` also products of int8 matrices; every other file is built for
the baseline of the target, so the library loads on any CPU and picks its kernels at run time. A
compiler or assembler from before AVX-VNNI or AMX (GCC 10, clang 11) builds the library without
those kernels, and the build says so: files of that suffix come out empty, and `DS4_NO_<set>` tells
matmul.c. `-ffp-contract=off` is part of the numerical contract (docs/design.md section 7), not an
optimisation flag.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).resolve().parent
LIBRARY = "libds4.so"
CFLAGS = [
    "-std=gnu11", "-O3", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-fsigned-char", "-Wall", "-Wextra", "-Werror=implicit-function-declaration",
    "-pthread",
]  # fmt: skip
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "vbmi"))]
# By machine: what the files of a suffix may use. The library asks the CPU before it runs them.
VECTOR_FLAGS = {
    "x86_64": {
        "_avx2.c": AVX2,
        "_avxvnni.c": [*AVX2, "-mavxvnni"],
        "_avx512.c": AVX512,
        "_amx.c": [*AVX512, "-mamx-tile", "-mamx-int8"],
    },
    "aarch64": {
        "_neon.c": ["-march=armv8.2-a+dotprod"],
        "_i8mm.c": ["-march=armv8.2-a+dotprod+i8mm"],
    },
}
# What a compiler may lack: the set's name and an instruction that only its flags allow.
OPTIONAL = {
    "_avxvnni.c": ("AVXVNNI", "{vex} vpdpbusd %ymm0, %ymm0, %ymm0"),
    "_amx.c": ("AMX", "tilezero %tmm0"),
}
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}  # other names of the same


class BuildError(RuntimeError):
    """A compiler or linker command failed; the message holds the command and its output."""


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\nexit {done.returncode}\n{done.stderr}")


def _vector_flags(machine: str) -> dict[str, list[str]]:
    return VECTOR_FLAGS.get(MACHINES.get(machine, machine), {})


def _knows(command: list[str], instruction: str) -> bool:
    command = [*command, "-x", "c", "-c", "-", "-o", os.devnull]
    text = f'void f(void) {{ __asm__("{instruction}"); }}'
    return not subprocess.run(command, input=text, capture_output=True, text=True).returncode


def _left_out(compiler: list[str], vector: dict[str, list[str]]) -> list[str]:
    """Definitions for the sets that this compiler cannot build; takes their flags from `vector`."""
    definitions = []
    for suffix, (name, instruction) in OPTIONAL.items():
        flags = vector.get(suffix, [])
        if flags and not _knows([*compiler, *flags], instruction):
            print(f"{shlex.join(compiler)} does not know {name} ({flags[-1]}): the library gets no "
                  f"kernels of it; GCC 11 and clang 12 do", file=sys.stderr)  # fmt: skip
            vector[suffix] = []
            definitions.append(f"-DDS4_NO_{name}")
    return definitions


def _flags_of(source: Path, vector: dict[str, list[str]]) -> list[str]:
    return next((flags for suffix, flags in vector.items() if source.name.endswith(suffix)), [])


def flags_for(source: Path, machine: str) -> list[str]:
    """Compiler flags of one source file beyond CFLAGS."""
    return _flags_of(source, _vector_flags(machine))


def build(target_folder: Path = NATIVE, object_folder: Path | None = None) -> Path:
    """Compiles what changed and links `libds4.so` into `target_folder`; returns its path."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    extra = shlex.split(os.environ.get("DS4_CFLAGS", ""))
    objects = object_folder or NATIVE.parents[2] / "build" / "native"
    objects.mkdir(parents=True, exist_ok=True)
    target_folder.mkdir(parents=True, exist_ok=True)
    library = target_folder / LIBRARY
    headers = max((h.stat().st_mtime_ns for h in NATIVE.glob("*.h")), default=0)
    stamp = objects / "command"
    vector = dict(_vector_flags(platform.machine()))
    extra += _left_out(compiler, vector)
    command_text = shlex.join([*compiler, *CFLAGS, *extra]) + f" {vector}"
    stale_all = not stamp.exists() or stamp.read_text() != command_text

    jobs: list[tuple[Path, Path]] = []
    outputs: list[Path] = []
    for source in sorted(NATIVE.glob("*.c")):
        output = objects / (source.stem + ".o")
        outputs.append(output)
        newest = max(source.stat().st_mtime_ns, headers)
        if stale_all or not output.exists() or output.stat().st_mtime_ns < newest:
            jobs.append((source, output))

    def compile_one(job: tuple[Path, Path]) -> None:
        source, output = job
        temporary = output.with_suffix(f".o.{os.getpid()}")
        _run([*compiler, *CFLAGS, *_flags_of(source, vector), *extra, "-c", str(source),
              "-o", str(temporary)])  # fmt: skip
        temporary.replace(output)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, jobs))
    stamp.write_text(command_text)
    if jobs or not library.exists():
        temporary = library.with_suffix(f".so.{os.getpid()}")
        _run([*compiler, "-shared", "-pthread", *extra, *map(str, outputs), "-lm",
              "-o", str(temporary)])  # fmt: skip
        temporary.replace(library)
    return library


def main() -> int:
    try:
        print(build())
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
