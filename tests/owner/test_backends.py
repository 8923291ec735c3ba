"""Memory backends: what they hand out cannot be written to, and nothing has a name."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
from pathlib import Path

import pytest

from ds4_common.errors import BackendError
from ds4_owner.backends import HUGE_PAGE_BYTES, Backend, Memory, memfd, open_backend
from ds4_owner.backends.memfd import MemfdBackend
from helpers.descriptors import open_fds

DATA = bytes(range(256)) * 32


@pytest.fixture(params=["memfd", "shm"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(request.param)


def test_sealed_memory_can_be_mapped_but_not_written_to_in_any_way(backend: Backend) -> None:
    memory = backend.create("test", len(DATA))
    try:
        os.pwrite(memory.fd, DATA, 0)
        backend.seal(memory)
        fd = memory.export_fd
        with mmap.mmap(fd, len(DATA), mmap.MAP_SHARED, mmap.PROT_READ) as window:
            assert window[:] == DATA
        with pytest.raises(OSError, match=r"permitted|Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match=r"permitted|denied"):
            mmap.mmap(fd, len(DATA), mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match=r"permitted|Invalid"):
            os.ftruncate(fd, 1)
    finally:
        memory.close()


def test_small_memory_is_rounded_to_pages_and_blobs_grow(backend: Backend) -> None:
    memory, blob = backend.create("m", 5), backend.create("b", 0)
    try:
        assert memory.n_bytes == mmap.PAGESIZE
        assert os.fstat(memory.export_fd).st_size == mmap.PAGESIZE
        os.pwrite(blob.fd, b"hello", 0)
        backend.seal(blob)
        assert os.fstat(blob.export_fd).st_size == 5
    finally:
        memory.close()
        blob.close()


def test_memory_has_no_name_and_its_descriptors_are_not_inherited(backend: Backend) -> None:
    before = open_fds()
    names = set(os.listdir("/dev/shm"))
    memory = backend.create("test", 4096)
    assert set(os.listdir("/dev/shm")) == names
    assert len(open_fds() - before) <= backend.fds_per_memory
    for fd in (memory.fd, memory.export_fd):
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    memory.close()
    memory.close()
    assert open_fds() <= before


def test_no_descriptor_left_is_an_error_that_leaves_nothing(backend: Backend) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_fds()
    held: list[Memory] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 4, limits[1]))
    try:
        with pytest.raises(BackendError, match=r"open files|files open"):
            held.extend(backend.create("test", 4096) for _ in range(8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for memory in held:
            memory.close()
    assert open_fds() <= before


def test_a_writable_mapping_at_sealing_time_is_an_error() -> None:
    backend = open_backend("memfd")
    memory = backend.create("test", 4096)
    try:
        with (
            mmap.mmap(memory.fd, 4096, mmap.MAP_SHARED),
            pytest.raises(BackendError, match="mapped writable"),
        ):
            backend.seal(memory)
    finally:
        memory.close()


def test_where_write_sealed_memfds_cannot_be_mapped_future_writes_are_sealed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> mmap.mmap:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(mmap, "mmap", refuse)
    backend = MemfdBackend.probe()
    monkeypatch.undo()
    assert backend.write_seal == memfd.F_SEAL_FUTURE_WRITE
    assert "sealing future writes instead" in capfd.readouterr().err
    memory = backend.create("test", 4096)
    try:
        backend.seal(memory)
        mmap.mmap(memory.export_fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ).close()
        with pytest.raises(OSError, match="permitted"):
            os.pwrite(memory.fd, b"x", 0)
    finally:
        memory.close()


@pytest.mark.parametrize(
    ("enabled", "reserved", "fill", "granularity"),
    [
        ("always within_size advise [never] deny force", "0", "pwrite", mmap.PAGESIZE),
        ("always within_size [advise] never deny force", "0", "advise", HUGE_PAGE_BYTES),
        ("[always] within_size advise never deny force", "0", "pwrite", HUGE_PAGE_BYTES),
        ("always within_size advise [never] deny force", "7", "pwrite", HUGE_PAGE_BYTES),
        (None, None, "pwrite", mmap.PAGESIZE),
    ],
)
def test_huge_pages_are_used_where_the_system_allows_them(
    tmp_path: Path, enabled: str | None, reserved: str | None, fill: str, granularity: int
) -> None:
    for name, text in ((memfd.SHMEM_ENABLED, enabled), (memfd.RESERVED_FREE, reserved)):
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text + "\n")
    backend = MemfdBackend.probe(str(tmp_path))
    assert (backend.fill, backend.granularity) == (fill, granularity)
    if reserved == "7":
        assert backend.fitted(7 * HUGE_PAGE_BYTES).fill == "map"
        assert backend.fitted(8 * HUGE_PAGE_BYTES).fill == "pwrite"
