"""Device memory by CUDA's virtual memory management: handles here, contexts elsewhere.

Owns what the resident owner does with the driver, and that is all: `cuInit`, questions about the
device, `cuMemCreate`, and a descriptor for every send. It makes no context and maps nothing, so it
costs no device memory beyond the weights. Blobs are host memory, sealed memfds.
Refuses devices that cannot share (`ds4_common.cuda.device.probe`). Device memory has no seals:
whoever gets a descriptor could map it for writing; ours never do.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ds4_common.cuda.device import Device, probe
from ds4_common.cuda.memory import Allocation, granularity
from ds4_common.protocol import DeviceRecord
from ds4_owner.backends import Fill, Memory
from ds4_owner.backends.memfd import MemfdBackend
from ds4_owner.config import BackendName


class DeviceMemory:
    """The lender of one allocation (lending.py)."""

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation
        self.held_fd = -1

    def lend(self) -> int:
        return self.held_fd if self.held_fd >= 0 else self._export()

    def take_back(self, fd: int) -> None:
        if fd != self.held_fd:
            os.close(fd)

    def hold(self) -> None:
        if self.held_fd < 0:
            self.held_fd = self._export()

    def let_go(self) -> None:
        fd, self.held_fd = self.held_fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        self.let_go()
        self._allocation.close()

    def _export(self) -> int:
        fd = self._allocation.export_fd()
        os.set_inheritable(fd, False)
        return fd


@dataclass(frozen=True, slots=True)
class VmmBackend:
    """`blobs` makes the memory of contract, tokenizer and the like."""

    device: Device
    granularity: int
    blobs: MemfdBackend
    name: BackendName = "vmm"
    fill: Fill = "device"
    reserved_bytes: int = 0
    fds_per_memory: int = 1  # at a reexec, and in the service manager's store

    @classmethod
    def probe(cls, ordinal: int) -> VmmBackend:
        """Raises CudaError or one of its kinds, saying what this machine lacks."""
        device = probe(ordinal)
        return cls(device, granularity(device), MemfdBackend.probe())

    @property
    def pages(self) -> str:
        return f"of {self.device.describe()}"

    @property
    def record(self) -> DeviceRecord:
        device = self.device
        return DeviceRecord(device.uuid, device.name, self.granularity, device.integrated)

    def fitted(self, total_bytes: int) -> VmmBackend:
        return self

    def create(self, label: str, n_bytes: int) -> Memory:
        if not n_bytes:
            return self.blobs.create(label, n_bytes)
        allocation = Allocation.create(self.device, n_bytes, label)
        return Memory(
            label, n_bytes, -1, -1, lender=DeviceMemory(allocation), uuid=self.device.uuid
        )

    def seal(self, memory: Memory) -> None:
        if memory.lender is None:
            self.blobs.seal(memory)
