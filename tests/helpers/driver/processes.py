"""Runs claims in processes of their own, on the stand-in or on the device."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from ds4_common.cuda.device import Context, probe
from ds4_common.errors import CudaContextLost
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


class Claimant:
    """A process that holds claims, one after the other. One that fails takes its process with it,
    and so does one that lost the context: what comes next has a fresh one."""

    def __init__(self, settings: dict[str, str] | None) -> None:
        self._settings = settings
        self._pool = process(settings)

    def hold(self, name: str) -> None:
        """Raises what the claim raised, and TimeoutError for one that hangs."""
        fit = False
        try:
            fit = run(self._pool, name)
        finally:
            if not fit:
                self.close()
                self._pool = process(self._settings)

    def close(self) -> None:
        self._pool.shutdown()


def process(settings: dict[str, str] | None) -> ProcessPoolExecutor:
    """A process with those settings of the stand-in, or with the real driver for None."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, _become, (settings,))


def run(worker: ProcessPoolExecutor, name: str) -> bool:
    """Whether the process is fit for another claim. Raises what the claim raised, and TimeoutError
    for one that hangs, whose process is ended."""
    pending = worker.submit(_hold, name)
    try:
        return pending.result(timeout=SECONDS)
    except TimeoutError:
        for child in multiprocessing.active_children():
            child.kill()  # or leaving the pool would wait for it
        raise


def _become(settings: dict[str, str] | None) -> None:
    if settings is not None:
        cuda_stand_in.load_here(**settings)


def _hold(name: str) -> bool:
    CLAIMS[name]()
    try:
        with Context(probe()) as context:
            context.synchronize()
    except CudaContextLost:
        return False
    return True
