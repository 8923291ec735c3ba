"""Where a job runs: what limits its memory, and which cgroup ends it at once.

Three ways, the strongest that works: a transient systemd scope, a cgroup v2 of the guard's own,
RLIMIT_DATA. A way counts only after it was seen to work: a scope whose memory.max does not hold the
asked number (no memory controller, cgroup v1) is passed over. Refuses to move a job out from under
a memory limit that the guard itself lives in. Names are the kernel's: cgroups(7), systemd-run(1).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ds4_common.errors import BackendError
from ds4_owner.guard.policy import Limits

ScopeKind = Literal["systemd", "cgroup", "rlimit"]
KINDS: tuple[ScopeKind, ...] = ("systemd", "cgroup", "rlimit")
SLICE = "ds4guard.slice"
PROBE_SECONDS = 10.0
PAGE_BYTES_MAX = 64 * 1024
_EMPTY_SECONDS = 2.0  # for the kernel to tear down what was killed
EXPAND_OPTION_SINCE = 254  # systemd-run that may expand $VARIABLES of a scope's command


@dataclass(frozen=True, slots=True)
class Scope:
    kind: ScopeKind
    limits: Limits
    prefix: tuple[str, ...] = ()  # put before the command
    unit: str | None = None  # the scope the prefix creates
    folder: Path | None = None  # the cgroup the job enters before exec
    passed_over: tuple[str, ...] = ()  # stronger ways, and why not


def choose(limits: Limits, root: str, only: ScopeKind | None = None) -> Scope:
    """The strongest way that works, or `only` that one. Raises BackendError."""
    ways: dict[ScopeKind, Callable[[Limits, str], Scope]] = {
        "systemd": _systemd, "cgroup": _cgroup, "rlimit": _rlimit,
    }  # fmt: skip
    reasons: list[str] = []
    for kind in KINDS if only is None else (only,):
        try:
            scope = ways[kind](limits, root)
        except BackendError as error:
            reasons.append(f"{kind}: {error}")
            continue
        return replace(scope, passed_over=tuple(reasons))
    raise BackendError(f"no way to limit the job's memory: {'; '.join(reasons)}")


# A scope of the service manager


def _systemd(limits: Limits, root: str) -> Scope:
    if shutil.which("systemd-run") is None:
        raise BackendError("systemd-run is not installed")
    manager = "--system" if os.geteuid() == 0 else "--user"
    if manager == "--system" and not Path(root, "run/systemd/system").is_dir():
        raise BackendError("systemd does not run here")
    unit = f"ds4guard-{os.getpid()}"
    options = (
        "systemd-run", manager, "--scope", "--quiet", "--collect", f"--slice={SLICE}",
        f"--property=MemoryMax={limits.max_bytes}", f"--property=MemoryHigh={limits.high_bytes}",
        "--property=MemorySwapMax=0", *_plain_arguments(),
    )  # fmt: skip
    _try_scope((*options, f"--unit={unit}-probe", "--"), f"{unit}-probe", limits, root)
    return Scope("systemd", limits, (*options, f"--unit={unit}", "--"), unit)


def _plain_arguments() -> tuple[str, ...]:
    """The option that keeps `$x` in a command as it is, where systemd-run knows it."""
    words = subprocess.run(
        ["systemd-run", "--version"], capture_output=True, text=True, check=False
    ).stdout.split()
    known = len(words) > 1 and words[1].isdigit() and int(words[1]) >= EXPAND_OPTION_SINCE
    return ("--expand-environment=no",) if known else ()


def _try_scope(prefix: tuple[str, ...], unit: str, limits: Limits, root: str) -> None:
    """Runs cat in such a scope and looks at its memory.max. Raises BackendError."""
    probe = subprocess.Popen(
        [*prefix, "cat"], bufsize=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert probe.stdin is not None
    assert probe.stdout is not None
    assert probe.stderr is not None
    with probe:
        try:
            with contextlib.suppress(BrokenPipeError):
                probe.stdin.write(b"\n")
            if not select.select([probe.stdout], [], [], PROBE_SECONDS)[0]:
                raise BackendError(f"systemd-run gave no answer for {PROBE_SECONDS:.0f} s")
            if not probe.stdout.read(1):
                words = probe.stderr.read().decode(errors="replace").split()
                raise BackendError(f"systemd-run failed: {' '.join(words) or 'no message'}")
            folder = locate(root, probe.pid, unit)
            got = None if folder is None else _text(folder / "memory.max")
            if not _holds(got, limits.max_bytes):
                raise BackendError(
                    f"a scope does not limit memory here: memory.max is {got}, expected"
                    f" {limits.max_bytes} (the memory controller of cgroup v2 is needed)"
                )
        finally:
            if probe.poll() is None:
                probe.kill()


def _holds(got: str | None, asked_bytes: int) -> bool:
    """The kernel rounds a limit down to whole pages, of at most 64 KiB."""
    return got is not None and got.isdigit() and 0 <= asked_bytes - int(got) < PAGE_BYTES_MAX


def locate(root: str, pid: int, unit: str) -> Path | None:
    """The cgroup of `pid` when it is the scope `unit`, else None (not there yet)."""
    path = _membership(root, str(pid))
    if path is None:
        return None
    path = path.removesuffix(" (deleted)")
    return _mount(root) / path.strip("/") if path.endswith(f"/{unit}.scope") else None


# A cgroup of our own


def _cgroup(limits: Limits, root: str) -> Scope:
    mount = _mount(root)
    own = _membership(root, "self")
    if own is None or not (mount / "cgroup.controllers").exists():
        raise BackendError(f"no cgroup v2 at {mount}")
    if ".." in own.split("/"):
        raise BackendError(f"the guard's own cgroup {own} lies outside of {mount}")
    folder = _parent_for_job(mount, own) / f"ds4guard-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise BackendError(f"cannot create {folder}: {error.strerror}") from error
    try:
        (folder / "memory.max").write_text(str(limits.max_bytes))
        (folder / "memory.high").write_text(str(limits.high_bytes))
        if (folder / "memory.swap.max").exists():  # not without swap accounting
            (folder / "memory.swap.max").write_text("0")
    except OSError as error:
        remove_cgroup(folder)
        raise BackendError(f"cannot limit {folder}: {error.strerror}") from error
    return Scope("cgroup", limits, folder=folder)


def _parent_for_job(mount: Path, own: str) -> Path:
    """The nearest cgroup, ours or one above, that hands the memory controller to its children."""
    level = mount / own.strip("/")
    for folder in (level, *level.parents):
        if "memory" in (_text(folder / "cgroup.subtree_control") or "").split():
            if not os.access(folder / "cgroup.procs", os.W_OK):
                raise BackendError(f"{folder} is not ours to write")
            return folder
        if folder == mount:
            break
        if (_text(folder / "memory.max") or "max") != "max":
            raise BackendError(f"the job would escape the memory limit of {folder}")
    raise BackendError("no cgroup above hands down the memory controller")


def kill_cgroup(folder: Path) -> bool:
    """SIGKILL to everything in the cgroup at once; False where the kernel cannot (before 5.14)."""
    try:
        fd = os.open(folder / "cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, b"1")
    except OSError:  # the cgroup went away meanwhile
        return False
    finally:
        os.close(fd)
    return True


def remove_cgroup(folder: Path) -> None:
    """Removes an empty cgroup and those the job made below it. What was killed leaves its cgroup
    only once the kernel has torn it down: waits a moment for that. Raises OSError when one is
    busy."""
    _wait_until_empty(folder)
    for path, _, _ in os.walk(folder, topdown=False):
        os.rmdir(path)


def _wait_until_empty(folder: Path) -> None:
    try:
        fd = os.open(folder / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # no cgroup any more
    try:
        changes = select.poll()
        changes.register(fd, select.POLLPRI)  # cgroup v2: raised whenever the file changes
        deadline = time.monotonic() + _EMPTY_SECONDS
        while b"populated 0" not in os.pread(fd, 4096, 0):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            changes.poll(1000 * left)
    finally:
        os.close(fd)


def memory_used(folder: Path) -> int | None:
    text = _text(folder / "memory.current")
    return None if text is None else int(text)


def oom_kills(folder: Path) -> int:
    """How often the kernel killed a process of this cgroup for its limit."""
    lines = (_text(folder / "memory.events") or "").splitlines()
    return next((int(n) for name, n in map(str.split, lines) if name == "oom_kill"), 0)


# Neither


def _rlimit(limits: Limits, root: str) -> Scope:
    return Scope("rlimit", limits)


def describe(scope: Scope) -> str:
    """One line for people: what holds the limit, and what it does not hold."""
    size = f"{scope.limits.max_bytes / (1 << 30):.1f} GiB"
    match scope.kind:
        case "systemd":
            return f"limit {size} by the systemd scope {scope.unit}.scope in {SLICE}"
        case "cgroup":
            return f"limit {size} by the cgroup {scope.folder}"
        case "rlimit":
            return (
                f"limit {size} by RLIMIT_DATA, for each process of the job by itself: shared"
                " memory and the sum are not limited, nothing throttles; the watch is what"
                " protects the host"
            )


def _mount(root: str) -> Path:
    return Path(root, "sys/fs/cgroup")


def _membership(root: str, pid: str) -> str | None:
    """The cgroup v2 path of a process, as /proc tells it."""
    text = _text(Path(root, "proc", pid, "cgroup"))
    lines = [] if text is None else text.splitlines()
    return next((line[3:] for line in lines if line.startswith("0::")), None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
