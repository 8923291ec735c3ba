"""Decode of a mixture of experts whose two-bit experts lie raw, aligned, packed or as planes.

Owns: `ds4-bench experts`: one owner serves the file's blocks; the other layouts are made of them in
this process, in memory of their own, so that all forms of one model run in turn, a few steps each,
and what others do to the machine meets all. Raises Ds4Error when two forms draw different tokens.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ds4_common import client
from ds4_common.allocation import Layout
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.lower import lower_cpu
from ds4_common.contract.validate import parse_bundle
from ds4_common.errors import Ds4Error, NativeLibraryError
from ds4_common.quants import ALIGNED_LAYOUTS, QuantType, layout_bytes
from ds4_common.quants.native import library
from ds4_worker.bench import processes, speed, synthetic
from ds4_worker.bench.report import Row, summarise
from ds4_worker.executor.api import ExecutorConfig, Slice
from ds4_worker.executor.cpu import CpuExecutor

Form = Mapping[QuantType, Layout]  # of experts by type; other tensors stay as they are
_PLANES = {QuantType.IQ2_XXS: Layout.IQ2_PLANES, QuantType.IQ2_XS: Layout.IQ2_PLANES}
FORMS: dict[str, Form] = {
    "raw": {},
    "aligned": ALIGNED_LAYOUTS,
    "aligned, Q2_K packed": {**ALIGNED_LAYOUTS, QuantType.Q2_K: Layout.X8},
    "planes, Q2_K packed": {**_PLANES, QuantType.Q2_K: Layout.X8},
}
OWNER_FLAGS = (
    "--cpu-layout", "raw", "--no-repack-iq2-aligned", "--no-repack-q2k-aligned",
)  # fmt: skip
SHORT = 16  # tokens before a decode
MADE = 1 << 20  # number of the allocation that a form makes
Sources = dict[int, tuple[int, int]]


class _Shape(ctypes.Structure):
    """`ds4_repack_shape` of native/repack.h."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("in_dim", "out_dim", "groups", "units", "unit_rows", "dst_bytes")
    )


def _write(buffer: pb.Buffer, layout: Layout, source: int, target: int, n_bytes: int) -> None:
    rows, cols = prod(buffer.shape[:-1]), buffer.shape[-1]
    if layout is Layout.X8:
        refused = library().ds4_pack_rows(buffer.ggml_type, source, target, 0, rows, cols)
    elif layout is Layout.IQ2_PLANES:
        refused = library().ds4_planes_pack(buffer.ggml_type, source, target, rows, cols)
    else:
        unit = 2 if layout is Layout.Q2_K_ALIGNED else 1
        shape = _Shape(cols, buffer.shape[-2], buffer.shape[0], rows // unit, unit, n_bytes)
        repack = library().ds4_repack
        repack.argtypes = (
            ctypes.c_int, ctypes.POINTER(_Shape), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
            ctypes.c_void_p,
        )  # fmt: skip
        refused = repack(layout, shape, source, 0, shape.units, target)
    if refused:
        raise NativeLibraryError(f"{buffer.name}: no layout {layout.name}; build the library anew")


@contextmanager
def _laid_out(contract: bytes, sources: Sources, form: Form) -> Iterator[tuple[bytes, Sources]]:
    """The image and the memory of the model with its experts in that form."""
    bundle = parse_bundle(contract)
    by_number: dict[int, Layout] = {int(t): layout for t, layout in form.items()}
    chosen, end = [], 0
    for buffer in bundle.execution.buffers:
        layout = by_number.get(buffer.ggml_type)
        if buffer.space == pb.WEIGHT and len(buffer.shape) == 3 and layout is not None:
            rows, cols = prod(buffer.shape[:-1]), buffer.shape[-1]
            size = layout_bytes(buffer.ggml_type, layout, rows, cols)
            chosen.append((buffer, layout, end, size))
            end += -(-size // 64) * 64
    with mmap.mmap(-1, max(end, 1)) as area:
        area.madvise(mmap.MADV_HUGEPAGE)
        hold = ctypes.c_char.from_buffer(area)
        base = ctypes.addressof(hold)
        for buffer, layout, offset, size in chosen:
            start = sources[int(buffer.resource.removeprefix("alloc:"))][0] + buffer.offset
            _write(buffer, layout, start, base + offset, size)
            buffer.resource, buffer.offset = f"alloc:{MADE}", offset
            buffer.layout, buffer.bytes = layout, size
        if chosen:
            bundle.resources.add(id=f"alloc:{MADE}", kind="allocation", bytes=end)
        try:
            yield lower_cpu(bundle), sources | {MADE: (base, end)}
        finally:
            del hold


@dataclass(slots=True)
class _Runs:
    """One form's executor and figures; `tokens` are what it drew."""

    executor: CpuExecutor
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def decode(self, steps: int) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            position = SHORT + len(self.tokens)
            last = self.tokens[-1] if self.tokens else 0
            (drawn,) = self.executor.step([Slice(0, position, [last], speed.GREEDY)])
            assert drawn
            self.tokens.append(drawn.token)
        self.rates.append(steps / (time.perf_counter() - start))
        self.cpu_ms.append(1e3 * (time.process_time() - cpu) / steps)


def measure(manifest: Path, threads: int, steps: int, runs: int) -> list[Row]:
    """Rows of an owner's model that was loaded with `OWNER_FLAGS`."""
    context = SHORT + steps * (runs + 1)
    config = ExecutorConfig(threads=threads, banks=1, context_tokens=context)
    with (
        client.connect(str(manifest), role="worker", wait_seconds=60) as connection,
        ExitStack() as held,
    ):
        contract = bytes(connection.map_blobs(("contract",))["contract"].view)
        ids = [
            int(r.id.removeprefix("alloc:"))
            for r in parse_bundle(contract).resources
            if r.kind == "allocation"
        ]
        weights = connection.map_allocations(ids)
        sources = {number: (m.address, m.n_bytes) for number, m in weights.items()}
        forms = {}
        for name, form in FORMS.items():
            image, memory = held.enter_context(_laid_out(contract, sources, form))
            executor = CpuExecutor(image, memory, config)
            held.callback(executor.close)
            executor.map_own_pages()
            executor.step([Slice(0, 0, [7 * i % executor.vocabulary for i in range(SHORT)])])
            forms[name] = _Runs(executor)
        for _ in range(runs + 1):
            for each in forms.values():
                each.decode(steps)
    for name, each in forms.items():
        if each.tokens != forms["raw"].tokens:
            raise Ds4Error(f"experts {name}: other tokens than from raw blocks")
    rows = []
    for name, each in forms.items():
        raw = forms["raw"]
        for what, unit, mine, of_raw in (
            ("decode", "tokens/s", each.rates[1:], raw.rates[1:]),
            ("CPU time", "ms/token", each.cpu_ms[1:], raw.cpu_ms[1:]),
        ):
            reference = None if each is raw else statistics.median(of_raw)
            reference_name = "" if each is raw else "raw"
            rows.append(
                summarise(f"experts {name}: {what}", unit, mine, reference=reference,
                          reference_name=reference_name)
            )  # fmt: skip
    return rows


def run(shape: str, types: str, words: Path, threads: int, steps: int, runs: int) -> list[Row]:
    """Makes a model of that shape and those types, and measures it."""
    with tempfile.TemporaryDirectory(prefix="ds4-bench-") as name:
        folder = Path(name)
        path = folder / "experts.gguf"
        synthetic.write(path, synthetic.SHAPES[shape], synthetic.types(types), words)
        with processes.owner(path, folder, *OWNER_FLAGS) as manifest:
            return measure(manifest, threads, steps, runs)
