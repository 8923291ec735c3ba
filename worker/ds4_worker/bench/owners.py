"""What the end of an owner's program costs those who attach: a reexec, and adoption after a kill.

Owns: the waiting time of attach requests while the program is replaced, as the owner says it and as
a client that attaches all the time sees it; and the time from exec to READY=1 of an owner that
finds its memory at the service manager.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from ds4_common import client
from ds4_common.errors import Ds4Error
from ds4_worker.bench import processes
from ds4_worker.bench.report import Row, summarise


def reexec(manifest: Path, runs: int) -> list[Row]:
    """Raises Ds4Error when an attachment fails."""
    said, seen = [], []
    client.connect(str(manifest), role="reader").close()
    for _ in range(runs):
        with (
            _Attaching(manifest) as attaching,
            client.connect(str(manifest), "operator") as operator,
        ):
            said.append(operator.request_reexec() * 1e3)
        seen.append(attaching.slowest_ms)
    return [
        summarise("reexec: attach requests wait", "ms", said, goal="<= 100"),
        summarise("reexec: slowest attach meanwhile", "ms", seen, goal="<= 100"),
    ]


class _Attaching:
    """A client that attaches again and again, in a thread, until the end of the block."""

    def __init__(self, manifest: Path) -> None:
        self.slowest_ms = 0.0
        self._manifest = str(manifest)
        self._done = threading.Event()
        self._failure: Ds4Error | None = None
        self._thread = threading.Thread(target=self._attach, name="attaching", daemon=True)

    def _attach(self) -> None:
        try:
            while not self._done.is_set():
                started = time.perf_counter()
                client.connect(self._manifest, role="reader", name="bench").close()
                self.slowest_ms = max(self.slowest_ms, (time.perf_counter() - started) * 1e3)
                self._done.wait(0.001)
        except Ds4Error as error:
            self._failure = error

    def __enter__(self) -> _Attaching:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._done.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def adoption(model: Path, runs: int, *, ranges: int = 64, gigabytes: float = 16.0) -> list[Row]:
    """Of memory of that size; its pages are not touched, and none is needed."""
    command = [sys.executable, "-P", "-m", "ds4_owner.measure_adoption", str(runs), str(ranges)]
    done = subprocess.run(
        [*command, str(gigabytes), str(model)],
        capture_output=True,
        text=True,
        env=processes.python_environment(),
    )
    if done.returncode:
        raise Ds4Error(f"adoption: {done.stderr.strip()}")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    label = f"adoption of {gigabytes:g} GB in {ranges} ranges"
    return [
        summarise(f"{label}, exec to ready", "ms", [r["total"] for r in results], goal="<= 100"),
        summarise(f"{label}, the step alone", "ms", [r["step"] for r in results], goal="<= 100"),
    ]
