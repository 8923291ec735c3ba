"""Checked-in sources that a program wrote: the program still writes the same."""

from __future__ import annotations

from ds4_common.native import generate_iq_grids


def test_the_code_books_are_those_of_the_gguf_package() -> None:
    assert generate_iq_grids.TARGET.read_text() == generate_iq_grids.source_text()


def test_the_code_books_of_the_gpu_kernels_are_those_too() -> None:
    assert generate_iq_grids.CUDA_TARGET.read_text() == generate_iq_grids.cuda_text()
