"""What a person or a script sees while an owner starts: log lines and the progress of loading.

Every line of an owner begins with `ds4_weight_server: `, as scripts written for the published
server expect. How lines are written is `ds4_common.log`'s business.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from ds4_common.log import write_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PREFIX = "ds4_weight_server: "
FIRST_BAR_SECONDS = 1.0  # shorter loads show no bar, and do not pay for importing one
LINE_SECONDS = 5.0


def gib(n_bytes: int) -> str:
    """`1.25 GiB`, the form in which the published server prints sizes."""
    return f"{n_bytes / (1 << 30):.2f} GiB"


def size(n_bytes: int) -> str:
    """`1.25 GiB` or `98.10 MiB`: for people."""
    return gib(n_bytes) if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):.2f} MiB"


def log(line: str, prefix: str = PREFIX) -> None:
    write_line(f"{prefix}{line}")


class LoadView:
    """Shows bytes, rate and remaining time: a bar on a terminal, a line every 5 s elsewhere."""

    def __init__(
        self, total_bytes: int, *, terminal: bool | None = None, verb: str = "load"
    ) -> None:
        """`verb`: what is done to the bytes."""
        self.total_bytes = total_bytes
        self._verb = verb
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._start = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def update(self, done_bytes: int) -> None:
        now = time.monotonic()
        if self._terminal:
            if now - self._start >= FIRST_BAR_SECONDS:
                self._draw(done_bytes)
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            log(self.line(done_bytes, now - self._start))

    def line(self, done_bytes: int, seconds: float) -> str:
        """`loaded 1.00 of 4.00 GiB (25 %), 2.10 GB/s, 2 s left`."""
        rate = done_bytes / seconds if seconds > 0 else 0.0
        left = f"{(self.total_bytes - done_bytes) / rate:.0f} s left" if rate else "no data yet"
        share = 100 * done_bytes // self.total_bytes if self.total_bytes else 100
        return (
            f"{self._verb}ed {done_bytes / (1 << 30):.2f} of {gib(self.total_bytes)} ({share} %),"
            f" {rate / 1e9:.2f} GB/s, {left}"
        )

    def _draw(self, done_bytes: int) -> None:
        if self._bar is None:
            self._bar, self._task = _make_bar(self.total_bytes, f"{self._verb}ing")
            self._bar.start()
        if self._task is not None:
            self._bar.update(self._task, completed=done_bytes)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_bar(total_bytes: int, label: str) -> tuple[Progress, TaskID]:
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn(label), progress.BarColumn(), progress.DownloadColumn(),
        progress.TransferSpeedColumn(), progress.TimeRemainingColumn(),
        console=Console(stderr=True), auto_refresh=False, transient=True,
    )  # fmt: skip
    return bar, bar.add_task(label, total=total_bytes)


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """A two-column table on stderr: rich on a terminal, aligned plain text elsewhere."""
    if sys.stderr.isatty():
        from ds4_owner import tables

        write_line(tables.drawn_text([(title, ("what", "bytes"), rows)], stderr=True))
        return
    width = max((len(name) for name, _ in rows), default=0)
    log(title)
    for name, value in rows:
        log(f"  {name:<{width}}  {value:>12}")
