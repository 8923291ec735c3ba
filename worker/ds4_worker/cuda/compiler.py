"""Kernels for a device: source files to cubins, through a cache that is checked on every load.

Owns: which options kernels are compiled with, which target belongs to which compute capability,
and the cache. A cache file is named by a hash over everything that decides its contents - source,
headers, options, NVRTC version, target, schema - and holds the cubin's length and hash. It is
written beside its place, synced and renamed. A file that is damaged, cut off or not for a GPU is
compiled again, with one log line. Refuses: PTX (drivers refuse one newer than they are),
capabilities without an entry in TARGETS, and files that somebody else could have written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from ds4_common.errors import CubinCacheError, CudaUnsupported, KernelCompileError
from ds4_worker.cuda import nvrtc
from ds4_worker.cuda.kernels import Unit

SOURCES = Path(__file__).parent
SCHEMA = 1  # raise it when the cache file's own format changes
TARGETS = {(9, 0): "sm_90", (12, 0): "sm_120a", (12, 1): "sm_121a"}

_TRUSTED = (0, os.geteuid())
MOST_THREADS = 8  # that compile: each takes some 100 MB
T = TypeVar("T")

# The first two are part of the numerical contract (docs/design.md section 7).
OPTIONS = (
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--std=c++17",
    "--ptxas-options=-v",
)

_NEW = ".new-"
_LEFT_SECONDS = 3600.0  # a file that nobody has finished by then has nobody
_MAGIC = b"DS4CUBIN"
_HEADER = struct.Struct("<8sII32s")  # magic, schema, bytes that follow, their SHA-256
_EM_CUDA = 190
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_RESOURCES = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores,"
    r" (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


class Resources(msgspec.Struct, frozen=True):
    """What the assembler gave a kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int


class Kernel(msgspec.Struct, frozen=True):
    """A compiled unit."""

    cubin: bytes
    resources: dict[str, Resources]  # by kernel


def target_of(capability: tuple[int, int]) -> str:
    """The target of a device. Raises CudaUnsupported."""
    if capability not in TARGETS:
        known = ", ".join(f"{major}.{minor}" for major, minor in TARGETS)
        raise CudaUnsupported(
            f"compute capability {capability[0]}.{capability[1]}: got no kernels, only for {known}"
        )
    return TARGETS[capability]


class Compiler:
    """Compiles units for one target, each once per cache folder; several threads may ask at once.
    `log` gets one line per file that had to be given up."""

    def __init__(self, target: str, cache: Path | None, log: Callable[[str], None]) -> None:
        if target not in TARGETS.values():
            raise CudaUnsupported(
                f"target: got {target!r}, expected one of {sorted(TARGETS.values())}"
            )
        self.target = target
        self.compiled = 0  # units that were not in the cache
        self._counting = threading.Lock()
        self._cache = cache
        self._log = log

    def kernel(self, unit: Unit) -> Kernel:
        """The unit for this target, from the cache or compiled now. Raises NvrtcMissing (the key of
        the cache has the compiler's version in it), KernelCompileError, CubinCacheError."""
        source, headers = read_sources(unit.file)
        options = (f"--gpu-architecture={self.target}", *OPTIONS, *unit.options())
        if self._cache is None:
            return self._compile(unit, source, headers, options)
        path = self._cache / f"{cache_key(source, headers, options, self.target)}.cubin"
        found = self._load(path, unit)
        if found is None:
            found = self._compile(unit, source, headers, options)
            _store(path, found)
        return found

    def _compile(
        self, unit: Unit, source: str, headers: dict[str, str], options: tuple[str, ...]
    ) -> Kernel:
        done = nvrtc.compile_source(unit.label, source, headers, options)
        with self._counting:
            self.compiled += 1
        resources = read_resources(done.log)
        if not resources or not is_cubin(done.cubin):
            raise KernelCompileError(
                f"kernel {unit.label}: got no code for {self.target}\n{done.log}"
            )
        return Kernel(done.cubin, resources)

    def _load(self, path: Path, unit: Unit) -> Kernel | None:
        try:
            data = _read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CubinCacheError(f"compiled kernel {path}: cannot be read: {error}") from error
        try:
            return unpack(data)
        except CubinCacheError as error:
            self._log(f"compiled kernel {path} ({unit.label}): {error}; compiling it again")
            return None


