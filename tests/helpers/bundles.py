"""A valid contract to spoil, and short ways to its parts.

For tests of validation: `REFUSALS`-style tables change one thing and expect one message.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.validate import parse_bundle, validate
from ds4_common.errors import ContractError
from helpers.prepared import prepare_file
from helpers.tiny_gguf import TinyLlama, write_llama

Change = Callable[[pb.Bundle], object]
Refusal = tuple[str, Change, str]  # what is wrong, how to make it so, part of the message


@functools.cache
def valid_bytes() -> bytes:
    """A valid bundle that uses every op, biases and rope factors included."""
    spec = TinyLlama(n_layers=1, biases=True, rope_freqs=True)
    with tempfile.TemporaryDirectory() as folder:
        bundle = prepare_file(write_llama(Path(folder) / "tiny.gguf", spec)).bundle
    return bundle.SerializeToString(deterministic=True)


def valid_bundle() -> pb.Bundle:
    return parse_bundle(valid_bytes())


def check_refusal(refusal: Refusal) -> None:
    """Asserts that the change makes validation fail with that message."""
    _, change, message = refusal
    bundle = valid_bundle()
    change(bundle)
    with pytest.raises(ContractError) as raised:
        validate(bundle)
    assert message in str(raised.value)


def both(*changes: Change) -> Change:
    """One change made of several."""

    def change(bundle: pb.Bundle) -> None:
        for one in changes:
            one(bundle)

    return change


def program(bundle: pb.Bundle) -> pb.Program:
    return bundle.serving.model.programs[0]


def op(bundle: pb.Bundle, kernel: str) -> Any:
    return next(op for op in bundle.execution.programs[0].ops.ops if op.kernel == kernel)


def ops(bundle: pb.Bundle) -> Any:
    return bundle.execution.programs[0].ops.ops


def buffer(bundle: pb.Bundle, name: str) -> pb.Buffer:
    return next(buffer for buffer in bundle.execution.buffers if buffer.name == name)


def put_input(message: Any, index: int, name: str) -> None:
    getattr(message, "in")[index] = name
