"""CPU executors over prepared models: raw or packed weights, every page mapped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds4_common.allocation import Layout
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.lower import lower_cpu
from ds4_common.gguf import GgmlType
from ds4_common.quants import cpu_layout, layout_bytes, pack, pack_planes
from ds4_worker.executor.api import Executor, ExecutorConfig, Sampled, Sampling, Slice
from ds4_worker.executor.cpu import CpuExecutor
from helpers.prepared import Prepared

GREEDY = Sampling(temperature=0.0)


def packed(prepared: Prepared) -> Prepared:
    """The same model with every matrix in the layout its CPU kernels like best, in allocation 0.
    Experts follow each other, so that a tensor of them is one tall matrix."""
    bundle = pb.Bundle()
    bundle.CopyFrom(prepared.bundle)
    data = bytearray()
    for buffer in bundle.execution.buffers:
        if buffer.space != pb.WEIGHT:
            continue
        source = prepared.allocations[int(buffer.resource.removeprefix("alloc:"))]
        raw = bytes(source[buffer.offset : buffer.offset + buffer.bytes])
        if len(buffer.shape) > 1 and buffer.ggml_type != GgmlType.I32:
            rows, cols = math.prod(buffer.shape[:-1]), buffer.shape[-1]
            buffer.layout = cpu_layout(buffer.ggml_type, rows, cols)
            if buffer.layout != Layout.RAW:
                layout = Layout(buffer.layout)
                target = bytearray(layout_bytes(buffer.ggml_type, layout, rows, cols))
                write = pack if layout is Layout.X8 else pack_planes
                write(buffer.ggml_type, raw, target, rows, cols)
                raw, buffer.bytes = bytes(target), len(target)
        data += bytes(-len(data) % 64)
        buffer.resource, buffer.offset = "alloc:0", len(data)
        data += raw
    for resource in bundle.resources:
        if resource.kind == "allocation":
            resource.bytes = len(data)
    return Prepared(bundle, prepared.frontend, {0: memoryview(data).toreadonly()})


def cpu_executor(prepared: Prepared, config: ExecutorConfig) -> CpuExecutor:
    """An executor whose banks have all their pages, one after the other."""
    made = CpuExecutor(lower_cpu(prepared.bundle), prepared.allocations, config)
    made.map_own_pages()
    return made


def logits(executor: CpuExecutor, tokens: Sequence[int], bank: int = 0) -> npt.NDArray[np.float32]:
    """Logits [tokens, vocabulary] of a fresh sequence."""
    rows = executor.logit_rows(Slice(bank, 0, tokens))
    return np.stack([np.array(row, np.float32) for row in rows])


def generate(
    executor: Executor, prompt: Sequence[int], count: int, sampling: Sampling, bank: int = 0
) -> list[Sampled]:
    """Prefills the prompt in one step, then decodes token by token."""
    drawn: list[Sampled] = []
    tokens, start = list(prompt), 0
    for index in range(count):
        how = Sampling(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed,
            index, sampling.logprobs, sampling.mask,
        )  # fmt: skip
        (result,) = executor.step([Slice(bank, start, tokens, how)])
        assert result is not None
        drawn.append(result)
        start += len(tokens)
        tokens = [result.token]
    return drawn
