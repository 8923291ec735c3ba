"""The one door to `cuda.bindings.driver`: loading, initialising, calling, and naming what failed.

Owns: the lazy import of the bindings, `cuInit` once per process, the guard against use in a forked
child, and the translation of every failure - a missing library, a missing function, a result code
that the bindings do not know, an error code - into an exception of `ds4_common.errors`.
Refuses: to retry, to log, to read the environment, and the runtime API.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ds4_common.errors import (
    CudaContextLost,
    CudaDriverTooOld,
    CudaError,
    CudaOutOfMemory,
    NoCudaDevice,
    NoCudaDriver,
    WrongCudaDevice,
)

MINIMUM_VERSION = 13000  # CUDA 13.0: the 580 drivers, the first to load what NVRTC 13 compiles

SUCCESS, OUT_OF_MEMORY, NOT_READY = 0, 2, 600

# After these a context answers every call with the same code: only a new process helps. Those that
# cuda.h says it of, and 709, 710 (a context that is gone), 214, 220 (memory, links that failed).
STICKY = frozenset((214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911))
_CLASSES: dict[int, type[CudaError]] = {
    OUT_OF_MEMORY: CudaOutOfMemory,
    34: NoCudaDriver,  # the stub library of a toolkit
    100: NoCudaDevice,
    101: WrongCudaDevice,
    **dict.fromkeys(STICKY, CudaContextLost),
}
NO_DEVICE_ADVICE = (
    "no CUDA device is visible; see nvidia-smi, CUDA_VISIBLE_DEVICES and who may open /dev/nvidia*"
)
_ADVICE: dict[type[CudaError], str] = {
    CudaOutOfMemory: "free device memory, or ask for less",
    NoCudaDriver: "install NVIDIA driver 580 or newer",
    NoCudaDevice: NO_DEVICE_ADVICE,
    WrongCudaDevice: "see nvidia-smi -L for the devices there are",
    CudaContextLost: "the context is lost with everything in it; restart this process",
}
_MPS = "the MPS daemon that this process is a client of; see nvidia-cuda-mps-control"
_ADVICE_FOR_CODE = {
    46: "another process has the device for itself, or it takes none: see nvidia-smi -q -d COMPUTE",
    304: "the system refused, most often for too many open files; see ulimit -n",
    802: "the machine's switches are not up yet: see systemctl status nvidia-fabricmanager",
    803: "the driver's library and kernel module are of different versions; restart the machine",
    **dict.fromkeys((805, 806, 807, 808, 809), _MPS),
}
_ADVICE_FOR_INIT = {
    999: "most often the kernel module nvidia_uvm is missing, or /dev/nvidia* may not be opened",
}

_bindings: Any = None
_functions: dict[str, Callable[..., tuple[Any, ...]]] = {}
_pid = 0  # of the process that called cuInit; 0 before
_context_lost = False  # and told to a caller


def bindings() -> Any:
    """The module `cuda.bindings.driver`, for its types. NoCudaDriver when it is not installed."""
    global _bindings
    if _bindings is None:
        try:
            import cuda.bindings.driver as found
        except ImportError as error:
            raise NoCudaDriver(
                f"the CUDA bindings cannot be imported: {error};"
                " install them with: pip install 'ds4[cuda]'"
            ) from error
        _bindings = found
    return _bindings


def bindings_version() -> str:
    import cuda.bindings

    return str(cuda.bindings.__version__)


def init() -> None:
    """Loads the driver and initialises it, once per process; creates no context.

    Raises NoCudaDriver, NoCudaDevice or CudaDriverTooOld. Must come after the last fork.
    """
    global _pid
    if _pid == os.getpid():
        return
    _refuse_fork()
    try:
        result = bindings().cuInit(0)
    except RuntimeError as error:
        raise NoCudaDriver(
            f"no CUDA driver: {error}; install NVIDIA driver 580 or newer,"
            " or serve from host memory (--backend memfd)"
        ) from error
    except (KeyError, ValueError) as error:
        raise _unknown_code("cuInit", error) from error
    if result[0]:
        raise failure("cuInit", int(result[0]))
    _pid = os.getpid()
    version = driver_version()
    if version < MINIMUM_VERSION:
        _pid = 0
        raise CudaDriverTooOld(
            f"the CUDA driver is too old: got CUDA {version_text(version)},"
            f" expected {version_text(MINIMUM_VERSION)} or newer; install driver 580 or newer"
        )


def driver_version() -> int:
    """As the driver numbers it: 13000 is CUDA 13.0."""
    return int(call("cuDriverGetVersion"))


def version_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def call(name: str, *args: Any, what: str = "") -> Any:
    """Calls the driver; returns its value, a tuple of several, or None.

    `what` names the object in the message of a failure. Raises CudaError or one of its kinds.
    """
    result = _call(name, args, what)
    if result[0]:
        raise failure(name, int(result[0]), what)
    if len(result) == 2:
        return result[1]
    return result[1:] or None


def give_back(name: str, *args: Any, what: str = "") -> None:
    """Calls a function that frees something. Silent when the context was lost, and that was told:
    it took everything along, and the first failure is the one to see."""
    if not _context_lost:
        call(name, *args, what=what)


def poll(name: str, *args: Any) -> bool:
    """Calls a query that answers "done" or "not ready"; True when it is done."""
    code = int(_call(name, args, "")[0])
    if code not in (SUCCESS, NOT_READY):
        raise failure(name, code)
    return code == SUCCESS


def failure(name: str, code: int, what: str = "") -> CudaError:
    """The exception for a driver function's error code."""
    global _context_lost
    try:
        text = str(bindings().CUresult(code).name)
    except (KeyError, ValueError):
        text = "a code unknown to these bindings"
    kind = _CLASSES.get(code, CudaError)
    _context_lost |= kind is CudaContextLost
    where = f"{name}, {what}" if what else name
    told = _ADVICE_FOR_INIT if name == "cuInit" else {}
    advice = told.get(code) or _ADVICE_FOR_CODE.get(code) or _ADVICE.get(kind)
    error = kind(f"CUDA driver: {where}: {text} ({code})" + (f"; {advice}" if advice else ""))
    error.function, error.code = name, code
    return error


