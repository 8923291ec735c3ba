"""What the project relies on a CUDA driver for, claim by claim: helpers/driver/*_claims.py.

By default on the stand-in driver, in lazy and eager mode, as a discrete and an integrated device;
with DS4_TEST_GPU=1 (`make gpu-test`) the same claims on this machine's device. They run in
processes of their own, so nothing of a driver leaks into the other tests. What only the stand-in
has to refuse (`strict_claim`) is tried on a device too, and skipped where the device lets it pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from helpers import cuda_stand_in
from helpers.driver import processes
from helpers.driver.bench import STRICT, cubin

CUBIN_MACHINE = 190  # e_machine of CUDA code
Settings = dict[str, str] | None
ON_DEVICE = os.environ.get("DS4_TEST_GPU") == "1"
STAND_IN: dict[str, Settings] = {
    "lazy": {"streams": "lazy"},
    "eager": {"streams": "eager"},
    "integrated": {"profile": "integrated", "host": "hidden"},
}
MODES: dict[str, Settings] = {"device": None} if ON_DEVICE else STAND_IN
MISSING = "" if ON_DEVICE else cuda_stand_in.missing()

pytestmark = [pytest.mark.gpu] if ON_DEVICE else [pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.mark.parametrize("target", ["sm_90", "sm_120a", "sm_121a"])
def test_the_kernels_of_the_contract_compile_for_devices(target: str) -> None:
    image = cubin(target)
    assert image[:4] == b"\x7fELF"
    assert int.from_bytes(image[18:20], "little") == CUBIN_MACHINE


@pytest.fixture(scope="module", params=MODES)
def settings(request: pytest.FixtureRequest) -> Settings:
    return MODES[request.param]


@pytest.fixture(scope="module")
def claimant(settings: Settings) -> Iterator[processes.Claimant]:
    with closing(processes.Claimant(settings)) as made:
        yield made


@pytest.mark.parametrize("claim", processes.ORDINARY)
def test_the_driver_keeps_its_promise(claimant: processes.Claimant, claim: str) -> None:
    try:
        claimant.hold(claim)
    except AssertionError as error:
        if ON_DEVICE and claim in STRICT:
            pytest.skip(f"the stand-in is stricter than this device: {error}")
        raise


@pytest.mark.parametrize("claim", processes.FATAL)
def test_the_driver_tells_a_fault(settings: Settings, claim: str) -> None:
    with processes.process(settings) as worker:
        processes.run(worker, claim)
