"""A private owner for one model file: found if it runs, started if it does not, left running.

Owns: where private owners live, and the lock under which one of several workers starts one. The key
of an owner is its model file as it is now (path, device, inode, size, time), so a changed file gets
another owner. Refuses to go on when the new owner dies, with the owner's own words.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ds4_common import paths
from ds4_common.errors import OwnerUnavailable, UsageError

# Until the new owner's control socket answers; loading itself may take longer.
_START_SECONDS = 60.0
_POLL_SECONDS = 0.01
_LOG_TAIL_BYTES = 4000
_SECRETS = ("DS4_API_KEY",)  # of this worker; the owner outlives it


def manifest_for(model: str, owner: str, backend: str = "memfd") -> str:
    """The manifest of the private owner of `model`: `owner` itself, unless that is "auto"."""
    if owner not in ("auto", "none"):
        return os.path.abspath(owner)
    return paths.private_manifest(model, backend)


def ensure_owner(model: str, owner: str, backend: str = "memfd") -> str:
    """The manifest of an owner of `model` whose control socket answers; starts it if need be.

    Raises UsageError for `owner` "none", OwnerUnavailable when the owner cannot start."""
    if owner == "none":
        raise UsageError(
            f"-m {model}: --owner none forbids a private owner; name one that runs by --manifest "
            f"or {paths.MANIFEST_VARIABLE}"
        )
    manifest = manifest_for(model, owner, backend)
    paths.check_socket_path(paths.control_socket_path(manifest), "--owner")
    if _answers(manifest):
        return manifest
    try:
        with _start_lock(manifest):
            if not _answers(manifest):  # somebody else may have started it while we waited
                _start(os.path.realpath(model), manifest, backend)
    except OSError as error:
        raise OwnerUnavailable(
            f"cannot start a private owner at {manifest}: {error}; choose another --owner PATH"
        ) from error
    return manifest


@contextmanager
def _start_lock(manifest: str) -> Iterator[None]:
    fd = os.open(f"{manifest}.start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _answers(manifest: str) -> bool:
    """Whether somebody accepts connections at the control socket."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(paths.control_socket_path(manifest))
        except OSError:
            return False
    return True


def _start(model: str, manifest: str, backend: str) -> None:
    log_path = f"{manifest}.log"
    print(f"starting a private owner for {model} (log: {log_path})", file=sys.stderr, flush=True)
    command = [sys.executable, "-P", "-m", "ds4_owner.cli", "--base", model, "--manifest", manifest]
    command += ["--lock-file", f"{manifest}.lock", "--scope", "base", "--backend", backend]
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={name: os.environ[name] for name in os.environ if name not in _SECRETS},
        )
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(manifest):
        if process.poll() is not None:
            raise OwnerUnavailable(
                f"the private owner of {model} ended with exit code {process.returncode}:\n"
                f"{_tail(log_path)}"
            )
        if time.monotonic() > deadline:
            process.terminate()
            raise OwnerUnavailable(
                f"the private owner of {model} did not answer within {_START_SECONDS:g} s; "
                f"see {log_path}"
            )
        time.sleep(_POLL_SECONDS)


def _tail(log_path: str) -> str:
    with open(log_path, "rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
        text = log.read().decode(errors="replace").strip()
    return text or f"it left nothing in its log {log_path}; is that disk full?"