def _call(name: str, args: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    function = _functions.get(name) or _resolve(name)
    try:
        return function(*args)
    except RuntimeError as error:
        raise CudaDriverTooOld(
            f"CUDA driver: {name}: {error}; this driver lacks the function, install a newer one"
        ) from error
    except (KeyError, ValueError) as error:
        raise _unknown_code(name, error, what) from error


def _resolve(name: str) -> Callable[..., tuple[Any, ...]]:
    """Once per function and process, so that a call costs no check."""
    if _pid != os.getpid():
        _refuse_fork()
        raise CudaError(f"CUDA driver: {name}: called before init() in this process")
    function: Callable[..., tuple[Any, ...]] | None = getattr(bindings(), name, None)
    if function is None:
        raise CudaError(f"cuda-bindings {bindings_version()} has no {name}; expected >=13.0.3,<14")
    _functions[name] = function
    return function


# A forked child resolves anew, and is refused there.
os.register_at_fork(after_in_child=_functions.clear)


def _refuse_fork() -> None:
    if _pid and _pid != os.getpid():
        raise CudaError(
            f"the CUDA driver was initialised in process {_pid} and cannot be used in its forked"
            f" child {os.getpid()}; start a new program instead"
        )


def _unknown_code(name: str, error: Exception, what: str = "") -> CudaError:
    """For a result code newer than the bindings: 13.0 raises KeyError for it, 13.5 ValueError."""
    where = f"{name}, {what}" if what else name
    unknown = CudaError(
        f"CUDA driver: {where}: the result cannot be read by cuda-bindings {bindings_version()}:"
        f" {type(error).__name__}: {error}; install newer bindings"
    )
    unknown.function = name
    return unknown
