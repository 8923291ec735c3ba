"""Filling allocations: every byte in place, whatever the threads and the way of reading."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import xxhash

from ds4_common import quants
from ds4_common.allocation import ArtifactKind, Layout
from ds4_common.errors import BackendError, BudgetError, GgufError, LoaderError
from ds4_common.gguf import GgmlType, LogicalModel
from ds4_common.quants.native import best_isa
from ds4_owner import budget, cli, job, loader_plan, loading
from ds4_owner.backends import Fill, Memory, open_backend
from ds4_owner.channel import Channel
from ds4_owner.fill import Filler, Piece, Target, pieces_of_group, pieces_of_range
from ds4_owner.plan import LoadPlan
from ds4_owner.reader import ModelReader, Scratch, resident
from helpers.split import split_gguf
from helpers.tiny_gguf import write_tensors

TENSORS = {
    "token_embd.weight": ((256, 640), GgmlType.Q4_1),
    "blk.0.attn_norm.weight": ((256,), GgmlType.F32),
    "blk.0.attn_q.weight": ((256, 256), GgmlType.Q4_0),
    "blk.0.ffn_down.weight": ((512, 520), GgmlType.Q5_1),
    "blk.0.ffn_norm.weight": ((256,), GgmlType.F32),
    "blk.0.ffn_up.weight": ((256, 513), GgmlType.Q8_0),
    "blk.1.ffn_up.weight": ((256, 512), GgmlType.Q6_K),
    "output.weight": ((256, 640), GgmlType.F16),
}
DROP_SECONDS = 10.0
FLAGS = ["--base", "x", "--scope", "base", "--dry-run", "--backend", "memfd"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tensors(tmp_path_factory.mktemp("loader") / "model.gguf", TENSORS)


@pytest.fixture
def opened(model_path: Path) -> Iterator[LogicalModel]:
    with LogicalModel.open(model_path) as model:
        yield model


def make_plan(model: LogicalModel, *flags: str) -> LoadPlan:
    return loader_plan.make_plan(cli.parse([*FLAGS, *flags], {}), {"base": model}, 4096)[0]


def run_fill(
    model: LogicalModel,
    plan: LoadPlan,
    *,
    threads: int = 2,
    piece_bytes: int = 20_000,
    chunk_bytes: int = 1 << 20,
    direct_io: bool = True,
    how: Fill = "pwrite",
    before_chunk: Callable[[int], None] = lambda n_bytes: None,
) -> tuple[dict[int, bytes], dict[int, str]]:
    """Bytes and hashes of every allocation."""
    backend = open_backend("memfd")
    with ExitStack() as files:
        memory: dict[int, Memory] = {}
        for a in plan.allocations:
            memory[a.id] = backend.create(str(a.id), a.alloc_bytes)
            files.callback(memory[a.id].close)
        reader = ModelReader(model, direct_io=direct_io)
        files.callback(reader.close)
        filler = Filler(
            pieces(model, plan, piece_bytes), {"base": reader},
            {i: Target(m.fd, m.n_bytes) for i, m in memory.items()}, loader_plan.pack_rows,
            fill=how, threads=threads, chunk_bytes=chunk_bytes,
            before_chunk=before_chunk, advance=lambda n_bytes: None,
        )  # fmt: skip
        hashes = filler.run()
        data = {a.id: os.pread(memory[a.id].fd, a.n_bytes, 0) for a in plan.allocations}
    return data, hashes


def pieces(model: LogicalModel, plan: LoadPlan, piece_bytes: int) -> Iterator[Piece]:
    for a in plan.allocations:
        if a.artifact is None:
            yield from pieces_of_range(a, piece_bytes)
        else:
            yield from pieces_of_group(a, plan.members(a.id), model, piece_bytes)


def logical(model: LogicalModel, offset: int, n_bytes: int) -> bytes:
    data = bytearray(n_bytes)
    model.read_into(offset, data)
    return bytes(data)


def check_contents(model: LogicalModel, plan: LoadPlan, data: dict[int, bytes]) -> None:
    """Raw ranges hold the file's bytes; every place unpacks to its tensor's bytes."""
    for a in plan.allocations:
        if a.artifact is None:
            assert data[a.id] == logical(model, a.source_offset, a.source_bytes)
    for place in plan.places:
        tensor = model.tensor(place.name)
        assert tensor is not None
        held = data[place.allocation][place.offset : place.offset + place.n_bytes]
        if place.layout is not Layout.RAW:
            raw = bytearray(tensor.n_bytes)
            unpack = quants.unpack if place.layout is Layout.X8 else quants.unpack_planes
            unpack(place.ggml_type, held, raw, math.prod(place.dims[1:]), place.dims[0])
            held = bytes(raw)
        assert held == logical(model, tensor.offset, tensor.n_bytes)


@pytest.mark.parametrize("layout", ["raw", "packed"])
def test_every_tensor_arrives_intact(opened: LogicalModel, layout: str) -> None:
    plan = make_plan(opened, "--cpu-layout", layout)
    data, hashes = run_fill(opened, plan)
    check_contents(opened, plan, data)
    packed = [a for a in plan.allocations if a.artifact is not None]
    assert len(packed) == (1 if layout == "packed" else 0)
    for a in plan.allocations:
        assert hashes[a.id] == xxhash.xxh3_128_hexdigest(data[a.id])


def test_only_matrices_with_faster_kernels_leave_the_raw_ranges(opened: LogicalModel) -> None:
    plan = make_plan(opened, "--cpu-layout", "packed")
    layouts = {place.name: place.layout for place in plan.places}
    assert layouts.pop("blk.0.ffn_up.weight") is Layout.RAW  # 513 rows are no multiple of eight
    assert layouts.pop("output.weight") is Layout.RAW
    assert layouts.pop("blk.0.attn_norm.weight") is Layout.RAW
    assert layouts.pop("blk.0.ffn_norm.weight") is Layout.RAW
    assert set(layouts.values()) == {Layout.X8}
    group = next(a for a in plan.allocations if a.artifact is not None)
    assert group.artifact is not None
    assert group.artifact.kind is ArtifactKind.CPU_GROUP
    assert {p.name for p in plan.members(group.id)} == {*layouts} | {
        "blk.0.attn_norm.weight",
        "blk.0.ffn_norm.weight",
    }


def test_bytes_and_hashes_do_not_depend_on_threads_pieces_or_way_of_reading(
    opened: LogicalModel,
) -> None:
    plan = make_plan(opened, "--cpu-layout", "packed")
    expected = run_fill(opened, plan, threads=1)
    for threads in (1, 2, 3, 8):
        for piece_bytes in (4096, 77_777, 1 << 20):
            for direct_io in (True, False):
                got = run_fill(
                    opened, plan, threads=threads, piece_bytes=piece_bytes, direct_io=direct_io
                )
                assert got == expected


def test_split_models_are_filled_across_shards(model_path: Path, tmp_path: Path) -> None:
    paths = split_gguf(model_path, tmp_path / "split", 3)
    with LogicalModel.open(paths[0]) as model:
        for layout in ("raw", "packed"):
            plan = make_plan(model, "--cpu-layout", layout)
            check_contents(model, plan, run_fill(model, plan)[0])


@pytest.mark.parametrize("how", ["pwrite", "advise", "fallocate", "map"])
def test_every_way_of_writing_gives_the_same_bytes(opened: LogicalModel, how: Fill) -> None:
    plan = make_plan(opened, "--cpu-layout", "packed")
    data, _ = run_fill(opened, plan, how=how)
    check_contents(opened, plan, data)


def test_direct_and_buffered_reads_agree_at_every_alignment(opened: LogicalModel) -> None:
    size = opened.n_bytes
    buffered = ModelReader(opened, direct_io=False)
    scratch = Scratch()
    for shard in opened.shards:  # the page cache must not hold it, or O_DIRECT is not chosen
        os.fsync(shard.file.fileno())
        os.posix_fadvise(shard.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    direct = ModelReader(opened, direct_io=True)
    for offset, n_bytes in ((0, 10), (1, 4096), (4095, 2), (size - 1, 1), (size - 5000, 5000)):
        views = memoryview(bytearray(n_bytes)), memoryview(bytearray(n_bytes))
        direct.read_into(offset, views[0], scratch)
        buffered.read_into(offset, views[1], scratch)
        assert views[0] == views[1] == logical(opened, offset, n_bytes)
    direct.close()
    buffered.close()


def test_cached_files_are_read_from_the_cache_and_dropped_on_request(
    opened: LogicalModel,
) -> None:
    (shard,) = opened.shards
    fd = shard.file.fileno()
    os.fsync(fd)
    os.pread(fd, shard.n_bytes, 0)
    assert resident(fd, shard.n_bytes)
    reader = ModelReader(opened, direct_io=True)
    assert not reader.direct
    # Advice: the kernel skips a page that anything refers to at that moment, such as its journal.
    deadline = time.monotonic() + DROP_SECONDS
    while True:
        reader.drop(0, opened.n_bytes)
        if not resident(fd, shard.n_bytes):
            break
        assert time.monotonic() < deadline, "the page cache still holds the file"


def test_a_file_that_shrinks_while_it_is_read_is_an_error_naming_it(
    model_path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model_path.read_bytes())
    with LogicalModel.open(copy) as model:
        plan = make_plan(model)
        os.truncate(copy, model.n_bytes // 2)
        with pytest.raises(GgufError, match=r"copy\.gguf.*shrank while it was read"):
            run_fill(model, plan)


def test_the_first_error_stops_all_threads_and_is_raised(opened: LogicalModel) -> None:
    calls = []

    def refuse(n_bytes: int) -> None:
        calls.append(n_bytes)
        if len(calls) == 3:
            raise BudgetError("no more")

    before = set(threading.enumerate())
    with pytest.raises(BudgetError, match="no more"):
        run_fill(opened, make_plan(opened), threads=4, chunk_bytes=50_000, before_chunk=refuse)
    assert set(threading.enumerate()) <= before
    assert len(calls) == 3


@pytest.mark.parametrize("how", ["pwrite", "fallocate"])
def test_full_shared_memory_is_an_error_that_says_what_to_do(
    opened: LogicalModel, how: Fill
) -> None:
    plan = make_plan(opened, "--cpu-layout", "raw")
    fd = os.open("/dev/full", os.O_RDWR)
    reader = ModelReader(opened, direct_io=False)
    filler = Filler(
        pieces(opened, plan, 1 << 20), {"base": reader}, {0: Target(fd, 1 << 30)},
        loader_plan.pack_rows,
        fill=how, threads=2, chunk_bytes=1 << 20, before_chunk=lambda n: None,
        advance=lambda n: None,
    )  # fmt: skip
    expected = "No space left on device; .*df /dev/shm" if how == "pwrite" else "reserving"
    with pytest.raises(BackendError, match=expected):
        filler.run()
    reader.close()
    os.close(fd)


def test_rows_without_a_packed_layout_are_refused() -> None:
    buffer = memoryview(bytearray(4096))
    with pytest.raises(LoaderError, match="no layout X8"):
        loader_plan.pack_rows(Layout.X8, GgmlType.Q8_0, buffer, buffer, 7, 32)


def test_chunks_are_announced_before_they_are_written(opened: LogicalModel) -> None:
    announced: list[int] = []
    plan = make_plan(opened)
    run_fill(opened, plan, chunk_bytes=100_000, before_chunk=announced.append)
    assert sum(announced) == plan.alloc_bytes
    assert max(announced) == 100_000


def test_memory_that_somebody_takes_while_loading_ends_the_load_with_the_figures(
    opened: LogicalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, gib = make_plan(opened), 1 << 30
    fds = [-1] * (len(plan.allocations) + len(job.BLOB_NAMES))
    with socket.socket() as unused:
        load = loading.Loader(
            Channel(unused), cli.parse(FLAGS, {}), {"base": opened}, plan, None,
            job.Load("pwrite", 2 * gib, None), fds,
        )  # fmt: skip
        for available, fits in ((3 * gib, True), (3 * gib - 1, False)):
            memory = budget.Memory(64 * gib, available)
            monkeypatch.setattr(budget, "read_memory", lambda tmpfs, memory=memory: memory)
            if fits:
                load.check_memory(gib)
            else:
                with pytest.raises(BudgetError, match=r"memory ran out .*3\.00 GiB left"):
                    load.check_memory(gib)


def test_auto_layout_stays_raw_for_a_family_that_no_worker_can_run(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "m.gguf", TENSORS, arch="unheard")
    with LogicalModel.open(path) as model:
        plan, notes = loader_plan.make_plan(cli.parse(FLAGS, {}), {"base": model}, 4096)
    assert all(a.artifact is None for a in plan.allocations)
    (note,) = notes
    assert "unheard" in note


def test_planes_are_filled_whole_whatever_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        "blk.0.ffn_gate_exps.weight": ((1024, 21, 3), GgmlType.IQ2_XXS),
        "blk.0.ffn_up_exps.weight": ((1024, 21, 3), GgmlType.IQ2_XS),
        "blk.0.ffn_down_exps.weight": ((256, 24, 3), GgmlType.Q4_K),
    }
    isa = best_isa().name
    planes = {isa: {"IQ2_XXS": 1.5, "IQ2_XS": 1.5}}
    monkeypatch.setattr(quants, "PLANES_TO_RAW", planes)
    with LogicalModel.open(write_tensors(tmp_path / "m.gguf", tensors)) as model:
        plan = make_plan(model, "--cpu-layout", "packed")
        layouts = [next(p.layout for p in plan.places if p.name == n) for n in tensors]
        assert layouts == [Layout.IQ2_PLANES, Layout.IQ2_PLANES, Layout.X8]
        sizes = [next(p.n_bytes for p in plan.places if p.name == n) for n in list(tensors)[:2]]
        assert sizes == [252 * 74, 252 * 78]
        expected = run_fill(model, plan)
        check_contents(model, plan, expected[0])
        for piece_bytes in (2048, 9000, 1 << 20):
            for threads in (1, 3):
                assert run_fill(model, plan, threads=threads, piece_bytes=piece_bytes) == expected


def test_experts_lie_as_asked_for_or_as_measured_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        "blk.0.ffn_gate_exps.weight": ((1024, 16, 3), GgmlType.IQ2_XXS),
        "blk.0.ffn_up_exps.weight": ((256, 24, 3), GgmlType.Q4_K),
        "blk.0.ffn_down_exps.weight": ((256, 12, 4), GgmlType.Q2_K),  # rows of no whole groups
    }
    with LogicalModel.open(write_tensors(tmp_path / "m.gguf", tensors)) as model:

        def layouts(flag: str) -> list[Layout]:
            plan = make_plan(model, "--cpu-layout", flag)
            return [next(p.layout for p in plan.places if p.name == n) for n in tensors]

        assert layouts("raw") == [Layout.IQ2_XXS_ALIGNED, Layout.RAW, Layout.Q2_K_ALIGNED]
        assert layouts("aligned") == [Layout.IQ2_XXS_ALIGNED, Layout.X8, Layout.Q2_K_ALIGNED]
        for fastest, expected in (
            (None, [Layout.RAW, Layout.X8, Layout.RAW]),
            (GgmlType.IQ2_XXS, [Layout.IQ2_XXS_ALIGNED, Layout.X8, Layout.RAW]),
        ):
            monkeypatch.setattr(quants, "aligned_is_fastest", lambda t, best=fastest: t == best)
            assert layouts("packed") == expected
        monkeypatch.setattr(quants, "aligned_is_fastest", lambda _: False)
        plan = make_plan(model, "--cpu-layout", "packed")
        check_contents(model, plan, run_fill(model, plan)[0])
