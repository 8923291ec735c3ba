"""Settings of the whole suite."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# A slow machine is not a failing claim: no time limit per example (speed lives in ds4-bench).
settings.register_profile("ds4", deadline=None)
settings.load_profile("ds4")

# `nohup make test &` starts with these ignored, and every program under test would inherit that.
# A handler of ours protects the run as well, and exec resets it to the default.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

_DEVICE = ("gpu", "cuda", "vmm", "device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two halves that share neither files nor names, for `-n 2 --dist loadgroup`: whatever runs on
    the stand-in device, and everything else, whose tests share private owners and real ports."""
    for item in items:
        path = item.path.relative_to(item.config.rootpath).as_posix()
        half = "device" if any(word in path for word in _DEVICE) else "host"
        if " at 0x" in item.nodeid:  # another name in every process: the halves would not agree
            raise pytest.UsageError(f"{item.nodeid}: an address in the name; give the case an id")
        item.add_marker(pytest.mark.xdist_group(half))
