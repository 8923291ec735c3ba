"""Runs claims in processes of their own, on the stand-in or on the device."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from helpers import cuda_stand_in
from helpers.driver import (
    memory_claims,
    order_claims,
    process_claims,
    sharing_claims,
    stream_claims,
)
from helpers.driver.bench import CLAIMS, LOSES_CONTEXT

# Importing them fills the registry.
MODULES = (memory_claims, order_claims, process_claims, sharing_claims, stream_claims)
ORDINARY = [name for name in CLAIMS if name not in LOSES_CONTEXT]
FATAL = sorted(LOSES_CONTEXT)
SECONDS = 120


def process(settings: dict[str, str] | None) -> ProcessPoolExecutor:
    """A process with those settings of the stand-in, or with the real driver for None."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, _become, (settings,))


def run(worker: ProcessPoolExecutor, name: str) -> None:
    """Raises what the claim raised, and TimeoutError for one that hangs, whose process is ended."""
    pending = worker.submit(_hold, name)
    try:
        pending.result(timeout=SECONDS)
    except TimeoutError:
        for child in multiprocessing.active_children():
            child.kill()  # or leaving the pool would wait for it
        raise


def _become(settings: dict[str, str] | None) -> None:
    if settings is not None:
        cuda_stand_in.load_here(**settings)


def _hold(name: str) -> None:
    CLAIMS[name]()
