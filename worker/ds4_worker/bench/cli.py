"""`ds4-bench`: what this machine does with a model, beside what it could do at best.

Owns: the command line and the choice of measurements. Every figure is a median of several runs, and
stands beside a reference measured in the same run. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from ds4_common.errors import Ds4Error
from ds4_worker.bench import (
    attach,
    compare,
    death,
    experts,
    flags,
    gpu,
    kernels,
    layouts,
    load,
    machine,
    ops,
    owners,
    peer,
    processes,
    restart,
    serve,
    speculate,
    speed,
    succession,
    synthetic,
)
from ds4_worker.bench.report import Row, print_table, summarise, write_csv
from ds4_worker.executor.api import ExecutorConfig


def _model(options: argparse.Namespace) -> Path:
    if options.model:
        if not os.path.isfile(options.model):
            raise Ds4Error(f"-m {options.model}: no such file")
        return Path(options.model)
    cache = Path(os.environ.get("DS4_CACHE") or Path.home() / ".cache" / "ds4")
    for path in sorted(cache.glob("*.gguf")):
        return path
    raise Ds4Error(f"no model: give -m FILE, or fetch the small one into {cache} with `make model`")


def _threads(options: argparse.Namespace) -> int:
    return int(options.threads) or len(os.sched_getaffinity(0))


def _bandwidth(options: argparse.Namespace) -> tuple[Callable[[], float], Row]:
    """Measures it in bytes/s, and a row of what it is now."""
    threads = _threads(options)
    measure = partial(machine.read_bandwidth, threads)
    return measure, summarise(f"read bandwidth, {threads} threads", "GB/s", [measure() / 1e9])


def _with_owner(options: argparse.Namespace, measure: Callable[[Path], list[Row]]) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="ds4-bench-") as folder:
        with processes.owner(_model(options), Path(folder)) as manifest:
            return measure(manifest)


def _executor(options: argparse.Namespace, manifest: Path, *, prefill: bool) -> list[Row]:
    bandwidth, row = _bandwidth(options)
    depths: list[int] = options.depths
    context = max(depths) + max(512, 2 * options.steps)
    config = ExecutorConfig(
        threads=_threads(options), banks=options.streams, context_tokens=context
    )
    with speed.mapped(manifest, config) as model:
        if prefill:
            rows = speed.prefill(model, [32, 512], options.runs)
            for depth in depths:
                rows += speed.prefill(model, [512], options.runs, depth)
            return [row, *rows, speed.overhead(model, options.steps, options.runs)]
        rows = speed.decode(model, depths, options.steps, options.runs, bandwidth)
        if options.streams > 1:
            rows += speed.decode(
                model, depths[:1], options.steps, options.runs, bandwidth, options.streams
            )
        rows.append(speed.constrained(model, options.steps, options.runs))
        return [row, *rows]


def run_restart(options: argparse.Namespace) -> list[Row]:
    return restart.run(_model(options), options.runs, options.extra_gb)


class _Told(list[Row]):
    """Rows of what takes minutes: each is told on stderr when it is there."""

    def tell(self, more: Sequence[Row]) -> None:
        for row in more:
            beside = f", {row.ratio:.2f} of {row.reference_name}" if row.ratio else ""
            told = f"{row.name}: {row.median:.2f} {row.unit}{beside} (n={row.runs})"
            print(told, file=sys.stderr)
        self.extend(more)


def run_succession(options: argparse.Namespace) -> list[Row]:
    runs, restarts, per_second = options.runs, options.restarts, options.per_second
    rows = _Told()
    tell = rows.tell
    with restart.owner_with_ballast(_model(options), 0) as manifest:
        tell([succession.standby(manifest, runs)])
        tell([succession.zygote(manifest, runs)])
        tell([succession.plain_exec(manifest, runs)])
        tell(owners.reexec(manifest, runs))
        tell(succession.parking_cost(manifest, runs))
        for kills in (False, True):
            tell(succession.under_load(manifest, restarts, per_second, kills=kills))
    tell(owners.adoption(_model(options), runs))
    tell(death.measure(options.mapped_gb, runs))
    return rows


def run_write(options: argparse.Namespace) -> list[Row]:
    """Writes `--out`; the time it took is all there is to say of it."""
    if not options.out:
        raise Ds4Error("write: give --out FILE, a model file to make")
    return [_written(options, Path(options.out))]


def _written(options: argparse.Namespace, path: Path) -> Row:
    shape = synthetic.SHAPES[options.shape]
    started = time.perf_counter()
    n_bytes = synthetic.write(path, shape, synthetic.types(options.types), _model(options))
    rate = n_bytes / (time.perf_counter() - started) / 1e9
    return summarise(
        f"{options.shape} {options.types}, {n_bytes / 1e9:.2f} GB written", "GB/s", [rate]
    )


def run_large(options: argparse.Namespace) -> list[Row]:
    """The small model's restarts stand beside those of the large one."""
    rows = _Told()
    rows.tell(small := restart.run(_model(options), options.runs, 0))
    with tempfile.TemporaryDirectory(prefix="ds4-bench-") as folder:
        path = Path(folder) / "large.gguf"
        rows.tell([_written(options, path)])
        rows.tell(load.measure(path, options.runs))
        large = argparse.Namespace(**vars(options) | {"model": str(path)})
        with restart.owner_with_ballast(path, 0) as manifest:
            rows.tell(attach.measure(manifest, options.runs))
            more = restart.measure(manifest, options.runs, ", large")
            rows.tell(restart.beside(more, small, "small"))
            rows.tell(_executor(large, manifest, prefill=False))
            rows.tell(_executor(large, manifest, prefill=True))
    return rows


