"""A model on a device: how fast an owner uploads, how fast a worker decodes, and comes back.

Owns: the same measurements as on a CPU (`speed`, `restart`) over a CUDA executor and an owner of
device memory, the rate of an upload beside that of a plain copy, what launching the graph of a
decode step costs, and what a second step under way gains.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ds4_common import client
from ds4_common.cuda.stream import Event, ExecutableGraph, Stream
from ds4_common.errors import Ds4Error
from ds4_worker import cuda_loading
from ds4_worker.bench import restart, speed
from ds4_worker.bench.report import Row, summarise
from ds4_worker.config import CudaConfig
from ds4_worker.engine.api import Generation, Output
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import ExecutorConfig, Sampled, Slice
from ds4_worker.executor.cuda import CudaExecutor

_RATE = re.compile(r"loaded .*, ([0-9.]+) GB/s")


# ---- upload --------------------------------------------------------------------------------------


def upload(
    model: Path, gigabytes: float, flags: Sequence[str], runs: int, copy_gb_per_s: float
) -> Row:
    """By the owner's own word, with reading, hashing and repacking. The file beside the model is
    sparse, so that no disk is measured."""
    rates = []
    for _ in range(runs):
        with restart.owner_with_ballast(model, gigabytes, *flags) as manifest:
            found = _RATE.search((manifest.parent / "owner.log").read_text())
            if not found:
                raise Ds4Error(f"no `loaded` line in the log of the owner of {model}")
            rates.append(float(found.group(1)))
    return summarise(
        f"upload by an owner, {gigabytes:g} GB beside the model", "GB/s", rates,
        reference=copy_gb_per_s, reference_name="copy host to device", goal=">= 0.80",
    )  # fmt: skip


# ---- decode and prefill --------------------------------------------------------------------------


class GraphClock:
    """What the graphs of steps took so far: their launches by the host's clock, and all from the
    first of a step to the last by the device's."""

    def __init__(self) -> None:
        self.host_seconds = self.device_seconds = 0.0
        self._running = False
        self._start, self._end = Event(timing=True), Event(timing=True)

    def launch(self, graph: ExecutableGraph, stream: Stream) -> None:
        if not self._running:
            stream.record(self._start)
        self._running = True
        started = time.perf_counter()
        graph.launch(stream)
        self.host_seconds += time.perf_counter() - started
        stream.record(self._end)

    def take(self) -> None:
        """After a step; waits for it."""
        self._running = False
        self._end.synchronize()
        self.device_seconds += self._end.milliseconds_since(self._start) / 1e3

    def close(self) -> None:
        self._start.close()
        self._end.close()


class _TimedGraph(ExecutableGraph):
    """One of an executor, which keeps owning it."""

    def __init__(self, graph: ExecutableGraph, clock: GraphClock) -> None:
        self._timed, self._clock = graph, clock

    def launch(self, stream: Stream) -> None:
        self._clock.launch(self._timed, stream)


def _timed(graphs: Mapping[int, ExecutableGraph], clock: GraphClock) -> dict[int, ExecutableGraph]:
    return {size: _TimedGraph(graph, clock) for size, graph in graphs.items()}


