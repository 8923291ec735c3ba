"""POSIX shared memory, for systems without memfd.

Owns names that cannot be guessed and do not outlive two system calls: an object is opened for
writing and again for reading, then unlinked, and only then given a size; so even an owner killed in
between leaves nothing but an empty name. Only the read-only descriptor is handed out. The loader
reserves the space before it writes (`fallocate`), so a full tmpfs is an error at load and never a
SIGBUS in a worker.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass, field

from ds4_common.errors import BackendError
from ds4_owner.backends import Fill, Memory
from ds4_owner.config import BackendName

SHM_FOLDER = "/dev/shm"


@dataclass(frozen=True, slots=True)
class ShmBackend:
    name: BackendName = "shm"
    granularity: int = field(default_factory=lambda: mmap.PAGESIZE)
    fill: Fill = "fallocate"
    reserved_bytes: int = 0
    fds_per_memory: int = 2
    record: None = None
    pages: str = field(default_factory=lambda: f"{mmap.PAGESIZE >> 10} KiB")

    def fitted(self, total_bytes: int) -> ShmBackend:
        return self

    def create(self, label: str, n_bytes: int) -> Memory:
        import posix_ipc

        name = f"/ds4-{secrets.token_hex(16)}"
        size = -(-n_bytes // self.granularity) * self.granularity
        fd = export_fd = -1
        try:
            fd = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o400).fd
            try:
                export_fd = posix_ipc.SharedMemory(name, read_only=True).fd
            finally:
                posix_ipc.unlink_shared_memory(name)
            if size:
                os.ftruncate(fd, size)
        except (OSError, posix_ipc.Error) as error:
            Memory(label, size, fd, export_fd).close()
            raise BackendError(
                f"shared memory for {label} ({size} bytes): {error}; see df {SHM_FOLDER}, ulimit -n"
            ) from error
        return Memory(label, size, fd, export_fd)

    def seal(self, memory: Memory) -> None:
        """Gives up the only writable descriptor; the object's mode lets nobody open another."""
        if memory.fd != -1:
            os.close(memory.fd)
            memory.fd = -1
