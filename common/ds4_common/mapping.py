"""Read-only shared mappings of an owner's memory.

Owns: address reservation, alignment, and the check that nobody can change what is mapped. All of
one call lies in one reservation, so mapping costs one system call per allocation and none per byte.
Descriptors stay the caller's: a mapping outlives them. On the start-up path: few imports.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence

from ds4_common.errors import BackendError

# Memory of 2 MiB pages is mapped by 2 MiB entries only at addresses of that alignment; otherwise
# every restart pays 70 ms per GB of page faults.
HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTDUMP = 16
_BUFFER_READ = 0x100  # PyBUF_READ
_SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE, _SEAL_FUTURE_WRITE = 0x2, 0x4, 0x8, 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_memoryview = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview.restype = ctypes.py_object
_memoryview.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


class Mapping:
    """Mapped bytes at `address`. They stay mapped until `close` or the end of the process: views
    and native code refer to them by address, so nothing is unmapped behind their back."""

    __slots__ = ("_reserved_bytes", "address", "n_bytes")

    def __init__(self, address: int, n_bytes: int, reserved_bytes: int) -> None:
        self.address = address
        self.n_bytes = n_bytes
        self._reserved_bytes = reserved_bytes

    @property
    def view(self) -> memoryview:
        """A read-only view of the bytes. Invalid after `close`."""
        view: memoryview = _memoryview(self.address, self.n_bytes, _BUFFER_READ)
        return view

    def close(self) -> None:
        """Unmaps. No view or native pointer may be used afterwards."""
        if self._reserved_bytes:
            _munmap(self.address, self._reserved_bytes)
            self._reserved_bytes = 0


def check_sealed(fd: int, what: str) -> None:
    """Raises BackendError unless the memfd can neither change size nor be written through `fd`."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BackendError(f"{what}: not a memfd that can be sealed: {error.strerror}") from error
    size_fixed = seals & _SEAL_SHRINK and seals & _SEAL_GROW
    if not (size_fixed and seals & (_SEAL_WRITE | _SEAL_FUTURE_WRITE)):
        raise BackendError(
            f"{what}: memfd has seals {seals:#x}; expected SHRINK, GROW and WRITE or FUTURE_WRITE; "
            "refusing memory that could still change"
        )


def check_size(fd: int, expected_bytes: int, what: str) -> None:
    """Raises BackendError when the descriptor holds less than declared: touching the rest of such a
    mapping would be SIGBUS."""
    got = os.fstat(fd).st_size
    if got < expected_bytes:
        raise BackendError(f"{what}: descriptor holds {got} bytes, owner declared {expected_bytes}")


def check_object(fd: int, device: int, inode: int, what: str) -> None:
    """Raises BackendError when the descriptor is other memory than the owner says: every range is
    mapped as the one that was asked for, or not at all."""
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (device, inode):
        raise BackendError(
            f"{what}: got memory object {found.st_dev}:{found.st_ino}, the owner's record says "
            f"{device}:{inode}; refusing weights that may be another range's"
        )


def map_read_only(sources: Sequence[tuple[int, int, int]]) -> list[Mapping]:
    """Maps each (fd, n_bytes, alloc_bytes), in order: `alloc_bytes` mapped, `n_bytes` shown.

    Allocations of 2 MiB and more lie at 2 MiB-aligned addresses. Raises BackendError."""
    offsets: list[int] = []
    total = 0
    for _, _, alloc_bytes in sources:
        align = HUGE_PAGE_BYTES if alloc_bytes >= HUGE_PAGE_BYTES else mmap.PAGESIZE
        total = _round_up(total, align)
        offsets.append(total)
        total += _round_up(max(alloc_bytes, 1), mmap.PAGESIZE)
    if not sources:
        return []
    base = _reserve(total)
    mappings: list[Mapping] = []
    for index, (fd, n_bytes, alloc_bytes) in enumerate(sources):
        address = base + offsets[index]
        end = offsets[index + 1] if index + 1 < len(offsets) else total
        try:
            _map_at(address, fd, alloc_bytes)
        except BackendError:
            _munmap(base, total)
            raise
        mappings.append(Mapping(address, n_bytes, end - offsets[index]))
    _madvise(base, total, _MADV_DONTDUMP)  # a crashing worker must not dump the model
    return mappings


def _reserve(n_bytes: int) -> int:
    """2 MiB-aligned address of `n_bytes` (whole pages) of address space that backs nothing yet."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    raw = _mmap(None, n_bytes + HUGE_PAGE_BYTES, 0, flags, -1, 0)
    if raw == _MAP_FAILED:
        raise BackendError(
            f"cannot reserve {n_bytes} bytes of address space: {os.strerror(ctypes.get_errno())}; "
            "check ulimit -v"
        )
    base = _round_up(raw, HUGE_PAGE_BYTES)
    if base > raw:
        _munmap(raw, base - raw)
    if base < raw + HUGE_PAGE_BYTES:
        _munmap(base + n_bytes, raw + HUGE_PAGE_BYTES - base)
    return base


def _map_at(address: int, fd: int, n_bytes: int) -> None:
    if not n_bytes:
        return
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _mmap(address, n_bytes, mmap.PROT_READ, flags, fd, 0) != address:
        reason = os.strerror(ctypes.get_errno())
        raise BackendError(f"cannot map {n_bytes} bytes read-only: {reason}")


def _round_up(value: int, align: int) -> int:
    return -(-value // align) * align
