"""The registry of claims, and what most of them need: a device, a context, a stream, kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ds4_common.cuda.device import Context, Device, probe
from ds4_common.cuda.memory import Allocation, DeviceBuffer, Mapping, PinnedBuffer, granularity
from ds4_common.cuda.module import Module, Parameters
from ds4_common.cuda.stream import Stream
from ds4_worker.cuda import nvrtc
from ds4_worker.cuda.compiler import target_of
from helpers import cuda_stand_in

KERNELS = Path(__file__).parents[2] / "gpu" / "contract_kernels.cu"
Claim = Callable[[], None]
CLAIMS: dict[str, Claim] = {}
LOSES_CONTEXT: set[str] = set()
STRICT: set[str] = set()


def claim(function: Claim) -> Claim:
    """A promise of the driver; its name is the promise."""
    CLAIMS[function.__name__] = function
    return function


def fatal_claim(function: Claim) -> Claim:
    """One that ends with a lost context: the process is of no use after it."""
    LOSES_CONTEXT.add(function.__name__)
    return claim(function)


def strict_claim(function: Claim) -> Claim:
    """What the stand-in refuses so that mistakes show, and a device may let pass: nothing of ours
    depends on the refusal. Where a device lets it pass, its test is skipped and says so."""
    STRICT.add(function.__name__)
    return claim(function)


@dataclass
class Bench:
    """A context with one stream; `put` and `get` move bytes and wait."""

    device: Device
    context: Context
    stream: Stream
    modules: list[Module] = field(default_factory=list)

    def put(self, address: int, data: bytes) -> None:
        with PinnedBuffer(len(data), "input") as stage:
            stage.view[:] = data
            self.stream.upload(address, stage.address, len(data))
            self.stream.synchronize()

    def get(self, address: int, n_bytes: int) -> bytes:
        with PinnedBuffer(n_bytes, "output") as stage:
            self.stream.download(stage.address, address, n_bytes)
            self.stream.synchronize()
            return bytes(stage.view)

    def floats(self, address: int, count: int) -> list[float]:
        return list((ctypes.c_float * count).from_buffer_copy(self.get(address, 4 * count)))

    def shareable(self, chunks: int = 1) -> Allocation:
        return Allocation.create(self.device, chunks * granularity(self.device), "weights")

    def kernels(self) -> Module:
        module = Module(kernel_image(self.device), "contract kernels")
        self.modules.append(module)
        return module


@contextmanager
def bench() -> Iterator[Bench]:
    device = probe()
    with Context(device) as context, Stream() as stream:
        it = Bench(device, context, stream)
        yield it
        for module in it.modules:
            module.close()


@contextmanager
def memory(it: Bench, *, writable: bool = True) -> Iterator[Mapping]:
    """One chunk of shareable memory, mapped."""
    with it.shareable() as allocation, Mapping(allocation, it.device, writable=writable) as mapping:
        yield mapping


@contextmanager
def zeroed_floats(it: Bench, count: int) -> Iterator[DeviceBuffer]:
    with DeviceBuffer(4 * count, "floats") as buffer:
        it.stream.fill(buffer.address, 0, 4 * count)
        it.stream.synchronize()
        yield buffer


def add_parameters(address: int, count: int, value: float) -> Parameters:
    return Parameters([ctypes.c_uint64(address), ctypes.c_uint32(count), ctypes.c_float(value)])


def kernel_image(device: Device) -> bytes:
    """The contract kernels for the device: a host library on the stand-in, else a cubin."""
    if device.simulated:
        table = cuda_stand_in.NATIVE / "cuda_module_table.h"
        flags = ["-x", "c++"]
        built = cuda_stand_in.build_shared([KERNELS], [KERNELS, table], "kernels.so", *flags)
        return built.read_bytes()
    return cubin(target_of(device.compute_capability))


def cubin(target: str) -> bytes:
    """The contract kernels compiled for a device; needs none."""
    options = [f"--gpu-architecture={target}"]
    return nvrtc.compile_source(KERNELS.name, KERNELS.read_text(), {}, options).cubin
