"""Log lines and progress: what a script or a person sees, and that it cannot hurt the owner."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from contextlib import suppress

import pytest

from ds4_owner import progress
from ds4_owner.progress import LoadView, log

GIB = 1 << 30


def test_lines_carry_the_published_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    log("ready manifest=w ranges=1")
    assert capfd.readouterr().err == "ds4_weight_server: ready manifest=w ranges=1\n"


def test_progress_says_bytes_share_rate_and_remaining_time() -> None:
    line = LoadView(4 * GIB, terminal=False).line(GIB, 2.0)
    assert line == "loaded 1.00 of 4.00 GiB (25 %), 0.54 GB/s, 6 s left"


def test_without_a_terminal_there_is_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    view = LoadView(4 * GIB, terminal=False)
    for second in range(11):
        now[0] = 100.0 + second
        view.update(second << 28)
    view.close()
    assert len(capfd.readouterr().err.splitlines()) == 2


def test_on_a_terminal_a_long_load_shows_a_bar_and_a_short_one_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    master, slave = pty.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        view = LoadView(4 * GIB)
        view.update(1)
        assert not select.select([master], [], [], 0)[0]
        now[0] = 102.0
        view.update(2 * GIB)
        view.close()
        view.close()
    shown = ""
    with suppress(OSError):  # the end: the terminal's other side is closed
        while True:
            shown += os.read(master, 4096).decode()
    os.close(master)
    assert "loading" in shown
    assert "2.1/4.3 GB" in shown


def test_tables_are_plain_text_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    progress.print_table("memory budget", [("ranges", "1.00 GiB"), ("scratch", "2.00 MiB")])
    assert capfd.readouterr().err.splitlines() == [
        "ds4_weight_server: memory budget",
        "ds4_weight_server:   ranges       1.00 GiB",
        "ds4_weight_server:   scratch      2.00 MiB",
    ]
