"""Quantized matrices in the memory of CUDA kernels, beside the answer of the scalar definition."""

from __future__ import annotations

import ctypes

import numpy as np

from ds4_common.allocation import Artifact, ArtifactKind, Layout
from ds4_common.quants import QuantType, block_weights
from ds4_common.quants.native import Isa
from ds4_owner.artifacts import artifact_bytes, build_artifact
from ds4_worker.cuda import kernels
from ds4_worker.cuda.kernels import Launch, weight_unit
from ds4_worker.cuda.parameters import Matmul, Matvec
from helpers.cuda_kernels import F32, Memory, address, module_of
from helpers.quant_blocks import (
    BLOCK32_TYPES,
    FLOAT_TYPES,
    SUPER_TYPES,
    U8,
    Kernel,
)

QUANTIZED = (*BLOCK32_TYPES, *SUPER_TYPES)
ALL_TYPES = (*FLOAT_TYPES, *QUANTIZED)


def columns_of(quant: QuantType, blocks: int) -> int:
    return max(block_weights(quant), 32) * blocks


class Case:
    """Matrices of one type in device memory, activations, and the scalar answer.

    raw [experts * rows, row bytes]; x [tokens, places, cols]: the columns of each token.
    """

    def __init__(
        self, quant: QuantType, raw: U8, cols: int, x: F32, experts: int = 1, layout: int = 0
    ) -> None:
        self.quant, self.raw, self.layout, self.x = quant, raw, layout, x
        self.rows, self.cols, self.experts = len(raw) // experts, cols, experts
        self.memory = Memory()
        tall = Kernel(quant, Layout.RAW, Isa.SCALAR, raw.reshape(-1), len(raw), cols)
        columns = tall.quantize(x.reshape(-1, cols)).reshape(*x.shape[:2], -1)
        self.acts = self.memory.array(columns.shape, np.uint8, columns)
        held = raw if not layout else repacked(layout, raw, cols, experts)
        self.weight = self.memory.array(held.shape, np.uint8, held)

    def expected(self) -> F32:
        """[tokens, places, experts, rows]: every column against every matrix."""
        parts = self.raw.reshape(self.experts, self.rows, -1)
        flat = self.x.reshape(-1, self.cols)
        made = [
            Kernel(self.quant, Layout.RAW, Isa.SCALAR, part.reshape(-1), self.rows, self.cols)
            for part in parts
        ]
        return np.stack([kernel.run(flat) for kernel in made], 1).reshape(
            *self.x.shape[:2], self.experts, self.rows
        )

    def product(self, tokens: int, used: int = 1, **fields: int) -> tuple[Matvec, F32]:
        """Parameters for the first tokens, and where the outputs will be."""
        y = self.memory.array((tokens, used * self.rows + 5), np.float32)
        p = Matvec(
            weight=address(self.weight), acts=address(self.acts), y=address(y),
            act_stride=self.acts.strides[0], y_stride=y.strides[0], rows=self.rows,
            cols=self.cols, columns=tokens, experts=self.experts, used=used,
            act_columns=self.x.shape[1], **fields,
        )  # fmt: skip
        return p, y[:, : used * self.rows]

    def run(self, name: str, p: ctypes.Structure, launch: Launch, descending: bool = False) -> None:
        unit = weight_unit(self.quant, self.layout)
        module_of(unit).run(name, p, launch, descending)

    def matmul(self, p: Matvec, descending: bool = False) -> None:
        """The dense product on tensor cores."""
        whole = Matmul(product=p)
        self.run("matmul", whole, kernels.matmul_launch(whole, self.quant), descending)

    def matvec(self, columns: int, descending: bool = False, rows: int = 0, stages: int = 0) -> F32:
        """y [columns, rows]; cut as the launch has it, or so many rows to a warp and so deep a
        ring."""
        p, y = self.product(columns)
        launch = kernels.matvec_launch(p, self.quant, self.layout)
        if rows:
            p.warp_rows, p.stages = rows, stages
            shared = kernels.matvec_shared_bytes(self.quant, self.layout, min(columns, 8), stages)
            grid = (launch.grid[0], -(-self.rows // (4 * rows)), 1)
            launch = Launch(grid, launch.block, shared)
        self.run("matvec", p, launch, descending)
        return y.copy()


def repacked(layout: int, raw: U8, cols: int, experts: int) -> U8:
    """The artifact of raw rows, as the loader makes it."""
    rows = len(raw) // experts
    made = Artifact(ArtifactKind(layout), cols, rows, experts, "weight")
    out = bytearray(artifact_bytes(made.kind, cols, rows, experts))
    data = raw.tobytes()

    def read(offset: int, view: memoryview) -> None:
        view[:] = data[offset : offset + len(view)]

    build_artifact(made, 0, read, memoryview(out))
    return np.frombuffer(out, np.uint8)


def activations(rng: np.random.Generator, n: int, cols: int) -> F32:
    x = rng.standard_normal((n, cols)) * 10.0 ** rng.uniform(-3, 3, (n, 1))
    x[-1, : cols // 2] = 0.0
    return x.astype(np.float32)
