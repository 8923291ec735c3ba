"""Device memory in the layouts that an owner of it builds by default, through a worker: the answers
are those of the CPU. On the stand-in, with the product's own kernels built by g++."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4_common import client
from ds4_common.allocation import Layout
from ds4_common.contract.image_read import read_image
from ds4_worker.executor.api import ExecutorConfig
from golden import tiny
from helpers import cuda_stand_in, stack
from helpers.cuda_executors import image_kernels
from helpers.device_stack import device
from helpers.expert_model import write_experts

pytestmark = pytest.mark.skipif(bool(cuda_stand_in.missing()), reason=cuda_stand_in.missing())
# Small: the stand-in runs kernels as fibers, and every batch size is captured.
SHAPE = ("--ctx", "96", "--max-seqs", "1", "--prefill-chunk", "8", "--mixed-prefill-quantum", "4")
CONFIG = ExecutorConfig(banks=1, context_tokens=96, batch_tokens=8, batch_outputs=32)
BODY = {
    "prompt": " ".join(tiny.TEXTS[5:17]), "max_tokens": 8, "temperature": 0.7, "seed": 5,
    "ignore_eos": True,
}  # fmt: skip


@pytest.fixture
def run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ds4-") as folder:
        yield Path(folder)


def answer(port: int) -> Any:
    status, body = stack.request(port, "POST", "/v1/completions", BODY)
    assert status == 200, body
    return body["choices"][0]["text"]


def cpu_answer(model: Path, run: Path) -> Any:
    port = stack.free_port()
    with stack.owner(model, run, "--backend", "memfd"), stack.worker(run / "w", port, *SHAPE):
        return answer(port)


def image_of(run: Path, name: str = "image.cuda") -> bytes:
    with client.connect(str(run / "w"), "inspect") as connection:
        return bytes(connection.blob(name).view)


def test_experts_and_dense_weights_in_aligned_layouts_answer_as_on_the_cpu(
    run: Path, tmp_path: Path
) -> None:
    model = write_experts(tmp_path / "experts.gguf")
    expected = cpu_answer(model, run)
    with device() as made:
        made.owner(model, run)
        image = read_image(image_of(run))
        assert {Layout(weight.layout) for weight in image.weights} == {
            Layout.RAW, Layout.IQ2_XXS_ALIGNED, Layout.IQ2_XS_ALIGNED, Layout.Q2_K_ALIGNED,
            Layout.Q8_0_ALIGNED,
        }  # fmt: skip
        kernels = image_kernels(image, CONFIG, tmp_path / "kernels")
        environment = made.environment() | {"DS4_CUDA_KERNELS": str(kernels)}
        port = stack.free_port()
        with stack.worker(run / "w", port, "--cuda", *SHAPE, **environment):
            assert answer(port) == expected


def test_workers_on_the_cpu_and_on_a_device_answer_alike_from_one_owners_ranges(
    run: Path, tmp_path: Path
) -> None:
    model = write_experts(tmp_path / "experts.gguf")
    flags = ("--backend", "memfd", "--cpu-layout", "raw")
    with device() as made, stack.owner(model, run, *flags):
        image = read_image(image_of(run, "image.cpu"))
        assert {Layout(weight.layout) for weight in image.weights} == {
            Layout.RAW, Layout.IQ2_XXS_ALIGNED, Layout.IQ2_XS_ALIGNED, Layout.Q2_K_ALIGNED,
        }  # fmt: skip
        port = stack.free_port()
        with stack.worker(run / "w", port, *SHAPE):
            expected = answer(port)
        kernels = image_kernels(image, CONFIG, tmp_path / "kernels")
        environment = made.environment() | {"DS4_CUDA_KERNELS": str(kernels)}
        with stack.worker(run / "w", port, "--cuda", "--cuda-copy", *SHAPE, **environment):
            assert answer(port) == expected
