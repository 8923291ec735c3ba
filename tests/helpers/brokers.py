"""A broker with real memory behind it, in this process or in its own, for tests.

`python -m helpers.brokers MANIFEST ALLOCATIONS OPEN_FILE_LIMIT DEAF ds4-weight-server` is the
process (the last word is for `stop`, which knows owners by it): it prints `ready`, then serves
until it is told to stop, when deaf by a signal only.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ds4_common import manifest
from ds4_common.allocation import Allocation
from ds4_common.manifest import Manifest, OwnerRecord
from ds4_common.protocol import MAX_COMMAND_CHARS, ModelRecord
from ds4_owner.answers import Blob, make_offer
from ds4_owner.broker import Broker

ALLOC_BYTES = 4 << 20
SEALS = 0xF  # SEAL, SHRINK, GROW, WRITE


def memory(n_bytes: int, content: bytes, seals: int = SEALS) -> int:
    """A memfd that begins with `content`."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, n_bytes)
    os.pwrite(fd, content, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def allocation(number: int, count: int, n_bytes: int = ALLOC_BYTES) -> Allocation:
    return Allocation(
        id=number,
        model="base",
        model_bytes=count * n_bytes,
        source_offset=number * n_bytes,
        source_bytes=n_bytes,
        n_bytes=n_bytes,
        alloc_bytes=n_bytes,
    )


def content(number: int) -> bytes:
    return b"allocation %d" % number


@dataclass
class Stage:
    """A started broker, the memory it hands out, and what it logged."""

    path: str
    broker: Broker
    stop_asked: threading.Event
    log: list[str] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)

    def ready(
        self,
        count: int = 3,
        *,
        n_bytes: int = ALLOC_BYTES,
        seals: int = SEALS,
        models: tuple[ModelRecord, ...] = (),
    ) -> None:
        self.allocations = [allocation(i, count, n_bytes) for i in range(count)]
        fds = {i: memory(n_bytes, content(i), seals) for i in range(count)}
        blobs = {name: memory(len(name), name.encode(), seals) for name in ("tokenizer", "image")}
        self.fds += [*fds.values(), *blobs.values()]
        offer = make_offer(
            self.allocations,
            fds,
            {i: f"{i:032x}" for i in range(count)},
            {name: Blob(fd, len(name), "0" * 32) for name, fd in blobs.items()},
            models,
        )
        self.broker.ready(offer)

    def settle(self) -> None:
        """Returns when the broker has handled everything that happened on its sockets before."""
        # The first may run in a turn that had begun earlier; a client's last packet and its end
        # take a turn each.
        for _ in range(3):
            reached = threading.Event()
            self.broker._transport.call(reached.set)
            assert reached.wait(30)


@contextmanager
def broker(folder: Path, backend: str = "memfd") -> Iterator[Stage]:
    """A broker in state "loading"; `ready` makes it hand out."""
    path = str(folder / "w")
    stop_asked = threading.Event()
    log: list[str] = []
    made = Broker(path, backend, "0123456789abcdef", log=log.append, on_stop=stop_asked.set)
    stage = Stage(path, made, stop_asked, log)
    made.start()
    try:
        yield stage
    finally:
        made.stop()
        for fd in stage.fds:
            os.close(fd)


def own_command() -> str:
    """What this process says of itself in an owner's books."""
    return " ".join(sys.orig_argv)[:MAX_COMMAND_CHARS]


@contextmanager
def broker_process(
    path: Path, allocations: int = 3, open_file_limit: int = 0, deaf: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """The same as its own process, ready."""
    arguments = [str(path), str(allocations), str(open_file_limit), str(int(deaf))]
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.brokers", *arguments, "ds4-weight-server"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    path, (count, limit, deaf) = sys.argv[1], map(int, sys.argv[2:5])
    stop_asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop_asked.set())
    on_stop = threading.Event().set if deaf else stop_asked.set
    made = Broker(path, "memfd", os.urandom(8).hex(), log=lambda line: None, on_stop=on_stop)
    made.start()
    stage = Stage(path, made, stop_asked)
    stage.ready(count, n_bytes=4096)
    manifest.write_manifest(
        path,
        Manifest(
            OwnerRecord(os.getpid(), 0, "base", None),
            made.line_path,
            (),
            tuple(stage.allocations),
            backend="memfd",
            owner_id="0123456789abcdef",
        ),
    )
    if limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    print("ready", flush=True)
    stop_asked.wait()
    made.stop()
    os.unlink(path)


if __name__ == "__main__":
    main()
