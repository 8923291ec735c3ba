"""`ds4-bench gpu`: what a CUDA device does with weights, beside what it does at best.

Owns: its flags, the order of the parts, and the rates of plain copies, measured first, that
kernels, tokens and uploads are compared with. Without a device it ends with the line and the exit
code of the probe. Needs a device that nobody else uses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4_common.cuda.device import Context, Device, probe
from ds4_worker.bench import gpu_kernels, gpu_memory, gpu_model, processes
from ds4_worker.bench.report import Row
from ds4_worker.config import CudaConfig, cubin_folder
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.executor.cuda_code import Code, compiled_code, simulated_code

Tell = Callable[[Sequence[Row]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and how large."""

    model: Path
    runs: int
    depths: Sequence[int]  # of decode, in tokens
    steps: int
    streams: int
    device: int
    buffer_bytes: int
    attach_gb: Sequence[float]
    upload_gb: float
    cuda: CudaConfig


def _sizes(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [0.0]
    if min(found) <= 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected sizes above 0 as in 1,10,100")
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", type=int, default=0, help="gpu: CUDA ordinal (default 0)")
    add("--gpu-mb", type=int, default=1024, help="gpu: of copies and of matrices (default 1024)")
    add("--attach-gb", type=_sizes, default="1,10,100", help="gpu: of ranges (default 1,10,100)")
    add("--upload-gb", type=float, default=8.0, help="gpu: beside the model (default 8)")
    add("--cuda-cache", default="", help="gpu: folder of compiled kernels, as of ds4-server")


def measure(
    options: argparse.Namespace,
    model: Callable[[], Path],
    environment: Mapping[str, str],
    tell: Tell,
) -> None:
    """Hands rows to `tell` as they are there. Raises what `probe` raises, before anything else."""
    device = probe(options.device)
    plan = Plan(
        model=model(), runs=options.runs, depths=options.depths, steps=options.steps,
        streams=options.streams, device=options.device,
        buffer_bytes=max(1, options.gpu_mb) << 20, attach_gb=options.attach_gb,
        upload_gb=options.upload_gb,
        cuda=CudaConfig(
            cache=cubin_folder(options.cuda_cache, environment),
            kernels=environment.get("DS4_CUDA_KERNELS", ""),
        ),
    )  # fmt: skip
    print(device.describe(), file=sys.stderr)
    with Context(device) as context:
        tell(copies := gpu_memory.copies(plan.buffer_bytes, plan.runs))
        inside, up = (row.median for row in copies)
        tell(gpu_kernels.matvec(_code(device, plan.cuda), plan.buffer_bytes, plan.runs, inside))
        tell(gpu_memory.attach(context, plan.attach_gb, plan.runs))
    owner = ("--backend", "vmm", "--device", str(plan.device))
    tell([gpu_model.upload(plan.model, plan.upload_gb, owner, plan.runs, up)])
    _model(plan, owner, inside, tell)


def _model(plan: Plan, owner: Sequence[str], copy_gb_per_s: float, tell: Tell) -> None:
    with tempfile.TemporaryDirectory(prefix="ds4-bench-") as folder:
        with processes.owner(plan.model, Path(folder), *owner) as manifest:
            context_tokens = max(32, *plan.depths) + plan.steps
            config = ExecutorConfig(banks=plan.streams, context_tokens=context_tokens)
            tell(
                gpu_model.executor_rows(
                    manifest, plan.cuda, config, plan.depths, plan.steps, plan.runs, copy_gb_per_s
                )
            )
            flags = ["--cuda", "--cuda-cache", plan.cuda.cache]
            tell(gpu_model.restarts(manifest, flags, plan.runs))


def _code(device: Device, cuda: CudaConfig) -> Code:
    if cuda.kernels:
        return simulated_code(device, Path(cuda.kernels))
    return compiled_code(device, Path(cuda.cache), lambda line: print(line, file=sys.stderr))
