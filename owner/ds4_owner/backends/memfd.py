"""Sealed memfds: host memory without a name that nobody can write to once it is loaded.

Owns the choice of pages and the seals. Huge pages (2 MiB) make a worker's mapping faults and its
death two orders of magnitude cheaper; in order of preference: reserved huge pages (MFD_HUGETLB,
when enough are free), transparent ones (when the system lets shared memory have them), 4 KiB.
Refuses to hand out memory whose seals are not in place.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ds4_common.errors import BackendError
from ds4_owner.backends import HUGE_PAGE_BYTES, Fill, Memory, memory_error
from ds4_owner.config import BackendName
from ds4_owner.progress import log

F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; not in the fcntl module of CPython 3.11
SEAL_FIXED = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
RESERVED_FREE = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"


@dataclass(frozen=True, slots=True)
class MemfdBackend:
    """`write_seal` is F_SEAL_WRITE, or F_SEAL_FUTURE_WRITE on kernels that need it."""

    granularity: int
    fill: Fill
    pages: str
    write_seal: int
    reserved_bytes: int  # free reserved huge pages
    name: BackendName = "memfd"
    fds_per_memory: int = 1
    record: None = None

    @classmethod
    def probe(cls, root: str = "/") -> MemfdBackend:
        """What this system gives without reserved huge pages. BackendError without memfd."""
        if not hasattr(os, "memfd_create"):
            raise BackendError("backend memfd: this system has no memfd_create; use --backend shm")
        seal = probe_write_seal()
        reserved = _read_int(root, RESERVED_FREE) * HUGE_PAGE_BYTES
        enabled = _selected(root, SHMEM_ENABLED)
        if enabled in ("always", "within_size", "force"):
            return cls(HUGE_PAGE_BYTES, "pwrite", "2 MiB transparent", seal, reserved)
        if enabled == "advise":
            return cls(HUGE_PAGE_BYTES, "advise", "2 MiB transparent", seal, reserved)
        # Sizes are rounded for the reserved pages that `fitted` may choose.
        granularity = HUGE_PAGE_BYTES if reserved else mmap.PAGESIZE
        return cls(granularity, "pwrite", f"{mmap.PAGESIZE >> 10} KiB", seal, reserved)

    def fitted(self, total_bytes: int) -> MemfdBackend:
        """The same, on reserved huge pages when they suffice for `total_bytes`."""
        if self.reserved_bytes >= total_bytes > 0:
            return replace(self, fill="map", pages="2 MiB reserved")
        return self

    def create(self, label: str, n_bytes: int) -> Memory:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if self.fill == "map" and n_bytes >= HUGE_PAGE_BYTES:
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
        granule = self.granularity if n_bytes >= self.granularity else mmap.PAGESIZE
        size = -(-n_bytes // granule) * granule
        fd = -1
        try:
            fd = os.memfd_create(f"ds4-{label}"[:200], flags)
            if size:
                os.ftruncate(fd, size)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise memory_error(f"memfd for {label} ({size} bytes)", error) from error
        return Memory(label, size, fd, fd)

    def seal(self, memory: Memory) -> None:
        wanted = SEAL_FIXED | self.write_seal
        try:
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, wanted)
            got = fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise BackendError(
                f"sealing {memory.label}: {error.strerror}: is it still mapped writable?"
            ) from error
        if got & wanted != wanted:
            raise BackendError(f"sealing {memory.label}: got seals {got:#x}, expected {wanted:#x}")


def probe_write_seal() -> int:
    """F_SEAL_WRITE where write-sealed memfds can still be mapped shared and read-only.

    Kernels before 6.7 refuse that mapping for a descriptor opened for writing; there
    F_SEAL_FUTURE_WRITE does the job (nobody has a writable mapping when we seal).
    """
    fd = os.memfd_create("ds4-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEAL_FIXED | fcntl.F_SEAL_WRITE)
        mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ).close()
    except OSError as error:
        log(
            "write-sealed memfds cannot be mapped on this kernel"
            f" ({error.strerror}); sealing future writes instead"
        )
        return F_SEAL_FUTURE_WRITE
    finally:
        os.close(fd)
    return fcntl.F_SEAL_WRITE


def _read_int(root: str, path: str) -> int:
    try:
        return int(Path(root, path.lstrip("/")).read_text())
    except (OSError, ValueError):
        return 0  # no such kernel feature


def _selected(root: str, path: str) -> str:
    """The word in [brackets] of a sysfs choice; "never" when the kernel has no such choice."""
    try:
        text = Path(root, path.lstrip("/")).read_text()
    except OSError:
        return "never"
    return text.partition("[")[2].partition("]")[0] or "never"
