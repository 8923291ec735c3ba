"""Matrix-vector kernels of decoding on a device, as shares of its copy bandwidth.

Owns: synthetic matrices that together exceed any cache, one captured graph that goes over all of
them as a decode step goes over its weights, and the bytes of weights per second of the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ds4_common.allocation import Layout
from ds4_common.cuda.memory import DeviceBuffer, PinnedBuffer
from ds4_common.cuda.module import Module, Parameters
from ds4_common.cuda.stream import ExecutableGraph, Stream
from ds4_common.quants import QuantType, tensor_bytes
from ds4_common.quants.native import Isa
from ds4_worker.bench.gpu_memory import timed
from ds4_worker.bench.kernels import COLS, activations, random_pattern
from ds4_worker.bench.report import Row, summarise
from ds4_worker.cuda import kernels
from ds4_worker.cuda.parameters import Matvec
from ds4_worker.executor.cuda_code import Code

ROWS = 16384  # of a matrix: with COLS columns that of a large feed-forward layer
SECTION = 64  # bytes to which the up to three sections of a layout are padded
CASES = (
    (QuantType.Q8_0, Layout.RAW, 0.80),
    (QuantType.Q8_0, Layout.Q8_0_ALIGNED, 0.80),
    (QuantType.Q4_K, Layout.RAW, 0.80),
    (QuantType.Q2_K, Layout.RAW, 0.80),
    (QuantType.Q2_K, Layout.Q2_K_ALIGNED, 0.80),
    (QuantType.IQ2_XXS, Layout.RAW, 0.70),
    (QuantType.IQ2_XXS, Layout.IQ2_XXS_ALIGNED, 0.70),
)


def matvec(code: Code, n_bytes: int, runs: int, copy_gb_per_s: float) -> list[Row]:
    """Every case over `n_bytes` of weights, at least one matrix."""
    rows = []
    with Stream() as stream:
        for quant, layout, goal in CASES:
            with _pass(stream, code, _Matrices(quant, layout, n_bytes)) as (graph, weights):

                def work(graph: ExecutableGraph = graph) -> None:
                    graph.launch(stream)

                seconds = timed(stream, runs, work)
            rows.append(
                summarise(
                    f"matvec {quant.name} {layout.name}", "GB/s",
                    [weights / s / 1e9 for s in seconds], reference=copy_gb_per_s,
                    reference_name="copy on the device", goal=f">= {goal:.2f}",
                )
            )  # fmt: skip
    return rows


@dataclass(frozen=True, slots=True)
class _Matrices:
    """As many of a type as fit `n_bytes`; smaller ones when not even one would."""

    quant: QuantType
    layout: Layout
    n_bytes: int

    @property
    def rows(self) -> int:
        fitting = self.n_bytes // tensor_bytes(self.quant, 1, COLS) // 16 * 16
        return max(16, min(ROWS, fitting))

    @property
    def weight_bytes(self) -> int:
        """That a pass over one of them reads."""
        return tensor_bytes(self.quant, self.rows, COLS)

    @property
    def stride(self) -> int:
        return -(-(self.weight_bytes + 3 * SECTION) // 256) * 256

    @property
    def count(self) -> int:
        return max(1, self.n_bytes // self.stride)


@contextmanager
def _pass(stream: Stream, code: Code, matrices: _Matrices) -> Iterator[tuple[ExecutableGraph, int]]:
    """A graph that multiplies all matrices with one column, and the bytes of weights it reads."""
    with ExitStack() as held:

        def device_memory(n_bytes: int, label: str) -> int:
            return held.enter_context(DeviceBuffer(n_bytes, label)).address

        unit = kernels.weight_unit(matrices.quant, matrices.layout)
        module = Module(code(unit), unit.label)
        held.callback(module.close)
        weights = device_memory(matrices.stride * matrices.count, "matrices")
        pattern = random_pattern(matrices.quant)
        _fill(stream, weights, matrices.stride * matrices.count, pattern)
        with activations(matrices.quant, 1, Isa.SCALAR) as (column, act_bytes):
            acts = device_memory(act_bytes, "activations")
            with PinnedBuffer(act_bytes, "activations") as stage:
                stage.view[:] = _bytes_at(column, act_bytes)
                stream.upload(acts, stage.address, act_bytes)
                stream.synchronize()
        p = Matvec(
            acts=acts, y=device_memory(4 * matrices.rows, "outputs"), act_stride=act_bytes,
            y_stride=4 * matrices.rows, rows=matrices.rows, cols=COLS, columns=1, experts=1,
            used=1, act_columns=1,
        )  # fmt: skip
        grid, block, shared_bytes = kernels.matvec_launch(p, matrices.quant, matrices.layout)
        function = module.function("matvec")
        if shared_bytes > 48 << 10:
            function.allow_dynamic_shared(shared_bytes)
        stream.begin_capture()
        for number in range(matrices.count):
            p.weight = weights + number * matrices.stride
            function.launch(stream, grid, block, Parameters([p]), shared_bytes)
        recorded = stream.end_capture()
        held.callback(recorded.close)
        graph = recorded.instantiate()
        held.callback(graph.close)
        yield graph, matrices.weight_bytes * matrices.count


def _fill(stream: Stream, address: int, n_bytes: int, pattern: bytes) -> None:
    """Repeats a pattern; what is there doubles with each copy."""
    done = min(len(pattern), n_bytes)
    with PinnedBuffer(done, "pattern") as stage:
        stage.view[:] = pattern[:done]
        stream.upload(address, stage.address, done)
        while done < n_bytes:
            more = min(done, n_bytes - done)
            stream.copy(address + done, address, more)
            done += more
        stream.synchronize()


def _bytes_at(address: int, n_bytes: int) -> bytes:
    return ctypes.string_at(address, n_bytes)