def run_attach(options: argparse.Namespace) -> list[Row]:
    with restart.owner_with_ballast(_model(options), 0) as manifest:
        rows = attach.measure(manifest, options.runs)
        if options.clients:
            rows += attach.measure_many(manifest, options.runs, options.clients)
    if options.extra_gb:
        with restart.owner_with_ballast(_model(options), options.extra_gb) as manifest:
            rows += attach.measure(manifest, options.runs, f", {options.extra_gb:g} GB more")
    return rows


def run_load(options: argparse.Namespace) -> list[Row]:
    return load.measure(_model(options), options.runs)


def run_decode(options: argparse.Namespace) -> list[Row]:
    rows = _with_owner(options, lambda manifest: _executor(options, manifest, prefill=False))
    return rows + run_peer(options)


def run_prefill(options: argparse.Namespace) -> list[Row]:
    return _with_owner(options, lambda manifest: _executor(options, manifest, prefill=True))


def run_ops(options: argparse.Namespace) -> list[Row]:
    depth = options.depths[0]
    config = ExecutorConfig(
        threads=_threads(options), banks=1, context_tokens=depth + max(512, options.steps)
    )

    def measure(manifest: Path) -> list[Row]:
        with speed.mapped(manifest, config) as model:
            return ops.measure(model, depth, options.steps, options.runs)

    return _with_owner(options, measure)


def run_speculate(options: argparse.Namespace) -> list[Row]:
    config = ExecutorConfig(threads=_threads(options), banks=options.streams, context_tokens=2048)

    def measure(manifest: Path) -> list[Row]:
        with speed.mapped(manifest, config) as model:
            return speculate.measure(model, "auto", options.streams, options.runs)

    return _with_owner(options, measure)


def run_serve(options: argparse.Namespace) -> list[Row]:
    return _with_owner(
        options,
        lambda manifest: serve.measure(
            manifest, _threads(options), options.serve_streams, options.tokens, options.runs
        ),
    )


def run_peer(options: argparse.Namespace) -> list[Row]:
    if not options.peer_cmd:
        return []
    return _with_owner(
        options, lambda manifest: peer.measure(manifest, options.peer_cmd, options.runs)
    )


