"""An owner of device memory that hands out other memory than it says it has.

Run as `python -m helpers.lying_owner KIND <owner flags>`. Everything is the product's own code
until all is loaded; then what is lent in place of each allocation is `smaller` (one granule),
`blank` (as large, but other content) or `foreign` (no device memory at all).
"""

from __future__ import annotations

import os
import sys

from ds4_common.cuda.device import probe
from ds4_common.cuda.memory import Allocation, granularity
from ds4_owner import cli, filling
from ds4_owner.backends import Memory
from ds4_owner.backends.vmm import DeviceMemory


class Nothing(DeviceMemory):
    """Stands for memory that is none."""

    def __init__(self) -> None:
        self.held_fd = -1

    def lend(self) -> int:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """There is nothing to give up."""


def lie(kind: str, memory: Memory) -> None:
    if memory.lender is None:
        return
    memory.lender.close()
    if kind == "foreign":
        memory.lender = Nothing()
        return
    device = probe()
    n_bytes = granularity(device) if kind == "smaller" else memory.n_bytes
    memory.lender = DeviceMemory(Allocation.create(device, n_bytes, kind))


def main() -> int:
    kind, truly = sys.argv[1], filling.hand_out

    def hand_out(plan, loaded, memory, backend, broker) -> None:  # type: ignore[no-untyped-def]
        for piece in memory.values():
            lie(kind, piece)
        truly(plan, loaded, memory, backend, broker)

    filling.hand_out = hand_out
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
