"""Small weights (norms, biases, rope factors) as floats, read from the device once at load.

Owns: the check that all weights lie in memory that is there, the copies to the host, and the
conversion, which is the native library's and so of any type.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping

from ds4_common.contract import image as im
from ds4_common.cuda.memory import PinnedBuffer
from ds4_common.cuda.stream import Stream
from ds4_common.errors import ExecutorFailure
from ds4_common.quants.native import Weight, library
from ds4_worker.executor.cuda_places import floats_of, vectors_of

_ALIGN = 64


def check_allocations(image: im.Image, allocations: Mapping[int, tuple[int, int]]) -> None:
    """Every weight lies in memory that is there."""
    for number, (id_, needed) in enumerate(image.allocations):
        _, held = allocations.get(id_, (0, 0))
        if held < needed:
            raise ExecutorFailure(
                f"CUDA executor: allocation {id_} (number {number} of the program): got {held}"
                f" bytes, expected {needed} at least"
            )


def read_vectors(image: im.Image, allocations: Mapping[int, int]) -> dict[int, array[float]]:
    """Floats by number of the weight. `allocations`: device address by id."""
    vectors = [(number, image.weights[number]) for number in vectors_of(image)]
    offsets, total = [], 0
    for _, weight in vectors:
        offsets.append(total)
        total += -(-weight.n_bytes // _ALIGN) * _ALIGN
    if not total:
        return {}
    with PinnedBuffer(total, "vectors") as stage, Stream() as stream:
        for (_, weight), offset in zip(vectors, offsets, strict=True):
            id_, _ = image.allocations[weight.allocation]
            address = allocations[id_] + weight.offset
            stream.download(stage.address + offset, address, weight.n_bytes)
        stream.synchronize()
        return {
            number: _floats(number, weight, stage.address + offset)
            for (number, weight), offset in zip(vectors, offsets, strict=True)
        }


def _floats(number: int, weight: im.Weight, address: int) -> array[float]:
    rows = weight.rows * weight.experts
    values = array("f", bytes(4 * floats_of(weight)))
    raw = Weight(address, weight.ggml_type, weight.layout, rows, weight.cols)
    start, _ = values.buffer_info()
    for row in range(rows):
        if library().ds4_dequant_row(ctypes.byref(raw), row, start + 4 * row * weight.cols):
            raise ExecutorFailure(
                f"CUDA executor: weight {number}: cannot be read as floats (ggml type"
                f" {weight.ggml_type}, layout {weight.layout})"
            )
    return values
