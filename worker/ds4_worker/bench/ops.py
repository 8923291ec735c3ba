"""Where the time of a token goes: a table by op, and what the program costs beside its kernels.

Owns: names for the sections of a lowered program, and summing the executor's profile by them. Equal
sections (same ops over weights of the same type and size) are one row. What a section takes beyond
its busiest thread's tasks is the program's own: handing out tasks, waiting, changing over; so is
what the native call takes around the sections. Readings of the clock are not in any figure.

A second figure, without a goal, is how long a thread is in no task at all, as a mean over threads:
to that belong also uneven shares, and the small ops that one thread runs while the others wait.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from ds4_common.allocation import Layout
from ds4_common.contract import image as im
from ds4_common.contract.lower import lower_image
from ds4_common.contract.validate import parse_bundle
from ds4_common.quants import QuantType
from ds4_worker.bench.report import Row, summarise
from ds4_worker.bench.speed import GREEDY, Mapped, fill
from ds4_worker.executor.api import Slice
from ds4_worker.executor.cpu import Spent

_OP_NAMES = {
    value: name.removeprefix("OP_").lower()
    for name, value in vars(im).items()
    if name.startswith("OP_")
}
_SAMPLER, _AROUND = "sample", "around the sections"


def section_names(contract: memoryview) -> list[str]:
    """A name for each section of the program, then of the sampler and what lies around them."""
    image = lower_image(parse_bundle(bytes(contract)))
    return [*(_section_name(image, section) for section in image.sections), _SAMPLER, _AROUND]


def _section_name(image: im.Image, section: im.Section) -> str:
    return " + ".join(_op_name(image, op) for op in section.ops)


def _op_name(image: im.Image, op: im.ImageOp) -> str:
    name = _OP_NAMES[op.kind]
    if op.kind not in (im.OP_MATMUL, im.OP_MATMUL_EXPERTS):
        return name
    weight = image.weights[op.weight]
    packed = "" if weight.layout == Layout.RAW else f" {Layout(weight.layout).name}"
    return f"{name} {QuantType(weight.ggml_type).name}{packed} {weight.rows}x{weight.cols}"


def measure(model: Mapped, depth: int, steps: int, runs: int) -> list[Row]:
    """One stream at `depth`: microseconds per token of each kind of section, as shares of the
    whole, the costliest first; last what the program costs beside its kernels, and how long a
    thread has no task."""
    names = section_names(model.contract)
    fill(model.executor, 0, depth)
    profiles = [_profile(model, depth, steps) for _ in range(runs)]
    whole = [sum(section.seconds for section in profile) / steps * 1e6 for profile in profiles]
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0] * runs)
    for run, profile in enumerate(profiles):
        for name, section in zip(names, profile, strict=True):
            by_name[name][run] += section.seconds / steps * 1e6
    counts = {name: names.count(name) for name in by_name}
    rows = [
        summarise(
            f"{counts[name]} x {name}",
            "us",
            samples,
            reference=statistics.median(whole),
            reference_name="of",
        )
        for name, samples in by_name.items()
    ]
    rows.sort(key=lambda row: -row.median)
    threads = model.executor.threads
    beside = [_beside_kernels(profile) / steps * 1e6 for profile in profiles]
    idle = [_without_task(profile, threads) / steps * 1e6 for profile in profiles]
    name = f"program of {len(names) - 2} sections, beside its kernels, per token"
    return [
        *rows,
        summarise(name, "us", beside, goal="<= 80"),
        summarise(f"a thread of {threads} without a task, per token", "us", idle),
    ]


def _profile(model: Mapped, depth: int, steps: int) -> list[Spent]:
    executor, token = model.executor, 0
    executor.profile(True)
    for step in range(steps):
        (result,) = executor.step([Slice(0, depth + step, [token], GREEDY)])
        assert result is not None
        token = result.token
    return executor.profile(False)


def _beside_kernels(profile: Sequence[Spent]) -> float:
    return sum(section.seconds - section.busy_seconds for section in profile)


def _without_task(profile: Sequence[Spent], threads: int) -> float:
    return sum(section.seconds - section.work_seconds / threads for section in profile)
