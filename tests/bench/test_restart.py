"""Restarts that are measured leave nothing behind, however they end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds4_common.errors import Ds4Error
from ds4_worker.bench import processes, restart


def test_a_restart_that_fails_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*_: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    def fail(port: int) -> None:
        raise Ds4Error(f"nobody answers on port {port}")

    monkeypatch.setattr(processes, "start_worker", start)
    monkeypatch.setattr(processes, "wait_until_healthy", fail)
    with pytest.raises(Ds4Error, match="nobody answers"):
        restart.measure(tmp_path / "w", 1)
    (worker,) = started
    assert worker.poll() == -signal.SIGKILL
    assert worker.stdin is not None
    worker.stdin.close()
