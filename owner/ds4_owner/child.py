"""The owner's end of the loader child: start it, talk to it, end it, say how it ended.

Owns the process and its socket. Refuses to leave a child behind: `close` kills and reaps it, and
the child ends by itself when the owner does. What the child says is checked by type (job.py); a
packet that does not decode is a LoaderError.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from ds4_common import fdpass
from ds4_common.errors import (
    BudgetError,
    CudaError,
    Ds4Error,
    IdentityError,
    LoaderError,
    ProtocolError,
    UsageError,
)
from ds4_owner import job
from ds4_owner.lending import Descriptor, lent

# -P: the loader imports what is installed, whatever folder the owner was started in.
COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "ds4_owner.loader")
_KINDS: dict[str, type[Ds4Error]] = {
    "usage": UsageError, "budget": BudgetError, "identity": IdentityError,
    "gguf": LoaderError, "other": LoaderError,
}  # fmt: skip


def cuda_error(failed: job.Failed) -> CudaError:
    """The error of the driver as the child had it, with the same exit code."""
    classes: list[type[CudaError]] = [CudaError, *CudaError.__subclasses__()]
    kinds = {kind.exit_code: kind for kind in classes}
    return kinds.get(failed.exit_code, CudaError)(failed.message)


class LoaderChild:
    """A running loader. `sock` is for poll(); `step` is the last thing it was seen doing."""

    def __init__(self) -> None:
        """Starts the process. Raises LoaderError when that is impossible."""
        self.step = "starting"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*COMMAND, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise LoaderError(f"cannot start the loader: {error.strerror}") from error
        self.sock = ours
        self.pid = self._process.pid

    def send(self, message: job.ToChild, fds: Sequence[int] = ()) -> None:
        """Raises LoaderError when the child is gone."""
        try:
            fdpass.send(self.sock, job.encode(message), fds)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self.death() from error

    def send_descriptors(self, descriptors: Sequence[Descriptor]) -> None:
        for first in range(0, len(descriptors), fdpass.MAX_FDS):
            part = descriptors[first : first + fdpass.MAX_FDS]
            with lent(part) as fds:
                self.send(job.Descriptors(len(fds)), fds)

    def receive(self) -> job.ToOwner:
        """The next message; call it when `sock` is readable. Raises what the child failed with, or
        LoaderError when it died."""
        try:
            data, fds = fdpass.receive(self.sock)
            fdpass.close_all(fds)
            if not data:
                raise self.death()
            message = job.decode_to_owner(data)
        except ConnectionResetError as error:
            raise self.death() from error
        except (ProtocolError, msgspec.DecodeError) as error:
            raise LoaderError(f"the loader sent nonsense while {self.step}: {error}") from error
        if isinstance(message, job.Failed):
            if message.kind == "cuda":
                raise cuda_error(message)
            raise _KINDS[message.kind](message.message)
        if isinstance(message, job.Progress):
            self.step = message.phase
        return message

    def death(self) -> LoaderError:
        """Reaps the child and says how it ended."""
        code = self._process.wait()
        if code < 0:
            how = f"killed by signal {-code} ({signal.Signals(-code).name})"
            if -code == signal.SIGKILL:
                how += "; if nobody did that, the kernel ran out of memory (see dmesg)"
        else:
            how = f"exit code {code}"
        return LoaderError(f"the loader (pid {self.pid}) died while {self.step}: {how}")

    def close(self) -> None:
        """Ends and reaps the child, whatever it is doing. Safe to call twice."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()
        self.sock.close()
