"""Reads a model's bytes once, without leaving a second copy of it in the page cache.

Owns how a shard is read: from the page cache when it is there already (a copy costs less than the
disk), by O_DIRECT when it is not, else by buffered reads; what came through the cache is dropped
behind the reader. Refuses files that end early or vanish, naming file and offset.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from dataclasses import dataclass

from ds4_common.errors import GgufError
from ds4_common.gguf.model import LogicalModel, Shard

DIRECT_ALIGNMENT = 4096
RESIDENCY_PROBES = 16
RESIDENT_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class _File:
    shard: Shard
    fd: int
    direct: bool


class ModelReader:
    """Reads logical ranges of one model. Threads may share it; each brings its own `Scratch`."""

    def __init__(self, model: LogicalModel, *, direct_io: bool) -> None:
        self._model = model
        self._files = [_open(shard, direct_io) for shard in model.shards]

    @property
    def direct(self) -> bool:
        """True when any shard is read past the page cache."""
        return any(file.direct for file in self._files)

    def read_into(self, offset: int, view: memoryview, scratch: Scratch) -> None:
        """Fills `view` with the logical bytes at `offset`. Raises GgufError."""
        done = 0
        for span in self._model.spans(offset, view.nbytes):
            file = self._files[span.shard.index]
            target = view[done : done + span.n_bytes]
            if file.direct and span.n_bytes:
                _read_direct(file, span.file_offset, target, scratch)
            else:
                _read_buffered(file, span.file_offset, target)
            done += span.n_bytes
            view[done : done + span.n_zeros] = bytes(span.n_zeros)
            done += span.n_zeros

    def drop(self, offset: int, n_bytes: int) -> None:
        """Lets the page cache forget a logical range."""
        for span in self._model.spans(offset, n_bytes):
            if span.n_bytes:
                os.posix_fadvise(
                    span.shard.file.fileno(), span.file_offset, span.n_bytes,
                    os.POSIX_FADV_DONTNEED,
                )  # fmt: skip

    def close(self) -> None:
        for file in self._files:
            if file.fd != file.shard.file.fileno():
                os.close(file.fd)
        self._files = []


class Scratch:
    """Page-aligned memory for one thread's O_DIRECT reads; grows to the largest request."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def view(self, n_bytes: int) -> memoryview:
        if self._memory.nbytes < n_bytes:
            self._memory = memoryview(mmap.mmap(-1, n_bytes))
        return self._memory[:n_bytes]


def _open(shard: Shard, direct_io: bool) -> _File:
    """O_DIRECT unless it is switched off, impossible here, or the file is cached already."""
    fd = shard.file.fileno()
    if direct_io and not resident(fd, shard.n_bytes):
        with contextlib.suppress(OSError):  # e.g. tmpfs before Linux 6.6: buffered reads do
            # By /proc, so that it is the file whose header was checked, whatever its name is now.
            direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            return _File(shard, direct, True)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return _File(shard, fd, False)


def resident(fd: int, n_bytes: int) -> bool:
    """True when (nearly) the whole file is in the page cache, judged by 16 samples."""
    cached = 0
    page = bytearray(1)
    # A miss may start the kernel's readahead: going backwards, none lies ahead of the next probe.
    for index in reversed(range(RESIDENCY_PROBES)):
        offset = n_bytes * index // RESIDENCY_PROBES
        try:
            cached += os.preadv(fd, [page], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return False  # the file system cannot say
            raise
    return cached >= RESIDENT_SHARE * RESIDENCY_PROBES


def _read_direct(file: _File, offset: int, target: memoryview, scratch: Scratch) -> None:
    start = offset - offset % DIRECT_ALIGNMENT
    wanted = offset - start + target.nbytes
    buffer = scratch.view(-(-wanted // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT)
    done = 0
    while done < wanted:
        n = _pread(file, start + done, buffer[done:], wanted - done)
        if done + n < wanted and n % DIRECT_ALIGNMENT:
            raise _shrank(file, start + done + n, wanted - done - n)
        done += n
    target[:] = buffer[offset - start : wanted]


def _read_buffered(file: _File, offset: int, target: memoryview) -> None:
    done = 0
    while done < target.nbytes:
        done += _pread(file, offset + done, target[done:], target.nbytes - done)


def _pread(file: _File, offset: int, view: memoryview, missing: int) -> int:
    try:
        n = os.preadv(file.fd, [view], offset)
    except OSError as error:
        raise GgufError(
            file.shard.path, offset, "read", error.strerror, "readable bytes"
        ) from error
    if n == 0:
        raise _shrank(file, offset, missing)
    return n


def _shrank(file: _File, offset: int, missing: int) -> GgufError:
    return GgufError(
        file.shard.path, offset, "read", "end of file: it shrank while it was read",
        f"{missing} more bytes",
    )  # fmt: skip