def run_compare(options: argparse.Namespace) -> list[Row]:
    bandwidth, row = _bandwidth(options)
    rows = _Told([row])
    compare.measure(
        options.compare.split(","),
        _model(options),
        compare.Peer(options.peer_single, options.peer_batched),
        _threads(options),
        options.steps,
        options.prompt,
        options.depth,
        options.runs,
        bandwidth,
        rows.tell,
    )
    return rows


def run_experts(options: argparse.Namespace) -> list[Row]:
    return experts.run(
        options.shape, options.types, _model(options), _threads(options), options.steps,
        options.runs,
    )  # fmt: skip


def run_kernels(options: argparse.Namespace) -> list[Row]:
    rows = []
    for kernel in kernels.run(_threads(options)):
        name, reading = f"{kernel.type} {kernel.layout}", kernel.read_gb_per_s
        for place, rate in (("L3", kernel.l3_gb_per_s), ("DRAM", kernel.dram_gb_per_s)):
            row = summarise(
                f"{name}, one column, {place}",
                "GB/s",
                [rate],
                reference=reading,
                reference_name="read",
            )
            rows.append(row)
        rows.append(summarise(f"{name}, 64 columns", "GOP/s", [kernel.gemm_gop_per_s]))
    return rows


def run_gpu(options: argparse.Namespace) -> list[Row]:
    rows = _Told()
    gpu.measure(options, partial(_model, options), os.environ, rows.tell)
    return rows


def run_all(options: argparse.Namespace) -> list[Row]:
    return [
        row
        for name in ("load", "attach", "restart", "decode", "prefill")
        for row in MEASUREMENTS[name][0](options)
    ]


MEASUREMENTS: dict[str, tuple[Callable[[argparse.Namespace], list[Row]], str]] = {
    "restart": (run_restart, "kill -9 and exec to the next HTTP answer and the next token"),
    "succession": (
        run_succession,
        "restarts of workers and owners, alone and under load",
    ),
    "attach": (run_attach, "connect to mapped, tokenizer and image ready"),
    "load": (run_load, "GB/s from file to ready ranges, against cp to tmpfs"),
    "write": (run_write, "no figure: a model file of real shape and random weights, --out FILE"),
    "large": (run_large, "the same file made, loaded, attached to, restarted and run"),
    "decode": (run_decode, "tokens/s at several depths, against read bandwidth"),
    "prefill": (run_prefill, "tokens/s and GOP/s of whole prompts"),
    "ops": (run_ops, "where a token's time goes, op by op, and what the program adds"),
    "serve": (run_serve, "what HTTP and streaming cost, against the engine alone"),
    "speculate": (run_speculate, "tokens/s with drafts and without, where they help and not"),
    "compare": (run_compare, "decode, prompts and streams by type, beside another engine"),
    "experts": (run_experts, "decode with two-bit experts raw, aligned, packed and as planes"),
    "layouts": (
        layouts.run,
        "other layouts against raw by type and instruction set; --out: the tables",
    ),
    "kernels": (run_kernels, "every matmul kernel, against read bandwidth"),
    "gpu": (run_gpu, "copies, kernels, attach, upload, tokens/s, restarts on a CUDA device"),
    "all": (run_all, "load, attach, restart, decode, prefill"),
}


def _end(number: int, frame: object) -> NoReturn:
    """Not at once: the processes that are measured go first."""
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    texts = {name: text for name, (_, text) in MEASUREMENTS.items()}
    options = flags.build_parser(texts).parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    try:
        rows = MEASUREMENTS[options.what][0](options)
    except Ds4Error as error:
        print(f"ds4-bench: {error}", file=sys.stderr)
        return error.exit_code
    print_table(rows)
    if options.csv:
        with open(options.csv, "w", newline="") as out:
            write_csv(rows, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
