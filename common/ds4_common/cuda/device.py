"""Which CUDA device there is and whether it can share weights; the primary context of a process.

Owns: `probe`, and the refusal of devices without virtual memory management or descriptor export
and of simulated devices outside tests. Refuses: to choose a device by itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ds4_common.cuda import driver
from ds4_common.errors import CudaUnsupported, NoCudaDevice, WrongCudaDevice

SIMULATED_VARIABLE = "DS4_CUDA_SIMULATED"  # "1": a device that only pretends is welcome (tests)


@dataclass(frozen=True)
class Device:
    """A device that passed `probe`."""

    ordinal: int
    name: str
    uuid: str
    compute_capability: tuple[int, int]
    integrated: bool  # its memory is the system's memory
    total_bytes: int
    shared_bytes_per_block: int  # the most that a kernel can opt in to
    driver_version: int

    @property
    def simulated(self) -> bool:
        return "sim" in self.name.lower().split()

    def describe(self) -> str:
        major, minor = self.compute_capability
        kind = "integrated" if self.integrated else "discrete"
        return (
            f"CUDA device {self.ordinal}: {self.name}, compute {major}.{minor}, {kind},"
            f" {self.total_bytes / (1 << 30):.1f} GiB,"
            f" driver CUDA {driver.version_text(self.driver_version)}, {self.uuid}"
        )


def probe(ordinal: int = 0, *, uuid: str = "") -> Device:
    """The device of that number, fit to share weights. Initialises the driver, makes no context.

    Raises NoCudaDriver, CudaDriverTooOld, NoCudaDevice, CudaUnsupported, and WrongCudaDevice for
    a number out of range, for another device than `uuid` (when given) and for a simulated one.
    """
    driver.init()
    count = int(driver.call("cuDeviceGetCount"))
    if not count:
        raise NoCudaDevice(f"the CUDA driver has 0 devices: {driver.NO_DEVICE_ADVICE}")
    if not 0 <= ordinal < count:
        raise WrongCudaDevice(
            f"no CUDA device {ordinal}: got {count} device(s), expected a number below {count};"
            " see nvidia-smi -L"
        )
    device = _describe(ordinal)
    if uuid and device.uuid != uuid:
        raise WrongCudaDevice(
            f"CUDA device {ordinal} is another one: got {device.uuid}, expected {uuid};"
            " the weights live on that device only"
        )
    if device.simulated and os.environ.get(SIMULATED_VARIABLE) != "1":
        raise WrongCudaDevice(
            f"CUDA device {ordinal} ({device.name}) is a simulation for tests: it computes on the"
            f" CPU; remove that libcuda.so.1, or set {SIMULATED_VARIABLE}=1 in a test"
        )
    _check_sharing(device)
    return device


def find(uuid: str, name: str = "") -> Device:
    """The device with weights, by its UUID; `name` only for the error. Raises as `probe`, and
    WrongCudaDevice when none here is it."""
    driver.init()
    seen = []
    for ordinal in range(int(driver.call("cuDeviceGetCount"))):
        device = _describe(ordinal)
        if device.uuid == uuid:
            return probe(ordinal, uuid=uuid)
        seen.append(f"{device.uuid} ({device.name})")
    raise WrongCudaDevice(
        f"the weights are on {uuid}{f' ({name})' if name else ''}, which is not among the devices"
        f" here: {', '.join(seen) or 'none'}; see CUDA_VISIBLE_DEVICES and nvidia-smi -L"
    )


class Context:
    """The device's primary context, retained: what copies, mappings and kernels need.

    Current in the thread that made it; every other thread calls `enter` first.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._handle: Any = driver.call(
            "cuDevicePrimaryCtxRetain", device.ordinal, what=device.name
        )
        self.enter()

    def enter(self) -> None:
        driver.call("cuCtxSetCurrent", self._handle)

    def reenter(self) -> None:
        """As `enter`, before something is given back: silent in a context that was lost."""
        driver.give_back("cuCtxSetCurrent", self._handle)

    def synchronize(self) -> None:
        driver.call("cuCtxSynchronize")

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes as the driver counts; on an integrated device free is MemFree."""
        free_bytes, total_bytes = driver.call("cuMemGetInfo")
        return int(free_bytes), int(total_bytes)

    def close(self) -> None:
        if self._handle is not None:
            self._handle = None
            driver.give_back("cuCtxSetCurrent", None)
            driver.give_back("cuDevicePrimaryCtxRelease", self.device.ordinal)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _describe(ordinal: int) -> Device:
    name = bytes(driver.call("cuDeviceGetName", 256, ordinal))
    return Device(
        ordinal=ordinal,
        name=name.split(b"\0", 1)[0].decode("utf-8", "replace").strip(),
        uuid=_uuid_text(bytes(driver.call("cuDeviceGetUuid", ordinal).bytes)),
        compute_capability=(
            _attribute(ordinal, "COMPUTE_CAPABILITY_MAJOR"),
            _attribute(ordinal, "COMPUTE_CAPABILITY_MINOR"),
        ),
        integrated=bool(_attribute(ordinal, "INTEGRATED")),
        total_bytes=int(driver.call("cuDeviceTotalMem", ordinal)),
        shared_bytes_per_block=_attribute(ordinal, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        driver_version=driver.driver_version(),
    )


def _uuid_text(raw: bytes) -> str:
    """As nvidia-smi writes it."""
    digits = raw[:16].hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


def _attribute(ordinal: int, name: str) -> int:
    attribute = getattr(driver.bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(driver.call("cuDeviceGetAttribute", attribute, ordinal))


def _check_sharing(device: Device) -> None:
    for attribute, what in (
        ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "virtual memory management"),
        ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "export of memory as file descriptors"),
    ):
        if not _attribute(device.ordinal, attribute):
            raise CudaUnsupported(
                f"CUDA device {device.ordinal} ({device.name}) has no {what}, which sharing"
                " weights between processes needs; use --backend memfd"
            )
