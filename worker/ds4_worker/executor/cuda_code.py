"""The kernels of one program as functions of the device: compiled, or built for a simulation.

Owns: the loaded modules, each unit once. A device that only pretends runs kernels that were built
for the host beforehand, from a folder with one library per unit; such a folder is refused for a
real device, and a real compiler's code never reaches a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ds4_common.cuda.device import Device
from ds4_common.cuda.module import Function, Module, Parameters
from ds4_common.cuda.stream import Stream
from ds4_common.errors import KernelCompileError, UsageError
from ds4_worker.cuda.compiler import Compiler, in_parallel, target_of
from ds4_worker.cuda.kernels import Unit
from ds4_worker.executor.cuda_rows import Planned

Code = Callable[[Unit], bytes]  # what the driver loads
_OPT_IN_BYTES = 48 << 10  # of dynamic shared memory


def compiled_code(device: Device, cache: Path, log: Callable[[str], None]) -> Code:
    """Cubins for exactly that device, from the cache or compiled now. Raises CudaUnsupported."""
    compiler = Compiler(target_of(device.compute_capability), cache, log)
    return lambda unit: compiler.kernel(unit).cubin


def simulated_code(device: Device, folder: Path) -> Code:
    """Libraries of the folder, by the units' labels."""
    if not device.simulated:
        raise UsageError(
            f"kernels in {folder}: they are for a simulated device, this is {device.name}"
        )

    def load(unit: Unit) -> bytes:
        path = folder / library_name(unit)
        try:
            return path.read_bytes()
        except OSError as error:
            raise KernelCompileError(f"kernel {unit.label}: {error}") from error

    return load


def library_name(unit: Unit) -> str:
    """Of a unit that was built for a simulated device."""
    options = "".join(f".{option.removeprefix('-D')}" for option in unit.options())
    return f"{unit.file}{options}.so"


class Functions:
    """Loaded kernels by unit and name. Needs a context."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._modules: dict[Unit, Module] = {}
        self._functions: dict[tuple[Unit, str], Function] = {}
        self._shared: dict[tuple[Unit, str], int] = {}

    def load(self, launches: Iterable[Planned]) -> None:
        """Loads what the launches need, and allows them their shared memory."""
        launches = list(launches)
        units = dict.fromkeys(planned.unit for planned in launches)
        new = [unit for unit in units if unit not in self._modules]
        for unit, image in zip(new, in_parallel(self._code, new), strict=True):
            self._modules[unit] = Module(image, unit.label)
        for planned in launches:
            key = (planned.unit, planned.kernel)
            if key not in self._functions:
                self._functions[key] = self._modules[planned.unit].function(planned.kernel)
            n_bytes = planned.launch.shared_bytes
            if n_bytes > self._shared.get(key, _OPT_IN_BYTES):
                self._functions[key].allow_dynamic_shared(n_bytes)
                self._shared[key] = n_bytes

    def launch(self, stream: Stream, planned: Planned) -> None:
        """The parameters are copied before this returns."""
        grid, block, shared_bytes = planned.launch
        function = self._functions[planned.unit, planned.kernel]
        function.launch(stream, grid, block, Parameters([planned.parameters]), shared_bytes)

    def close(self) -> None:
        self._functions.clear()
        while self._modules:
            self._modules.popitem()[1].close()