def in_parallel(make: Callable[[Unit], T], units: Sequence[Unit]) -> list[T]:
    """`make` of each unit, by as many threads as there are cores: the compiler has no lock."""
    threads = min(len(units), os.cpu_count() or 1, MOST_THREADS)
    if threads < 2:
        return [make(unit) for unit in units]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(make, units))


# ---- the key -----------------------------------------------------------------------------------


def read_sources(file: str) -> tuple[str, dict[str, str]]:
    """The text of a kernel file, and of all files that it includes, by name."""
    source = (SOURCES / file).read_text()
    headers: dict[str, str] = {}
    wanted = _INCLUDE.findall(source)
    while wanted:
        name = wanted.pop()
        if name in headers or not (SOURCES / name).exists():
            continue  # fibers.h belongs to the tests; NVRTC never reaches it
        headers[name] = (SOURCES / name).read_text()
        wanted += _INCLUDE.findall(headers[name])
    return source, dict(sorted(headers.items()))


def cache_key(source: str, headers: dict[str, str], options: tuple[str, ...], target: str) -> str:
    parts = [str(SCHEMA), nvrtc.version(), target, *options, source]
    parts += [part for item in headers.items() for part in item]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ---- the file ----------------------------------------------------------------------------------


def pack(kernel: Kernel) -> bytes:
    body = msgspec.msgpack.encode(kernel)
    return _HEADER.pack(_MAGIC, SCHEMA, len(body), hashlib.sha256(body).digest()) + body


def unpack(data: bytes) -> Kernel:
    """Raises CubinCacheError for anything but a whole file of this schema with a cubin in it."""
    if len(data) < _HEADER.size:
        raise CubinCacheError(f"got {len(data)} bytes, expected {_HEADER.size} at least")
    magic, schema, length, digest = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if (magic, schema) != (_MAGIC, SCHEMA):
        raise CubinCacheError(f"got {magic!r} of schema {schema}, expected {_MAGIC!r}, {SCHEMA}")
    if length != len(body) or hashlib.sha256(body).digest() != digest:
        raise CubinCacheError(f"got {len(body)} bytes, expected {length} with another hash")
    try:
        kernel = msgspec.msgpack.decode(body, type=Kernel)
    except msgspec.DecodeError as error:
        raise CubinCacheError(f"contents: {error}") from error
    if not is_cubin(kernel.cubin):
        raise CubinCacheError("got no ELF file for a GPU, expected a cubin")
    return kernel


def is_cubin(data: bytes) -> bool:
    """Whether these are an ELF file for NVIDIA GPUs."""
    return data[:4] == b"\x7fELF" and len(data) > 64 and data[18] | data[19] << 8 == _EM_CUDA


def _read(path: Path) -> bytes:
    """A regular file that only its owner can write, who is this user or root: the hash in it says
    that it is whole, not who made it. Raises OSError, CubinCacheError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would be waited for
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o022 or info.st_uid not in _TRUSTED:
            raise CubinCacheError(
                f"compiled kernel {path}: got mode {info.st_mode:o} of uid {info.st_uid}, expected"
                f" a file of uid {os.geteuid()} or 0 that nobody else can write to; remove it, or"
                " name another folder"
            )
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def _store(path: Path, kernel: Kernel) -> None:
    """Whole or not at all, also when several workers start at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_NEW, delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(pack(kernel))
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise CubinCacheError(
            f"compiled kernels: cannot be kept in {path.parent}: {error}; name another folder"
        ) from error


def _sweep(folder: Path) -> None:
    """Removes what a start left that was killed while it wrote."""
    for left in folder.glob(f"{_NEW}*"):
        try:
            if left.lstat().st_mtime < time.time() - _LEFT_SECONDS:
                left.unlink()
        except FileNotFoundError:
            continue  # somebody else finished or removed it


def read_resources(log: str) -> dict[str, Resources]:
    """Registers, stack and spills per kernel, from the log of ptxas -v."""
    return {
        name: Resources(int(registers), int(stack), int(stores) + int(loads))
        for name, stack, stores, loads, registers in _RESOURCES.findall(log)
    }
