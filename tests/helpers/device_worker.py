"""A model, and workers that serve it from device memory: the stand-in's, or this machine's device.

Owns: which of the two tests use (DS4_TEST_GPU=1: the device), the kernels that a worker needs on
the stand-in, and the answers of the CPU. `make gpu-test` can be rehearsed: then the stand-in is
"this machine's device", and everything else is as on a real one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ds4_common.cuda.device import SIMULATED_VARIABLE
from ds4_worker.executor.api import ExecutorConfig
from golden import tiny
from golden.gemma3.cases import CASES as GEMMA3
from helpers import cuda_stand_in, stack
from helpers.cuda_executors import kernel_folder
from helpers.device_stack import Device, device
from helpers.executors import GREEDY, cpu_executor, generate
from helpers.prepared import prepare_file
from helpers.stack import Program

ON_DEVICE = os.environ.get("DS4_TEST_GPU") == "1"
SIMULATED = not ON_DEVICE or os.environ.get(SIMULATED_VARIABLE) == "1"
MISSING = "" if ON_DEVICE else cuda_stand_in.missing()
MARKS = [pytest.mark.gpu] if ON_DEVICE else [pytest.mark.skipif(bool(MISSING), reason=MISSING)]
STAND_IN = pytest.mark.skipif(ON_DEVICE, reason="needs the stand-in driver")
CASE = GEMMA3[0]
PROMPT, COUNT = [3, 14, 15, 9, 26] * 3, 12
FLAGS = ("--max-seqs", "2", "--prefill-chunk", "16", "--mixed-prefill-quantum", "8")
BODY: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}


class Model:
    """A model, and the kernels that it needs on the stand-in."""

    def __init__(
        self, path: Path, config: ExecutorConfig, folder: Path, *, kernels: bool = True
    ) -> None:
        self.path, self.prepared, self.config = path, prepare_file(path), config
        self.environment = {}
        if SIMULATED and kernels:
            built = kernel_folder(self.prepared, config, folder / "kernels")
            self.environment["DS4_CUDA_KERNELS"] = str(built)

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """The CPU's."""
        executor = cpu_executor(self.prepared, self.config)
        drawn = generate(executor, prompt, count, GREEDY)
        executor.close()
        return [sampled.token for sampled in drawn]

    def text(self) -> str:
        """The CPU's answer to PROMPT; of `tiny_model` only."""
        return "".join(tiny.TEXTS[token] for token in self.answer(PROMPT, COUNT))


def tiny_model(folder: Path) -> Model:
    config = ExecutorConfig(threads=1, banks=2, context_tokens=CASE.context, batch_tokens=16)
    return Model(tiny.write_gguf(CASE, folder / "model.gguf"), config, folder)


class RealDevice(Device):
    """This machine's, with whatever else is on it; programs see of it what this run sees."""

    def environment(self, **_: str) -> dict[str, str]:
        names = ("DS4_SIM_", "DS4_CUDA_")
        return {name: value for name, value in os.environ.items() if name.startswith(names)}

    def used_bytes(self) -> int:
        return 0


@contextmanager
def this_device(**settings: str) -> Iterator[Device]:
    """`settings`: of the stand-in."""
    if not ON_DEVICE:
        with device(**settings) as made:
            yield made
        return
    real = RealDevice()
    try:
        yield real
    finally:
        real.end()


def launch(
    on_device: Device, model: Model, run: Path, port: int, *flags: str, **more: str
) -> Program:
    """A worker that may not get far. `more`: settings of the stand-in."""
    if more.pop("library_path", None) == "":
        environment = {"LD_LIBRARY_PATH": ""}
    else:
        environment = {**model.environment, **on_device.environment(**more)}
    arguments = ("--manifest", str(run / "w"), "--port", str(port), *FLAGS, *flags)
    program = Program.start("ds4_worker.cli", *arguments, **environment)
    on_device.programs.append(program)
    return program


@contextmanager
def worker(
    on_device: Device, model: Model, run: Path, port: int, *flags: str, **more: str
) -> Iterator[Program]:
    program = launch(on_device, model, run, port, "--cuda", *flags, **more)
    program.wait_for("ready")
    yield program


def answer(port: int) -> str:
    status, reply = stack.request(port, "POST", "/v1/completions", {"prompt": PROMPT, **BODY})
    assert status == 200, reply
    return str(reply["choices"][0]["text"])
