"""The reference executor: every op straight from its definition in `contract/ops.py`, in numpy.

Owns: truth for tests. Activations are never quantized, nothing is fused, nothing is fast; weights
are dequantized by the `gguf` package, so no kernel of ours is involved. Refuses: all sampling but
the plain argmax, and packed weight layouts - prepare the contract with raw places. Not imported by
any program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import numpy as np

from ds4_common.allocation import Layout
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.ops import (
    BANKS,
    LOGITS,
    OPS,
    OUTPUT_ROWS,
    PAGE_TABLE,
    POSITIONS,
    TOKENS,
)
from ds4_common.contract.validate import validate
from ds4_common.errors import ContractError, ExecutorFailure
from ds4_worker.executor.api import ExecutorConfig, Sampled, Sampling, Slice, WindowPages
from ds4_worker.executor.reference_ops import KERNELS, ROUNDINGS
from ds4_worker.executor.reference_rows import Array

__all__ = ["KERNELS", "ReferenceExecutor"]

_ROUNDED = ("kv_store", "latent_store")  # their first inputs enter the cache, one per output


class ReferenceExecutor:
    """Runs a bundle's step program. `allocations` maps allocation numbers to their bytes; `dtype`
    is that of the activations; float64 keeps the cache in float64 too, else what enters the cache
    is rounded as its type wants."""

    def __init__(
        self,
        bundle: pb.Bundle,
        allocations: Mapping[int, bytes | bytearray | memoryview],
        config: ExecutorConfig | None = None,
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        validate(bundle)
        self.config = config or ExecutorConfig(kv_dtype="f32")
        self.vocabulary = bundle.serving.model.vocabulary
        self.page_tokens = bundle.serving.model.cache.page_tokens
        per_bank = math.ceil(self.config.context_tokens / self.page_tokens)
        self.pages = self.config.pages or self.config.banks * per_bank
        self.windows: tuple[WindowPages, ...] = ()  # layers with a window keep all pages here
        self._dtype = dtype
        self._ops = _step_program(bundle).ops
        self._page_table = np.full((self.config.banks, per_bank), -1, np.int64)
        self._round = ROUNDINGS[self.config.kv_dtype if dtype is np.float32 else "f32"]
        self._widths = {b.name: b.shape[-1] for b in bundle.execution.buffers}
        self._fixed: dict[str, Array] = {PAGE_TABLE: self._page_table}
        self._cache: dict[str, Array] = {}
        histories = bundle.serving.model.cache.histories
        states = {name for h in histories if h.kind == pb.RECURRENT for name in h.planes}
        self.rewinds = self.divisible = not states
        for buffer in bundle.execution.buffers:
            if buffer.space == pb.WEIGHT:
                self._fixed[buffer.name] = _dequantize(buffer, allocations).astype(dtype)
            elif buffer.space == pb.CACHE:
                shape = (self.pages, *buffer.shape[1:])
                kept = np.float64 if buffer.name in states else dtype
                self._cache[buffer.name] = np.zeros(shape, kept)
        elements = sum(plane[0].size for plane in self._cache.values())
        self.page_bytes = elements * np.dtype(dtype).itemsize
        self._fixed |= self._cache

    def set_page(self, bank: int, index: int, page: int, history: int = 0) -> None:
        """Maps logical page `index` of a bank to a physical page."""
        _only_history(history)
        if not 0 <= page < self.pages:
            raise ExecutorFailure(f"page: got {page}, expected 0 to {self.pages - 1}")
        self._page_table[bank, index] = page

    def copy_page(self, source: int, target: int, tokens: int, history: int = 0) -> None:
        """Makes page `target` hold the first `tokens` of page `source`."""
        _only_history(history)
        for plane in self._cache.values():
            records = -(-tokens * plane.shape[1] // self.page_tokens)
            plane[target, :records] = plane[source, :records]

    def map_all_pages(self) -> None:
        """Gives every bank its own consecutive pages: for tests without a page allocator."""
        banks, per_bank = self._page_table.shape
        if banks * per_bank > self.pages:
            raise ExecutorFailure(f"pages: got {self.pages}, expected {banks * per_bank}")
        self._page_table[:] = np.arange(banks * per_bank).reshape(banks, per_bank)

    def step(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        """Runs all slices; the argmax wherever a slice asks for one."""
        wanted: list[int] = []
        samples: list[Sampling | None] = []
        end = 0
        for piece in slices:
            end += len(piece.tokens)
            if piece.sample is not None:
                wanted += range(end - 1 - len(piece.checks), end)
                samples += piece.checks
            samples.append(piece.sample)
        rows = iter(self._run(slices, wanted))
        return [_pick(next(rows), sample) if sample else None for sample in samples]

    def logits(self, slices: Sequence[Slice]) -> list[list[list[float]]]:
        """Logits of every token of every slice."""
        rows = iter(self.all_logits(slices).tolist())
        return [[next(rows) for _ in piece.tokens] for piece in slices]

    def all_logits(self, slices: Sequence[Slice]) -> Array:
        """Like `logits`, as one array [tokens of all slices, vocabulary]."""
        return self._run(slices, range(sum(len(piece.tokens) for piece in slices)))

    def close(self) -> None:
        """Drops weights and cache."""
        self._fixed.clear()
        self._cache.clear()

    def _run(self, slices: Sequence[Slice], wanted: Sequence[int]) -> Array:
        """Logits [R, vocabulary] of the rows in `wanted`."""
        held: dict[str, Array] = dict(self._fixed)
        held[TOKENS] = np.concatenate([np.asarray(piece.tokens, np.int64) for piece in slices])
        held[POSITIONS] = np.concatenate(
            [piece.start + np.arange(len(piece.tokens)) for piece in slices]
        )
        held[BANKS] = np.repeat([p.bank for p in slices], [len(p.tokens) for p in slices])
        held[OUTPUT_ROWS] = np.asarray(wanted, np.int64)
        for op in self._ops:
            spec = OPS[op.kernel]
            width = {"width": self._widths[op.out[0]]}  # of the output, if the op does not say
            page = {"page_tokens": self.page_tokens}
            attributes = {**spec.attributes, **width, **page, **op.attr}
            inputs = [held[name] if name else None for name in getattr(op, "in")]
            if op.kernel == "rope" and inputs[3] is not None:
                if self.config.context_tokens > op.attr["original_context"]:
                    inputs[2] = inputs[3]
            if op.kernel in _ROUNDED:
                stored = len(op.out)
                inputs[:stored] = [self._round(x) for x in inputs[:stored] if x is not None]
            if op.kernel == "store_rows" and self._dtype is np.float32:
                inputs[0] = np.asarray(inputs[0], np.float16)  # whatever the cache is
            # Planes that an op writes are inputs, too.
            inputs += [self._cache[name] for name in op.out if name in self._cache]
            result = KERNELS[op.kernel](inputs, attributes)
            if result is not None:
                held[op.out[-1]] = result.astype(self._dtype)
        return held[LOGITS]


def _only_history(history: int) -> None:
    if history:
        raise ExecutorFailure(f"reference executor: got history {history}, expected all in one")


def _step_program(bundle: pb.Bundle) -> pb.OpList:
    for program in bundle.serving.model.programs:
        if program.operation == pb.MIXED:
            return next(e.ops for e in bundle.execution.programs if e.name == program.name)
    raise ContractError("prepared contract: programs: got none of operation MIXED, expected one")


def _dequantize(
    buffer: pb.Buffer, allocations: Mapping[int, bytes | bytearray | memoryview]
) -> Array:
    """A weight as float32 in its declared shape."""
    if buffer.layout != Layout.RAW:
        raise ContractError(
            f"weight {buffer.name!r}: layout: got {Layout(buffer.layout).name}, expected RAW"
        )
    data = allocations[int(buffer.resource.removeprefix("alloc:"))]
    raw = np.frombuffer(data, np.uint8, buffer.bytes, buffer.offset)
    rows = raw.reshape(*buffer.shape[:-1], -1)
    kind = gguf.GGMLQuantizationType(buffer.ggml_type)
    if kind == gguf.GGMLQuantizationType.F32:
        return rows.view(np.float32)
    if kind == gguf.GGMLQuantizationType.I32:
        return rows.view(np.int32)
    values: Array = gguf.quants.dequantize(rows, kind)
    return values


def _pick(row: Array, sample: Sampling) -> Sampled:
    changed = sample.mask or sample.adjust or sample.forced >= 0
    if sample.temperature > 0 or changed:
        raise ExecutorFailure(f"reference executor: got {sample}, expected argmax")
    token = int(row.argmax())
    if sample.logprobs < 0:
        return Sampled(token)
    exact = row.astype(np.float64)
    logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    best = np.argsort(-exact, kind="stable")[: sample.logprobs]
    return Sampled(token, float(logprobs[token]), [(int(t), float(logprobs[t])) for t in best])
