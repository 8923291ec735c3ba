"""The exception tree of the project.

    Ds4Error                    every error we raise on purpose; str() is fit for a user
    ├── UsageError              bad flags or combinations of flags          exit 2
    ├── GgufError               a GGUF file is malformed, truncated or of an unknown version
    ├── UnsupportedModel        a well-formed model that no recipe can prepare
    ├── TokenizerError          a vocabulary or a tokenizer blob is malformed
    ├── ContractError           a prepared contract or lowered image fails validation
    ├── IdentityError           other bytes than the ones asked for
    ├── ManifestError           a manifest is malformed, truncated or stale
    ├── ProtocolError           a peer broke a wire protocol
    ├── OwnerUnavailable        no owner answers at this manifest
    ├── AddressError            a socket path or network address that cannot be listened on
    │   └── AddressInUse        because somebody else does
    ├── BudgetError             not enough memory for the plan
    ├── BackendError            a memory backend cannot do what was asked
    │   └── CudaError           the CUDA driver or device cannot                exit 40
    │       ├── NoCudaDriver        no driver library, or no bindings for it    exit 41
    │       ├── CudaDriverTooOld    a driver without what is needed             exit 42
    │       ├── NoCudaDevice        a driver without a device                   exit 43
    │       ├── CudaUnsupported     a device that cannot share memory           exit 44
    │       ├── WrongCudaDevice     another device, or a simulated one          exit 45
    │       ├── CudaOutOfMemory     device or pinned memory is used up          exit 46
    │       ├── CudaDescriptorError not the descriptor of the expected memory   exit 47
    │       ├── CudaGranularityError  a size that the device cannot map         exit 48
    │       ├── CudaContextLost     a kernel broke the context (bad address)    exit 49
    │       ├── NvrtcMissing        the kernel compiler is not installed        exit 50
    │       ├── KernelCompileError  it refused a kernel                         exit 51
    │       └── CubinCacheError     compiled kernels cannot be kept or trusted  exit 52
    ├── LoaderError             the loader child failed
    ├── HandoverError           an owner's state cannot be taken over by the program that comes next
    ├── GuardRefusal            ds4-guard does not start a job              exit 75
    ├── NativeLibraryError      the native library is missing or of another ABI
    ├── ExecutorFailure         the executor broke; nothing it holds can be trusted   exit 3
    │   └── StepRefused         it was asked for an impossible step, and touched nothing
    ├── GrammarError            a grammar that cannot be compiled
    ├── GrammarUntried          whether it can was not to be found out now
    ├── GrammarFailure          a grammar that broke down; one sequence's
    └── RequestError            a request that cannot be served as asked (HTTP 4xx)

Messages say what failed, on which object, what was got, what was expected, and what to do.
Where no exit code is given, a program ends with 1.
"""

from __future__ import annotations


class Ds4Error(Exception):
    """Base of every deliberate error."""

    exit_code = 1


class UsageError(Ds4Error):
    exit_code = 2


class GgufError(Ds4Error):
    """A malformed file. Carries `path`, `offset` in bytes, `got` and `expected`."""

    def __init__(self, path: str, offset: int, what: str, got: object, expected: object) -> None:
        self.path, self.offset, self.got, self.expected = path, offset, got, expected
        super().__init__(f"{path}: at byte {offset}: {what}: got {got}, expected {expected}")


class UnsupportedModel(Ds4Error):
    pass


class TokenizerError(Ds4Error):
    pass


class ContractError(Ds4Error):
    pass


class IdentityError(Ds4Error):
    pass


class ManifestError(Ds4Error):
    pass


class ProtocolError(Ds4Error):
    pass


class OwnerUnavailable(Ds4Error):
    pass


class AddressError(Ds4Error):
    pass


class AddressInUse(AddressError):
    pass


class BudgetError(Ds4Error):
    pass


class BackendError(Ds4Error):
    pass


class CudaError(BackendError):
    """A failed call of the CUDA driver: its `function` and result `code` (-1: none was read)."""

    exit_code = 40
    function = ""
    code = -1


class NoCudaDriver(CudaError):
    exit_code = 41


class CudaDriverTooOld(CudaError):
    exit_code = 42


class NoCudaDevice(CudaError):
    exit_code = 43


class CudaUnsupported(CudaError):
    exit_code = 44


class WrongCudaDevice(CudaError):
    exit_code = 45


class CudaOutOfMemory(CudaError):
    exit_code = 46


class CudaDescriptorError(CudaError):
    exit_code = 47


class CudaGranularityError(CudaError):
    exit_code = 48


class CudaContextLost(CudaError):
    exit_code = 49


class NvrtcMissing(CudaError):
    exit_code = 50


class KernelCompileError(CudaError):
    exit_code = 51


class CubinCacheError(CudaError):
    exit_code = 52


class LoaderError(Ds4Error):
    pass


class HandoverError(Ds4Error):
    pass


class GuardRefusal(Ds4Error):
    exit_code = 75  # EX_TEMPFAIL: another time there may be room


class NativeLibraryError(Ds4Error):
    pass


class ExecutorFailure(Ds4Error):
    exit_code = 3


class StepRefused(ExecutorFailure):
    pass


class GrammarError(Ds4Error):
    """A grammar that cannot be compiled: what the client sent makes no sense, or too much."""


class GrammarUntried(Ds4Error):
    """Whether a grammar takes too much could not be found out: not its fault."""


class GrammarFailure(Ds4Error):
    """A grammar that broke down, at its limits or by a token it does not allow. One sequence's."""


class RequestError(Ds4Error):
    """A request that cannot be served. Carries the HTTP `status`, `param` path and `code`."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        self.status, self.param, self.code = status, param, code
        super().__init__(message)
