"""The loader child: parses, plans, loads, hashes, prepares the contract, and exits.

Run as `python -m ds4_owner.loader FD` by the owner, FD being its end of a SOCK_SEQPACKET pair
(protocol: job.py). Owns everything that touches an untrusted file, so that a crash, a kill or an
out-of-memory here costs the owner a clear message and nothing else. It ends when its owner does
(PR_SET_PDEATHSIG), holds no name in any file system, and never decides anything: the owner gives
the budget and the memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ds4_common.errors import (
    BudgetError,
    CudaError,
    Ds4Error,
    GgufError,
    IdentityError,
    LoaderError,
    UsageError,
)
from ds4_common.gguf import LogicalModel
from ds4_owner import job
from ds4_owner.channel import Channel as Channel
from ds4_owner.index_tables import check_index_tables
from ds4_owner.loader_plan import Models, describe, make_plan, prepare_base, scratch_bytes
from ds4_owner.loading import Loader

if TYPE_CHECKING:
    from ds4_owner.device_loader import Session

PR_SET_PDEATHSIG = 1
OOM_SCORE = "800"  # when memory runs out, the loader is what may go


def serve(channel: Channel) -> None:
    """Plays the protocol once, from Job to Done."""
    message, _ = channel.receive()
    if not isinstance(message, job.Job):
        raise LoaderError(f"expected a job, got {type(message).__name__}")
    if os.getppid() != message.parent_pid:
        sys.exit(0)  # the owner died before the kernel knew that we end with it
    config = message.config
    with ExitStack() as files:
        session = _session(message, files)
        models: Models = {}
        for name, path in config.model_files:
            models[name] = files.enter_context(LogicalModel.open(path))
            if len(models[name].shards) > 1:
                channel.log(f"mapped {len(models[name].shards)} GGUF shards")
        load_plan, notes = make_plan(config, models, message.granularity)
        prepared = prepare_base(config, models, load_plan, notes)
        if prepared is not None:
            check_index_tables(prepared.model, prepared.bundle)
        for first in range(0, len(load_plan.allocations), job.PLAN_PART):
            part = load_plan.allocations[first : first + job.PLAN_PART]
            channel.send(job.PlanPart(part))
        described = tuple(describe(models, load_plan, config.span_bytes))
        channel.send(job.Planned(described, scratch_bytes(config, load_plan), tuple(notes)))
        order = _order(channel, session)
        fds: list[int] = []
        while len(fds) < len(load_plan.allocations) + len(job.BLOB_NAMES):
            _, more = channel.receive()
            for fd in more:
                if session is not None and len(fds) < len(load_plan.allocations):
                    session.map(load_plan.allocations[len(fds)], fd)
                    fd = -1
                fds.append(fd)
        if session is None:
            loader = Loader(channel, config, models, load_plan, prepared, order, fds)
        else:
            from ds4_owner.device_loader import DeviceLoader

            loader = DeviceLoader(
                session, channel, config, models, load_plan, prepared, order, fds
            )  # fmt: skip
        loader.run(files)


def _session(message: job.Job, files: ExitStack) -> Session | None:
    """The context on the device whose memory is wanted; None: host memory is."""
    if message.config.backend != "vmm":
        return None
    from ds4_owner.device_loader import Session

    session = Session(message.config.device, message.device_uuid)
    files.callback(session.close)
    return session


def _order(channel: Channel, session: Session | None) -> job.Load:
    """The order to load; answers questions until it comes."""
    while True:
        order, _ = channel.receive()
        if isinstance(order, job.Load):
            return order
        if session is None or not isinstance(order, job.Measure):
            raise LoaderError(f"expected an order to load, got {type(order).__name__}")
        channel.send(session.measure())


def failure(error: Exception) -> job.Failed:
    """The message for an expected failure."""
    kinds: tuple[tuple[type[Exception], job.ErrorKind], ...] = (
        (UsageError, "usage"), (GgufError, "gguf"), (BudgetError, "budget"),
        (IdentityError, "identity"),
    )  # fmt: skip
    kind: job.ErrorKind = next((name for cls, name in kinds if isinstance(error, cls)), "other")
    if isinstance(error, CudaError):
        return job.Failed("cuda", str(error), error.exit_code)
    if isinstance(error, MemoryError):
        return job.Failed("budget", "out of memory while loading")
    if isinstance(error, OSError):
        return job.Failed("other", f"loading: {error.strerror or error}")
    return job.Failed(kind, str(error))


def main(arguments: Sequence[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the owner, which ends us
    with suppress(OSError):  # no /proc: the default score is fine
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    try:
        serve(channel)
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the owner is gone; there is nobody to tell
    except (Ds4Error, OSError, MemoryError) as error:
        channel.send(failure(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
