"""The stand-in CUDA driver of tests/native/cuda_stand_in: built on demand, given to programs.

Owns: the cached build, and the environment that makes a program find this libcuda.so.1 and accept
its device. A program that this environment is not given to never sees it. Settings such as
`streams="eager"` or `fault="cuMemCreate:2:2"` are described in stand_in.h.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from helpers.fetch_model import cache_folder

NATIVE = Path(__file__).parents[1] / "native"
SOURCES = NATIVE / "cuda_stand_in"
LIBRARY = "libcuda.so.1"
# Without _FORTIFY_SOURCE, whose longjmp refuses to leave a kernel's stack.
CXXFLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-U_FORTIFY_SOURCE"]
CXXFLAGS += ["-Wno-missing-field-initializers"]


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def headers() -> Path:
    """The folder of cuda.h, from the wheel that the kernels are compiled with."""
    wheel = importlib.metadata.distribution("nvidia-cuda-runtime")
    return Path(str(wheel.locate_file("nvidia/cu13/include")))


def missing() -> str:
    """What keeps this machine from building the stand-in; empty when nothing does."""
    if not shutil.which(compiler()[0]):
        return f"needs a C++ compiler ({compiler()[0]})"
    try:
        headers()
        importlib.metadata.distribution("cuda-bindings")
    except importlib.metadata.PackageNotFoundError as error:
        return f"needs the package {error}: pip install -e '.[gputest]'"
    return ""


def build_shared(sources: list[Path], watched: list[Path], name: str, *flags: str) -> Path:
    """A shared library of those sources, built once for each content of `watched`."""
    command = [*compiler(), *CXXFLAGS, *flags, "-shared", "-isystem", str(headers())]
    digest = hashlib.sha256(repr(command).encode())
    for path in sorted(watched):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = cache_folder() / "cuda" / digest.hexdigest()[:16]
    if not (folder / name).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            target = Path(scratch) / name
            subprocess.run([*command, *map(str, sources), "-o", str(target), "-ldl"], check=True)
            folder.mkdir(exist_ok=True)
            target.replace(folder / name)
    return folder / name


def build() -> Path:
    """The path of the built libcuda.so.1."""
    sources = sorted(SOURCES.glob("*.cpp"))
    watched = [*sources, *SOURCES.glob("*.h"), NATIVE / "cuda_module_table.h"]
    return build_shared(sources, watched, LIBRARY, f"-Wl,-soname,{LIBRARY}")


def environment(base: Mapping[str, str] | None = None, **settings: str) -> dict[str, str]:
    """The environment of a program that shall run on the stand-in."""
    chosen = dict(os.environ if base is None else base)
    path = [str(build().parent), *filter(None, [chosen.get("LD_LIBRARY_PATH")])]
    chosen["LD_LIBRARY_PATH"] = ":".join(path)
    chosen["DS4_CUDA_SIMULATED"] = "1"
    for name, value in settings.items():
        chosen[f"DS4_SIM_{name.upper()}"] = value
    return chosen


def load_here(**settings: str) -> ctypes.CDLL:
    """Makes this very process use the stand-in; only for processes that end after it."""
    for name, value in settings.items():
        os.environ[f"DS4_SIM_{name.upper()}"] = value
    os.environ["DS4_CUDA_SIMULATED"] = "1"
    return ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)
