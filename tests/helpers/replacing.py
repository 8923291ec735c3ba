"""`ds4-weight-server replace` run by tests: in a folder of its own, against owners that live there.

Owns the folder with the manifest `w`, what ends everything that a replacement left running, and
what the owner at that manifest and the journal say.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds4_common import client
from ds4_common.errors import OwnerUnavailable
from ds4_owner.replace import processes
from helpers import stack
from helpers.stack import DEADLINE_SECONDS

QUICK = ("--clear-cache-cmd", "", "--ready-seconds", "60")


def end(pid: int) -> None:
    identity = processes.identify(pid)
    if identity is not None:
        assert processes.stop([identity], signal.SIGKILL, DEADLINE_SECONDS) == []


def an_address(kind: str, run: Path) -> int | Path:
    """Where a worker of a test listens, `tcp` or `unix`."""
    return stack.free_port() if kind == "tcp" else run / "http.sock"


@contextmanager
def folder() -> Iterator[Path]:
    """A folder with a short path. Ends the owners at its manifests and their workers."""
    with tempfile.TemporaryDirectory(prefix="ds4-") as name:
        yield Path(name)
        for socket in Path(name).rglob("*.ctl"):
            try:
                with client.connect(str(socket).removesuffix(".ctl"), "status") as owner:
                    pids = [lease.pid for lease in owner.status().leases]
                    pids.append(owner.owner_pid)
            except OwnerUnavailable:
                continue
            for pid in pids:
                end(pid)


def _run(module: str, *arguments: str, run: Path, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE_SECONDS, cwd=run,
        env=stack.process_environment(XDG_RUNTIME_DIR=str(run), **environment),
    )  # fmt: skip


def tool(*arguments: str, run: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`ds4-weight-server` with a subcommand; stderr is in its stdout."""
    done: subprocess.CompletedProcess[str] = _run(
        "ds4_owner.cli", *arguments, run=run, **environment
    )
    return done


def replace(run: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    quick = ("--manifest", str(run / "w"), *QUICK)
    return tool("replace", *arguments[:1], *quick, *arguments[1:], run=run, **environment)


def killed_replace(
    run: Path, step: str, model: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """One that is killed in a step (helpers.killed_replacement)."""
    flags = ("--manifest", str(run / "w"), *QUICK)
    done: subprocess.CompletedProcess[str] = _run(
        "helpers.killed_replacement", step, "replace", str(model), *flags, run=run, **environment
    )
    return done


def served_by(manifest: Path) -> tuple[int, str, list[int]]:
    """(owner's pid, its model file, pids of its leases)."""
    with client.connect(str(manifest), "status") as owner:
        (model,) = owner.welcome.models
        return owner.owner_pid, model.files[0].path, [x.pid for x in owner.status().leases]


def events(run: Path) -> list[dict[str, Any]]:
    """The journal."""
    return [json.loads(line) for line in (run / "w.replace.jsonl").read_text().splitlines()]
