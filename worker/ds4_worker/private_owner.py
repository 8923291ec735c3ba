"""A private owner for one model file: found if it runs, started if it does not, left running.

Owns: where private owners live, the lock under which one of several workers starts one, and what a
command that started one leaves behind when it fails. The key of an owner is its model file as it is
now (path, device, inode, size, time), so a changed file gets another owner. Refuses to go on when
the new owner dies, with the owner's own words.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NamedTuple

from ds4_common import client, paths
from ds4_common.errors import AddressError, OwnerUnavailable, UsageError

# Until the new owner's control socket answers; loading itself may take longer.
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0  # from the word that it stops to the end of its process
_FAILED_SECONDS = 5.0  # the same from the word that it failed
_POLL_SECONDS = 0.01
_LOG_TAIL_BYTES = 4000
_SECRETS = ("DS4_API_KEY",)  # of this worker; the owner outlives it


class Found(NamedTuple):
    """A private owner that answers. What a command does with it belongs in a `with` block of
    `use`: that takes back what the command started, where the command fails."""

    manifest: str
    use: AbstractContextManager[None]


def manifest_for(model: str, owner: str, backend: str = "memfd") -> str:
    """The manifest of the private owner of `model`: `owner` itself, unless that is "auto"."""
    if owner not in ("auto", "none"):
        return os.path.abspath(owner)
    return paths.private_manifest(model, backend)


def ensure_owner(model: str, owner: str, backend: str = "memfd") -> Found:
    """An owner of `model` whose control socket answers; starts it if need be.

    Raises UsageError for `owner` "none", OwnerUnavailable when the owner cannot start."""
    if owner == "none":
        raise UsageError(
            f"-m {model}: --owner none forbids a private owner; name one that runs by --manifest "
            f"or {paths.MANIFEST_VARIABLE}"
        )
    manifest = manifest_for(model, owner, backend)
    paths.check_socket_path(paths.control_socket_path(manifest), "--owner")
    if _answers(manifest):
        return Found(manifest, nullcontext())
    try:
        with _start_lock(manifest):
            if _answers(manifest):  # somebody else started it while we waited
                return Found(manifest, nullcontext())
            process = _start(os.path.realpath(model), manifest, backend)
    except OSError as error:
        raise OwnerUnavailable(
            f"cannot start a private owner at {manifest}: {error}; choose another --owner PATH"
        ) from error
    return Found(manifest, _started(manifest, process))


@contextmanager
def _started(manifest: str, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Around what a command does with the owner that it started. One that has no address to serve
    at takes the owner back, unless another process uses it. One whose owner failed ends with the
    owner's exit code. The log of an owner that has ended goes, as it said why; that of a killed
    one, which could not, stays."""
    try:
        yield
    except AddressError:
        if _withdraw(manifest):
            _wait(process, _STOP_SECONDS)
        raise
    except OwnerUnavailable as error:
        _wait(process, _FAILED_SECONDS)
        if (failed := process.poll()) is not None and failed > 0:
            error.exit_code = failed
        raise
    finally:
        code = process.poll()
        if code is not None and code >= 0:
            _remove_log(manifest)


def _remove_log(manifest: str) -> None:
    """Unless it is that of the next owner by now."""
    with suppress(FileNotFoundError), _start_lock(manifest):
        if not _answers(manifest):
            _remove(paths.log_path(manifest))


def _withdraw(manifest: str) -> bool:
    try:
        with client.connect(manifest, "stop") as connection:
            connection.request_stop(unless_used=True)
    except OwnerUnavailable as error:
        _tell(f"the private owner at {manifest} was not stopped: {error}")
        return False
    _tell(f"stopped the private owner at {manifest} again")
    return True


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _start_lock(manifest: str) -> Iterator[None]:
    """Its file is gone afterwards, so a lock counts only while the file is still in its place."""
    path = paths.start_path(manifest)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                break
        os.close(fd)
    try:
        yield
    finally:
        _remove(path)
        os.close(fd)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _answers(manifest: str) -> bool:
    """Whether somebody accepts connections at the control socket."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(paths.control_socket_path(manifest))
        except OSError:
            return False
    return True


def _start(model: str, manifest: str, backend: str) -> subprocess.Popen[bytes]:
    """An owner that answers. Needs no lock: only one owner can have the sockets of a manifest."""
    log_path = paths.log_path(manifest)
    _tell(f"starting a private owner for {model} (log: {log_path})")
    command = [sys.executable, "-P", "-m", "ds4_owner.cli", "--base", model, "--manifest", manifest]
    command += ["--no-lock", "--scope", "base", "--backend", backend]
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
                f"{_last_words(log_path)}"
            )
        if time.monotonic() > deadline:
            process.terminate()
            raise OwnerUnavailable(
                f"the private owner of {model} did not answer within {_START_SECONDS:g} s; "
                f"see {log_path}"
            )
        time.sleep(_POLL_SECONDS)
    return process


def _last_words(log_path: str) -> str:
    """What an owner that has ended said. Its log goes, unless the words name it."""
    with open(log_path, "rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _LOG_TAIL_BYTES))
        text = log.read().decode(errors="replace").strip()
    if not text:
        return f"it left nothing in its log {log_path}; is that disk full?"
    if size > _LOG_TAIL_BYTES:
        return f"{text}\n(all of it: {log_path})"
    _remove(log_path)
    return text
