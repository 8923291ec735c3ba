"""What proves that a descriptor from the service manager is the device memory of the record.

A descriptor of device memory says nothing about itself: no inode, no size, no seals. So its content
is asked: a short-lived child makes a context on the device of the record, maps the memory read-only
and compares the samples that the loader took. The resident owner makes no context. What samples
cannot see - single bits, written by a process of the same user - is for `verify`.

Owns both ends: `check` in the owner, `main` in the child (`python -m ds4_owner.device_proof FD`).
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
from msgspec import Struct

from ds4_common import fdpass
from ds4_common.errors import Ds4Error, HandoverError
from ds4_common.protocol import DeviceRecord

SECONDS = 60.0  # a context may take some
COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "ds4_owner.device_proof")
_PR_SET_PDEATHSIG = 1


class Claim(Struct, frozen=True):
    """One allocation: `n_bytes` of content whose samples have the hash `sample`."""

    label: str
    alloc_bytes: int
    n_bytes: int
    sample: str


class _Part(Struct, frozen=True):
    """Claims with a descriptor each; `remaining` in later packets."""

    device: DeviceRecord
    claims: list[Claim]
    remaining: int


class _Verdict(Struct, frozen=True):
    problem: str = ""


def check(device: DeviceRecord, claims: Sequence[tuple[Claim, int]]) -> None:
    """Raises HandoverError unless every (claim, borrowed descriptor) is what it says."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        try:
            child = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        except OSError as error:
            raise HandoverError(f"cannot check device memory: {error.strerror}") from error
        theirs.close()
        ours.settimeout(SECONDS)
        try:
            verdict = _ask(ours, device, claims)
        except (OSError, Ds4Error, msgspec.DecodeError) as error:
            raise HandoverError(f"device memory could not be checked: {error}") from error
        finally:
            child.kill()
            child.wait()
    if verdict.problem:
        raise HandoverError(verdict.problem)


def _ask(
    sock: socket.socket, device: DeviceRecord, claims: Sequence[tuple[Claim, int]]
) -> _Verdict:
    for first in range(0, len(claims), fdpass.MAX_FDS):
        part = claims[first : first + fdpass.MAX_FDS]
        message = _Part(device, [claim for claim, _ in part], len(claims) - first - len(part))
        fdpass.send(sock, msgspec.json.encode(message), [fd for _, fd in part])
    data, fds = fdpass.receive(sock)
    fdpass.close_all(fds)
    if not data:
        raise HandoverError("the process that checks it died")
    return msgspec.json.decode(data, type=_Verdict)


# The child


def main(arguments: Sequence[str]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with socket.socket(fileno=int(arguments[0])) as sock, ExitStack() as cleanup:
        try:
            problem = _compare(sock, cleanup)
        except (Ds4Error, OSError) as error:
            problem = str(error)
        fdpass.send(sock, msgspec.json.encode(_Verdict(problem)))
    return 0


def _compare(sock: socket.socket, cleanup: ExitStack) -> str:
    """The first thing that is not as claimed; "" when all is."""
    from ds4_common.cuda.device import Context
    from ds4_common.cuda.memory import Allocation, Mapping
    from ds4_common.cuda.ranges import find_device
    from ds4_common.cuda.reading import DeviceReader

    context: Context | None = None
    mapped: list[tuple[Claim, int]] = []
    remaining = 1
    while remaining:
        data, fds = fdpass.receive(sock)
        part = msgspec.json.decode(data, type=_Part)
        remaining = part.remaining
        if context is None:
            context = cleanup.enter_context(Context(find_device(part.device)))
        for claim, fd in zip(part.claims, fds, strict=True):
            with Allocation.import_fd(fd, claim.alloc_bytes, claim.label) as memory:
                mapping = Mapping(memory, context.device, writable=False)
            cleanup.callback(mapping.close)
            mapped.append((claim, mapping.address))
        fdpass.close_all(fds)
    with DeviceReader() as reader:
        found = reader.samples([(address, claim.n_bytes) for claim, address in mapped])
    for (claim, _), sample in zip(mapped, found, strict=True):
        if sample != claim.sample:
            return f"memory {claim.label}: got sample hash {sample}, expected {claim.sample}"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
