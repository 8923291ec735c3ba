"""`ds4-weight-server top` beside a real owner and worker."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import stack
from helpers.replacing import an_address, tool
from helpers.stack import DEADLINE_SECONDS


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_top_shows_memory_workers_and_rates_once_when_piped(
    models: dict[str, Path], run: Path, kind: str
) -> None:
    at = an_address(kind, run)
    with stack.owner(models["a"], run) as owner, stack.worker(run / "w", at) as worker:
        body = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
        assert stack.request(at, "POST", "/v1/completions", body)[0] == 200
        seen = tool("top", "--manifest", str(run / "w"), "--interval", "0.1", run=run)
        assert seen.returncode == 0, seen.stdout
        rows = {line.split()[0]: line.split() for line in seen.stdout.splitlines() if line.strip()}
        assert str(models["a"].name) in rows[str(owner.process.pid)]
        shown = rows[str(worker.process.pid)]
        assert shown[2] == (f"127.0.0.1:{at}" if kind == "tcp" else f"unix:{at}")
        assert "-" not in shown, "the worker's counters were not read"
        assert "available" in seen.stdout


def test_top_on_a_terminal_is_left_with_q(models: dict[str, Path], run: Path) -> None:
    with stack.owner(models["a"], run) as owner:
        terminal, inside = os.openpty()
        import fcntl
        import termios

        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "ds4_owner.cli", "top", "--manifest", str(run / "w")],
            stdin=inside, stdout=inside, stderr=inside,
            env=stack.process_environment(TERM="xterm"),
        )  # fmt: skip
        os.close(inside)
        shown = b""
        while str(owner.process.pid).encode() not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, b"q")
        while process.poll() is None:
            try:
                os.read(terminal, 4096)
            except OSError:
                break
        assert process.wait(DEADLINE_SECONDS) == 0
        os.close(terminal)
