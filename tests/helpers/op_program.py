"""A program of a few ops between a table of given rows and the logits, for tests of single ops.

Token t brings row t of the table; what the last op writes comes back as logits, value for value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.ops import BANKS, LOGITS, OPS, OUTPUT_ROWS, PAGE_TABLE, POSITIONS, TOKENS
from ds4_common.gguf import GgmlType
from ds4_worker.executor.api import ExecutorConfig, Slice
from ds4_worker.executor.reference import ReferenceExecutor
from helpers.bundles import valid_bundle
from helpers.executors import cpu_executor, logits
from helpers.prepared import Prepared

Array = npt.NDArray[Any]
PLACE = (POSITIONS, BANKS, PAGE_TABLE)
_TYPES = {np.dtype(np.float32): GgmlType.F32, np.dtype(np.int32): GgmlType.I32}


@dataclass
class OpProgram:
    """Buffers and ops so far; `rows` is the table, one row per token."""

    rows: Array
    context: int = 64
    page_tokens: int = 64
    data: bytearray = field(default_factory=bytearray)
    buffers: list[pb.Buffer] = field(default_factory=list)
    histories: list[pb.History] = field(default_factory=list)
    ops: list[pb.Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        pages = -(-self.context // self.page_tokens)
        for name in (TOKENS, POSITIONS, BANKS, OUTPUT_ROWS):
            self._add(name, pb.I32, pb.TRANSPORT, (0,))
        self._add(PAGE_TABLE, pb.I32, pb.TRANSPORT, (0, pages))
        table = self.weight("table", self.rows)
        self.op("embed", (TOKENS, table), (self.scratch("x", self.rows.shape[1]),))

    def weight(self, name: str, values: Array) -> str:
        self.data += bytes(-len(self.data) % 64)
        self.buffers.append(
            pb.Buffer(
                name=name, dtype=pb.GGML_BLOCKS, space=pb.WEIGHT, shape=values.shape,
                resource="alloc:0", offset=len(self.data), bytes=values.nbytes,
                ggml_type=_TYPES[values.dtype],
            )
        )  # fmt: skip
        self.data += values.tobytes()
        return name

    def scratch(self, name: str, width: int) -> str:
        return self._add(name, pb.F32, pb.SCRATCH, (0, width))

    def plane(self, name: str, dim: int, ratio: int = 1, vectors: int = 0) -> str:
        """Rows for every `ratio` tokens, or as many running `vectors`."""
        per_record = self.page_tokens if vectors else ratio
        shape = (0, self.page_tokens // per_record, vectors or 1, dim)
        self._add(name, pb.F32 if vectors else pb.F16, pb.CACHE, shape)
        kind = pb.RECURRENT if vectors else pb.PAGED_LATENT
        self.histories.append(pb.History(kind=kind, planes=[name], tokens_per_record=per_record))
        return name

    def op(
        self, kernel: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: float
    ) -> None:
        message = pb.Op(kernel=kernel, attr=attributes, out=outputs)
        absent = [""] * (len(OPS[kernel].inputs) - len(inputs))
        getattr(message, "in").extend([*inputs, *absent])
        self.ops.append(message)

    def prepared(self, last: str, width: int) -> Prepared:
        """The program that ends in `last`, of that width: the first of its logits."""
        bundle = valid_bundle()
        model = bundle.serving.model
        words = max(len(self.rows), width + 1)  # tokens and logits are of one vocabulary
        zeros = self.weight("zeros", np.zeros((len(self.rows), words - width), np.float32))
        self.op("embed", (TOKENS, zeros), (self.scratch("padding", words - width),))
        padded = self.scratch("padded", words)
        self.op("join_heads", (last, "padding"), (padded,), heads=1)
        self._add(LOGITS, pb.F32, pb.TRANSPORT, (0, words))
        self.op("gather_rows", (padded, OUTPUT_ROWS), (LOGITS,))
        bundle.serving.context_tokens = self.context
        bundle.serving.eos_ids[:] = [0]
        model.vocabulary = model.input_vocabulary = words
        model.frontend.ClearField("bos_id")
        model.frontend.ClearField("eos_id")
        model.cache.page_tokens = self.page_tokens
        del model.cache.histories[:], bundle.execution.buffers[:]
        model.cache.histories.extend(self.histories)
        bundle.execution.buffers.extend(self.buffers)
        del bundle.execution.programs[0].ops.ops[:]
        bundle.execution.programs[0].ops.ops.extend(self.ops)
        bundle.execution.completion.row_words = words
        for resource in bundle.resources:
            if resource.kind == "allocation":
                resource.bytes = len(self.data)
        return Prepared(bundle, b"", {0: memoryview(bytes(self.data))})

    def _add(self, name: str, dtype: pb.DType, space: pb.Space, shape: tuple[int, ...]) -> str:
        self.buffers.append(pb.Buffer(name=name, dtype=dtype, space=space, shape=shape))
        return name


def cpu_rows(
    prepared: Prepared, tokens: Sequence[int], isa: str = "auto", threads: int = 2
) -> Array:
    """What the program makes of a fresh sequence."""
    executor = cpu_executor(prepared, _config(prepared, isa=isa, threads=threads))
    rows = logits(executor, tokens)
    executor.close()
    return rows[:, : _width(prepared)]


def exact_rows(prepared: Prepared, tokens: Sequence[int]) -> Array:
    made = ReferenceExecutor(prepared.bundle, prepared.allocations, _config(prepared))
    made.map_all_pages()
    return made.all_logits([Slice(0, 0, tokens)])[:, : _width(prepared)]


def _width(prepared: Prepared) -> int:
    """Of what the program computes."""
    buffers = {b.name: b for b in prepared.bundle.execution.buffers}
    return buffers[LOGITS].shape[1] - buffers["padding"].shape[1]


def _config(prepared: Prepared, **changes: Any) -> ExecutorConfig:
    context = prepared.bundle.serving.context_tokens
    return ExecutorConfig(
        banks=1, context_tokens=context, batch_tokens=512, batch_outputs=512, **changes
    )
