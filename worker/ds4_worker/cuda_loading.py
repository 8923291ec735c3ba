"""From an owner's contract and ranges to an executor on a CUDA device.

Owns: which device, where compiled kernels come from, and the one decision about weights: they are
imported and mapped read-only where the owner holds them in device memory. Only when a flag asks for
it are ranges of host memory copied to the device. Nothing here is imported without `--cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ds4_common.client import OwnerConnection
from ds4_common.contract.image import Image, load_image
from ds4_common.contract.image_read import read_image
from ds4_common.cuda.device import Context, Device, probe
from ds4_common.cuda.memory import DeviceBuffer, PinnedBuffer
from ds4_common.cuda.ranges import map_ranges
from ds4_common.cuda.stream import Stream
from ds4_common.errors import BackendError
from ds4_common.log import write_line
from ds4_common.mapping import Mapping
from ds4_worker.config import CudaConfig
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.executor.cuda import CudaExecutor
from ds4_worker.executor.cuda_code import Code, compiled_code, simulated_code

_STAGE_BYTES = 16 << 20
_SPARE_BYTES = 64  # kernels read whole pieces of 16 bytes


class Weights(msgspec.Struct):
    """An allocation's bytes on the device. Closing one of them closes all of its model."""

    address: int
    n_bytes: int
    close: Callable[[], None]


def program(image: bytes | memoryview, contract: bytes | memoryview) -> tuple[Image, bool]:
    """The owner's image, or where it has none or one of another build, that of the contract; and
    whether it was lowered here. Raises ContractError."""
    data, lowered = load_image(image, contract, any_layout=True)
    return read_image(data), lowered


def open_executor(
    connection: OwnerConnection,
    image: Image,
    cuda: CudaConfig,
    config: ExecutorConfig,
    kind: type[CudaExecutor] = CudaExecutor,
) -> tuple[CudaExecutor, list[Weights]]:
    """The executor, of a class of its own if need be, and the weights that it computes on. Raises
    what devices, ranges and kernels raise; nothing stays mapped or allocated then."""
    with ExitStack() as undo:
        context, weights = (_copy if cuda.copy else _import)(connection, image, undo)
        executor = kind(
            image,
            {id_: (held.address, held.n_bytes) for id_, held in weights.items()},
            config,
            context,
            _code(context.device, cuda),
        )
        undo.pop_all()
    return executor, list(weights.values())


def _code(device: Device, cuda: CudaConfig) -> Code:
    if cuda.kernels:
        return simulated_code(device, Path(cuda.kernels))
    return compiled_code(device, Path(cuda.cache), lambda text: write_line(f"ds4-server: {text}"))


def _import(
    connection: OwnerConnection, image: Image, undo: ExitStack
) -> tuple[Context, dict[int, Weights]]:
    """Maps the ranges that the program reads."""
    if connection.welcome.device is None:
        raise BackendError(
            f"--cuda: owner of {connection.manifest_path} holds its weights in host memory (backend"
            f" {connection.welcome.backend}); start it with --backend vmm, or let this worker copy"
            " them to the device with --cuda-copy"
        )
    ranges = map_ranges(connection, [id_ for id_, _ in image.allocations])
    undo.callback(ranges.close)
    held = {
        id_: Weights(found.address, found.n_bytes, ranges.close)
        for id_, found in ranges.ranges.items()
    }
    return ranges.context, held


def _copy(
    connection: OwnerConnection, image: Image, undo: ExitStack
) -> tuple[Context, dict[int, Weights]]:
    """Copies the ranges that the program reads from host memory, stage by stage."""
    if connection.welcome.device is not None:
        raise BackendError(
            f"--cuda-copy: owner of {connection.manifest_path} holds its weights on"
            f" {connection.welcome.device.name} already; leave it out"
        )
    mappings = connection.map_allocations([id_ for id_, _ in image.allocations])
    try:
        memory = ExitStack()
        undo.callback(memory.close)
        context = memory.enter_context(Context(probe()))
        held = {}
        for id_, mapping in mappings.items():
            target = DeviceBuffer(mapping.n_bytes + _SPARE_BYTES, f"copy of allocation {id_}")
            memory.callback(target.close)
            _upload(mapping, target.address)
            held[id_] = Weights(target.address, mapping.n_bytes, memory.close)
    finally:
        for mapping in mappings.values():
            mapping.close()
    return context, held


def _upload(mapping: Mapping, address: int) -> None:
    n_bytes = min(_STAGE_BYTES, max(mapping.n_bytes, 1))
    with PinnedBuffer(n_bytes, "stage") as stage, Stream() as stream:
        for start in range(0, mapping.n_bytes, n_bytes):
            count = min(n_bytes, mapping.n_bytes - start)
            stage.view[:count] = mapping.view[start : start + count]
            stream.upload(address + start, stage.address, count)
            stream.synchronize()
