"""Names for the engine's work on a profiler's timeline (NVTX).

Owns: finding the nvtx package, and what a step is called. Only asked for when a profiler listens:
the package takes longer to import than a worker to start. Sampling is part of the executor's one
call per step: no range of its own can begin there, so the name of the step says that it is inside.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

from ds4_worker.engine.step import Step

Annotate: TypeAlias = Callable[[str], AbstractContextManager[object]]


def nvtx_annotate() -> Annotate | None:
    """Opens a named range; None, told in one line, where the package is not installed."""
    try:
        nvtx = importlib.import_module("nvtx")
    except ModuleNotFoundError:
        print("ds4-server: no NVTX ranges: pip install nvtx", file=sys.stderr, flush=True)
        return None
    return lambda name: nvtx.annotate(name, domain="ds4")


def step_name(step: Step) -> str:
    """`prefill`, `decode`, or `prefill+decode` when prompts and running streams share the step, and
    `+sample` where it ends with drawing tokens: not in the middle of a prompt."""
    if not step.prompt_tokens:
        parts = "decode"
    else:
        tokens = sum(len(piece.tokens) for piece in step.slices)
        parts = "prefill" if tokens == step.prompt_tokens else "prefill+decode"
    draws = any(piece.sample is not None for piece in step.slices)
    return f"{parts}+sample" if draws else parts
