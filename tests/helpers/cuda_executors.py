"""CUDA executors on whatever device this process sees: weights copied to it, every page mapped.

Owns: the device memory that stands for an owner's ranges, and the choice of code - a compiler's for
a real device, kernels built by g++ for the stand-in.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from ds4_common.contract import image as im
from ds4_common.contract.lower import lower_image
from ds4_common.cuda.device import Context, Device, probe
from ds4_common.cuda.memory import DeviceBuffer, PinnedBuffer
from ds4_common.cuda.stream import Stream
from ds4_worker.cuda.kernels import ARTIFACT_LAYOUTS, KERNELS, Unit, weight_unit
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.executor.cuda import CudaExecutor
from ds4_worker.executor.cuda_cache import kv_type
from ds4_worker.executor.cuda_code import Code, compiled_code, library_name
from ds4_worker.executor.cuda_places import Addresses, Places, plan_places
from ds4_worker.executor.cuda_program import Program, partial_bytes
from helpers.cuda_kernels import build_unit
from helpers.fetch_model import cache_folder
from helpers.prepared import Prepared


def code_for(device: Device) -> Code:
    if device.simulated:
        return lambda unit: build_unit(unit).read_bytes()
    return compiled_code(
        device, cache_folder() / "cubins", lambda line: print(line, file=sys.stderr)
    )


BLOCKS = {
    "step": 1 << 40,
    "table": 2 << 40,
    "fixed": 3 << 40,
    "work": 4 << 40,
    "cache": 5 << 40,
    "draws": 7 << 40,
    "counts": 8 << 40,
}
WEIGHTS = 6 << 40  # where nothing is: for plans that nobody runs


def planned(image: im.Image, config: ExecutorConfig) -> Program:
    """The program of an image at made-up addresses."""
    places = places_of(image, config)
    allocations = {id_: WEIGHTS for id_, _ in image.allocations}
    magnitudes = (1.0,) * len(places.turns)
    addresses = Addresses(image, config, places, BLOCKS, allocations, magnitudes)
    return Program(image, config, places, addresses)


def places_of(image: im.Image, config: ExecutorConfig) -> Places:
    return plan_places(
        image, config, partial_bytes=partial_bytes(image, config)[0],
        kv_type=kv_type(config.kv_dtype),
    )  # fmt: skip


def kernel_folder(prepared: Prepared, config: ExecutorConfig, folder: Path) -> Path:
    """What a worker on the stand-in gets for DS4_CUDA_KERNELS: the kernels of that model, and of
    the layouts in which an owner may hold it."""
    return image_kernels(lower_image(prepared.bundle, any_layout=True), config, folder)


def image_kernels(image: im.Image, config: ExecutorConfig, folder: Path) -> Path:
    program = planned(image, config)
    folder.mkdir()
    launches = (*program.launches(1), *program.launches(config.batch_tokens))
    types = {weight.ggml_type for weight in image.weights}
    units = {weight_unit(kind, at) for at, kind in ARTIFACT_LAYOUTS.items() if kind in types}
    units |= {Unit(KERNELS[name].file) for name in ("sample", "count_tokens")}
    units |= {launch.unit for launch in launches}
    for unit in units:
        (folder / library_name(unit)).symlink_to(build_unit(unit))
    return folder


class Bench:
    """A context, and executors in it. Ends with all of them."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.context = self._stack.enter_context(Context(probe()))

    def image(self, prepared: Prepared) -> im.Image:
        return lower_image(prepared.bundle, any_layout=True)

    def executor(
        self, prepared: Prepared, config: ExecutorConfig, image: im.Image | None = None
    ) -> CudaExecutor:
        """An executor whose banks have all their pages, one after the other; of the model's own
        image or of a changed one."""
        allocations = {
            id_: (self._upload(data), len(data)) for id_, data in prepared.allocations.items()
        }
        code = code_for(self.context.device)
        image = image or self.image(prepared)
        made = CudaExecutor(image, allocations, config, self.context, code)
        self._stack.callback(made.close)
        made.map_own_pages()
        return made

    def _upload(self, data: memoryview) -> int:
        # A kernel reads whole pieces of 16 bytes; ranges of an owner end at a granule.
        memory = self._stack.enter_context(DeviceBuffer(len(data) + 64, "weights"))
        with PinnedBuffer(len(data), "weights") as stage, Stream() as stream:
            stage.view[:] = data
            stream.upload(memory.address, stage.address, len(data))
            stream.synchronize()
        return memory.address

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
