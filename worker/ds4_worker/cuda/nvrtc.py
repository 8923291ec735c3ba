"""The one door to `cuda.bindings.nvrtc`: CUDA C++ text in, a cubin and the compiler's log out.

Owns: the lazy import, the search for the header wheel, and the translation of failures. Needs no
driver and no device. Refuses: targets that are not real ones (a virtual architecture gives an empty
cubin), and to fall back to a toolkit that happens to be installed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ds4_common.errors import KernelCompileError, NvrtcMissing

_INSTALL = "install the compiler with: pip install 'ds4[cuda]'"


class Compiled(NamedTuple):
    cubin: bytes
    log: str  # of the assembler: registers and spills per kernel


@functools.cache
def _library() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the library itself is loaded by the first call
    except (ImportError, RuntimeError) as error:
        raise NvrtcMissing(f"NVRTC: cannot be loaded: {error}; {_INSTALL}") from error
    return nvrtc


@functools.cache
def version() -> str:
    """For example "13.0". Raises NvrtcMissing."""
    major, minor = _checked("nvrtcVersion", _library().nvrtcVersion())
    return f"{major}.{minor}"


@functools.cache
def targets() -> frozenset[str]:
    """Base architectures that this compiler knows, as "sm_90"."""
    return frozenset(
        f"sm_{arch}" for arch in _checked("archs", _library().nvrtcGetSupportedArchs())
    )


def compile_source(
    name: str, source: str, headers: Mapping[str, str], options: Sequence[str]
) -> Compiled:
    """Compiles one translation unit whose includes are in `headers`. `options` must name a real
    target. Raises KernelCompileError with the compiler's own words."""
    nvrtc = _library()
    program = _checked(
        name,
        nvrtc.nvrtcCreateProgram(
            source.encode(),
            name.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [header.encode() for header in headers],
        ),
    )
    try:
        encoded = [option.encode() for option in options]
        result = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _log(name, program)
        if result[0]:
            raise KernelCompileError(
                f"kernel {name}: NVRTC {version()}, {' '.join(options)}: {result[0].name}\n{log}"
            )
        size = _checked(name, nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytearray(size)
        _checked(name, nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if not cubin:
        raise KernelCompileError(
            f"kernel {name}: got an empty cubin, expected code; is the target real?"
        )
    return Compiled(bytes(cubin), log)


def _log(name: str, program: Any) -> str:
    nvrtc = _library()
    text = bytearray(_checked(name, nvrtc.nvrtcGetProgramLogSize(program)))
    if text:
        _checked(name, nvrtc.nvrtcGetProgramLog(program, text))
    return text.rstrip(b"\0").decode(errors="replace").strip()


def _checked(what: str, result: tuple[Any, ...]) -> Any:
    if result[0]:
        raise KernelCompileError(f"NVRTC: {what}: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]
