"""How long an owner takes to adopt memory from a service manager: `ds4-bench succession` asks.

    python -m ds4_owner.measure_adoption RUNS RANGES GIB MODEL_FILE

Owns: a stand-in for the descriptor store of a service manager, filled with sealed memory as an
owner would leave it, and the time from exec to the READY=1 of an owner that gets it. The memory is
of the full size and holds no pages, so the measurement fits any machine; the model file is only
looked at. Prints one JSON object per run, in milliseconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

from ds4_common.errors import Ds4Error, OwnerUnavailable
from ds4_common.identity import ShardStat
from ds4_common.protocol import AllocationRecord, ModelRecord
from ds4_owner import cli, proof, state
from ds4_owner.answers import file_record
from ds4_owner.backends import Memory, open_backend
from ds4_owner.config import load_key
from ds4_owner.fdstore import FIRST_FD, PREFIX, memory_name

READY_SECONDS = 60.0


def main(arguments: Sequence[str]) -> int:
    runs, ranges = int(arguments[0]), int(arguments[1])
    n_bytes = round(float(arguments[2]) * (1 << 30) / ranges)
    model = os.path.abspath(arguments[3])
    try:
        with tempfile.TemporaryDirectory(prefix="ds4-", dir=_run_folder()) as folder:
            _measure(folder, model, runs, ranges, n_bytes)
    except Ds4Error as error:
        print(f"ds4-bench: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run_folder() -> str | None:
    """Where manifests of the units lie: in memory. None: the default."""
    folders = (os.environ.get("XDG_RUNTIME_DIR", ""), "/run", "/dev/shm")
    return next((folder for folder in folders if os.access(folder, os.W_OK)), None)


def _measure(folder: str, model: str, runs: int, ranges: int, n_bytes: int) -> None:
    flags = ["--base", model, "--scope", "base", "--backend", "memfd", "--no-lock"]
    flags += ["--manifest", f"{folder}/w"]
    backend = open_backend("memfd")
    kept: dict[int | str, Memory] = {}
    for index in range(ranges):
        kept[index] = backend.create(f"base-{index}", n_bytes)
        backend.seal(kept[index])
    fd = state.write(_record(flags, model, kept, n_bytes))
    held = [(memory_name(key), piece.export_fd) for key, piece in kept.items()]
    held.append((f"{PREFIX}state.1", fd))
    for _ in range(runs):
        print(json.dumps(_one(folder, flags, held)), flush=True)


def _record(
    flags: Sequence[str], model: str, kept: dict[int | str, Memory], n_bytes: int
) -> state.State:
    """As the owner of such memory would have left it."""
    total = n_bytes * len(kept)
    return state.State(
        version=state.STATE_VERSION,
        owner_id=os.urandom(16).hex(),
        arguments=list(flags),
        load=load_key(cli.parse(flags, {})),
        backend="memfd",
        allocations=[
            AllocationRecord(
                id=int(key), model="base", model_bytes=total, source_offset=int(key) * n_bytes,
                source_bytes=n_bytes, n_bytes=n_bytes, alloc_bytes=n_bytes, hash128="0" * 32,
            )
            for key in kept
        ],
        models=[
            ModelRecord(
                id="base", n_bytes=total, fingerprint="0" * 16,
                files=[file_record(model, ShardStat.capture(model))],
            )
        ],
        blobs=[],
        memory=[proof.capture(key, memory) for key, memory in kept.items()],
        generation=1,
    )  # fmt: skip


def _one(folder: str, flags: Sequence[str], held: Sequence[tuple[str, int]]) -> dict[str, float]:
    """From exec to READY=1, and the step itself as the owner's log has it."""
    address, log = f"{folder}/notify", f"{folder}/log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(READY_SECONDS)
        started = time.perf_counter()
        pid = os.fork()
        if not pid:
            _become_owner(flags, held, address, log)
        try:
            while "READY=1" not in manager.recv(65536).decode().splitlines():
                pass
            seconds = time.perf_counter() - started
        except TimeoutError as error:
            raise OwnerUnavailable(f"the owner did not get ready: {_text(log)}") from error
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.unlink(address)
    said = re.search(r"adopted \d+ allocations.* in ([0-9.]+) ms", _text(log))
    if said is None:
        raise OwnerUnavailable(f"the owner did not adopt: {_text(log)}")
    return {"total": seconds * 1e3, "step": float(said[1])}


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def _become_owner(
    flags: Sequence[str], held: Sequence[tuple[str, int]], address: str, log: str
) -> None:
    """As a service manager starts it (sd_listen_fds(3)). Does not return."""
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
        beyond = FIRST_FD + len(held)
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, beyond) for _, fd in held]
        for index, fd in enumerate(high):
            os.dup2(fd, FIRST_FD + index, inheritable=True)
        environment = os.environ | {
            "NOTIFY_SOCKET": address, "LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(held)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in held),
        }  # fmt: skip
        command = [sys.executable, "-P", "-m", "ds4_owner.cli", *flags]
        os.execve(command[0], command, environment)
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