class TimedCudaExecutor(CudaExecutor):
    """Can say what the launches of its graphs take; otherwise as the plain one."""

    _clock: GraphClock | None = None

    @contextmanager
    def timing(self) -> Iterator[GraphClock]:
        plain, clock = (self._graphs, self._draw_graphs), GraphClock()
        self._graphs, self._draw_graphs = (_timed(graphs, clock) for graphs in plain)
        self._clock = clock
        try:
            yield clock
        finally:
            (self._graphs, self._draw_graphs), self._clock = plain, None
            clock.close()

    def map_own_pages(self) -> None:
        """Gives every bank its own consecutive pages."""
        for bank in range(self.config.banks):
            for index in range(self.pages_per_bank):
                self.set_page(bank, index, bank * self.pages_per_bank + index)

    def step(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        drawn = super().step(slices)
        if self._clock is not None:
            self._clock.take()
        return drawn


@contextmanager
def mapped(
    manifest: Path, cuda: CudaConfig, config: ExecutorConfig
) -> Iterator[tuple[TimedCudaExecutor, speed.Runnable]]:
    """The owner's model, attached as `ds4-server --cuda` attaches it."""
    with ExitStack() as held:
        connection = client.connect(str(manifest), role="worker", wait_seconds=60)
        held.enter_context(connection)
        blobs = connection.map_blobs(("image.cuda", "contract"))
        image, _ = cuda_loading.program(blobs["image.cuda"].view, blobs["contract"].view)
        executor, weights = cuda_loading.open_executor(
            connection, image, cuda, config, kind=TimedCudaExecutor
        )
        assert isinstance(executor, TimedCudaExecutor)
        for memory in weights:
            held.callback(memory.close)
        held.callback(executor.close)
        yield executor, speed.Runnable(executor, speed.image_work(image))


def executor_rows(
    manifest: Path,
    cuda: CudaConfig,
    config: ExecutorConfig,
    depths: Sequence[int],
    steps: int,
    runs: int,
    copy_gb_per_s: float,
) -> list[Row]:
    """Decode against the copy bandwidth, prefill, and the share of a step that a launch takes."""
    with mapped(manifest, cuda, config) as (executor, model):
        copy = copy_gb_per_s * 1e9
        rows = speed.decode(model, depths, steps, runs, lambda: copy)
        if config.banks > 1:
            rows += speed.decode(model, depths[:1], steps, runs, lambda: copy, config.banks)
        rows += speed.prefill(model, sorted({32, max(depths)}), runs)
        rows += _launch_share(executor, depths[0], steps, runs)
        for streams in sorted({1, config.banks}):
            rows.append(_two_under_way(executor, depths[0], streams, steps, runs))
    # Their goals are those of CPUs.
    return [replace(row, name=f"CUDA: {row.name}", goal=_goal(row)) for row in rows]


def _goal(row: Row) -> str:
    return row.goal if "launch" in row.name else ""


def _launch_share(executor: TimedCudaExecutor, depth: int, steps: int, runs: int) -> list[Row]:
    """Of decode steps of one stream: the calls that launch graphs, and all but their time on the
    device (packing, the launches, results to the host)."""
    speed.fill(executor, 0, depth)
    whole, launches, others = [], [], []
    for _ in range(runs):
        with executor.timing() as clock:
            started = time.perf_counter()
            for step in range(steps):
                executor.step([Slice(0, depth + step, [0], speed.GREEDY)])
            seconds = time.perf_counter() - started
        whole.append(seconds / steps * 1e6)
        launches.append(clock.host_seconds / steps * 1e6)
        others.append((seconds - clock.device_seconds) / steps * 1e6)
    step_us = statistics.median(whole)
    return [
        summarise(name, "us", samples, reference=step_us, reference_name="step", goal=goal)
        for name, samples, goal in (
            ("decode step, launches of its graphs", launches, "<= 0.03"),
            ("decode step, beside its graphs", others, ""),
        )
    ]


class _NoText:
    """A detokenizer that costs nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _two_under_way(executor: CudaExecutor, depth: int, streams: int, steps: int, runs: int) -> Row:
    """Decoding through the engine with two steps under way, beside one; the two take turns."""

    def rate(frames: int) -> float:
        core = EngineCore(executor, _NoText, reuse_prefixes=False, frames=frames)
        sequences = [
            core.sequence(Generation(prompt=[1 + n] * depth, max_tokens=steps + 1, temperature=0.0))
            for n in range(streams)
        ]
        for sequence in sequences:
            core.submit(sequence)
        while any(sequence.prefilling for sequence in sequences):
            core.step()
        tokens, start = 0, time.perf_counter()
        while (events := core.step()) is not None:
            tokens += sum(isinstance(event, Output) for _, event in events)
        return tokens / (time.perf_counter() - start)

    one, two = [], []
    for _ in range(runs):
        one.append(rate(1))
        two.append(rate(2))
    return summarise(
        f"decode through the engine, {streams} streams, two steps under way", "tokens/s", two,
        reference=statistics.median(one), reference_name="one step",
    )  # fmt: skip


# ---- restarts ------------------------------------------------------------------------------------


def restarts(manifest: Path, flags: Sequence[str], runs: int) -> list[Row]:
    """With kernels in the cache: the first start, which may compile, does not count."""
    rows = restart.measure(manifest, runs, ", --cuda", *flags)
    return [replace(row, goal="") for row in rows]  # those of CPUs
