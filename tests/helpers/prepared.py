"""Prepares a GGUF file the short way: one allocation that is the file itself, raw layouts.

For tests of recipes and executors that need no owner process.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds4_common.allocation import Layout, TensorPlace
from ds4_common.contract.prepared_model_pb2 import Bundle
from ds4_common.gguf import LogicalModel, Metadata
from ds4_owner.prepare import prepare_frontend, prepare_model

ALLOCATION = 0
Build = Callable[..., Bundle]  # of a model that differs by what is given


@dataclass(frozen=True)
class Prepared:
    """A contract, its frontend blob and the bytes of its allocations."""

    bundle: Bundle
    frontend: bytes
    allocations: dict[int, memoryview]


def raw_places(model: LogicalModel) -> dict[str, TensorPlace]:
    """Every tensor where it lies in the file."""
    return {
        t.name: TensorPlace(
            "base", t.name, t.ggml_type, t.dims, Layout.RAW, ALLOCATION, t.file_offset, t.n_bytes
        )
        for t in model.tensors
    }


def prepare_places(metadata: Metadata, places: Mapping[str, TensorPlace]) -> Bundle:
    return prepare_model(metadata, places, served_id="test", fingerprint="fnv1a-p16m-v1:0")


def prepare_file(path: Path) -> Prepared:
    """Prepares a single-file model."""
    with LogicalModel.open(path) as model, path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        bundle = prepare_places(model.metadata, raw_places(model))
        frontend = prepare_frontend(model.metadata, bundle)
    return Prepared(bundle, frontend, {ALLOCATION: data})
