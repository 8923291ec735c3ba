"""Which device of several has the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds4_common.cuda import device as module
from ds4_common.cuda import driver
from ds4_common.cuda.device import Device
from ds4_common.errors import CudaUnsupported, WrongCudaDevice

FIT = Device(1, "fit", "GPU-1", (9, 0), False, 1 << 34, 1 << 17, 13000)
OLD = replace(FIT, ordinal=0, name="old", uuid="GPU-0")  # without virtual memory management


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(name: str, *_: Any, **__: Any) -> int:
        assert name == "cuDeviceGetCount"
        return 2

    monkeypatch.setattr(driver, "init", lambda: None)
    monkeypatch.setattr(driver, "call", call)
    monkeypatch.setattr(module, "_describe", lambda ordinal: (OLD, FIT)[ordinal])
    monkeypatch.setattr(module, "_attribute", lambda ordinal, _: ordinal)


@pytest.mark.usefixtures("two_devices")
def test_a_device_that_cannot_share_is_no_obstacle_to_the_one_that_has_the_weights() -> None:
    assert module.find("GPU-1") == FIT
    with pytest.raises(CudaUnsupported, match=r"device 0 \(old\) has no virtual memory"):
        module.find("GPU-0")
    with pytest.raises(WrongCudaDevice, match=r"GPU-0 \(old\), GPU-1 \(fit\)"):
        module.find("GPU-2")
