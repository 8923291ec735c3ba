"""Memory backends: what an allocation is made of, how it is filled, how it becomes read-only.

Owns the boundary (`Backend`, `Memory`) and the choice by name. The owner creates and seals; the
loader child only writes, through `Memory.fd` and by the rule in `Backend.fill`.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Literal, Protocol

from ds4_common.errors import BackendError
from ds4_common.protocol import DeviceRecord
from ds4_owner.config import BackendName
from ds4_owner.lending import Descriptor, Lender

HUGE_PAGE_BYTES = 2 << 20
Fill = Literal["pwrite", "advise", "fallocate", "map", "device"]
"""How the loader writes: `pwrite` only; `advise` allocates huge pages first; `fallocate` reserves
the space first; `map` stores through a mapping (hugetlbfs has no write); `device` copies through
pinned stages. Memory below HUGE_PAGE_BYTES has small pages and is written with `pwrite` whenever
huge pages are the point."""


_REMEDIES = {
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
    errno.ENFILE: "; the system's table of open files is full",
    errno.EFBIG: "; raise the limit of file sizes (ulimit -f)",
    errno.ENOSPC: "; the shared memory file system is full (df /dev/shm)",
    errno.ENOMEM: "; stop other processes or load a smaller model",
}


def memory_error(what: str, error: OSError) -> BackendError:
    """The error for memory that could not be had, with the remedy where there is one."""
    return BackendError(f"{what}: {error.strerror or error}{_REMEDIES.get(error.errno or 0, '')}")


@dataclass(slots=True)
class Memory:
    """One piece of shareable memory. `fd` is writable until sealed; `export_fd` is handed out.

    Device memory (`uuid`: of which device) is a `lender` in the process that made it and a
    descriptor in one that inherited it; `sample` is the hash of parts of its content."""

    label: str
    n_bytes: int  # rounded to the backend's granularity; 0: grows as it is written (blobs)
    fd: int
    export_fd: int
    lender: Lender | None = None
    uuid: str = ""
    sample: str = ""

    @property
    def descriptor(self) -> Descriptor:
        """What is handed out."""
        return self.export_fd if self.lender is None else self.lender

    @property
    def to_fill(self) -> Descriptor:
        """What the loader is given."""
        return self.fd if self.lender is None else self.lender

    @property
    def closed(self) -> bool:
        return self.export_fd < 0 and self.lender is None

    def close(self) -> None:
        """Closes what is open. The memory is freed when the last descriptor and mapping are."""
        if self.lender is not None:
            self.lender.close()
            self.lender = None
        for fd in {self.fd, self.export_fd} - {-1}:
            os.close(fd)
        self.fd = self.export_fd = -1


class Backend(Protocol):
    """Memory that can be shared by descriptor."""

    @property
    def name(self) -> BackendName: ...
    @property
    def granularity(self) -> int:
        """Sizes from this on are multiples of it; smaller ones of the system's page."""

    @property
    def fill(self) -> Fill: ...
    @property
    def pages(self) -> str:
        """For people: which pages the memory gets."""

    @property
    def reserved_bytes(self) -> int:
        """Free reserved huge pages; what `fill` "map" draws from."""

    @property
    def fds_per_memory(self) -> int: ...
    @property
    def record(self) -> DeviceRecord | None:
        """The device, for clients; None: host memory."""

    def fitted(self, total_bytes: int) -> Backend:
        """The backend to use for a plan of that size, with the same granularity."""

    def create(self, label: str, n_bytes: int) -> Memory:
        """New memory of at least `n_bytes` (0: a blob). Raises BackendError, nothing is left."""

    def seal(self, memory: Memory) -> None:
        """Makes it read-only for everybody and for ever, and checks that it is. BackendError."""


def open_backend(name: BackendName, device: int = 0) -> Backend:
    """The backend of that name; `device`: the number of the CUDA device. Raises BackendError when
    this machine has none."""
    if name == "memfd":
        from ds4_owner.backends.memfd import MemfdBackend

        return MemfdBackend.probe()
    if name == "shm":
        from ds4_owner.backends.shm import ShmBackend

        return ShmBackend()
    if name == "vmm":
        from ds4_owner.backends.vmm import VmmBackend

        return VmmBackend.probe(device)
    from ds4_owner.backends.cuda import IPC_REFUSAL

    raise BackendError(IPC_REFUSAL)
