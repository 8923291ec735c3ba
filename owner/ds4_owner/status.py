"""`ds4-weight-server status`, `stop` and `reexec`: an operator's view of running owners.

Owns: finding the owners that are meant, the report (a table, or one JSON object per owner), and the
stop that ends only when the process is gone. Refuses to signal a process that is not provably the
owner of the manifest: pids are reused.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ds4_common import client, manifest, paths
from ds4_common.errors import Ds4Error, ManifestError, OwnerUnavailable, UsageError
from ds4_common.protocol import LeaseRecord
from ds4_common.silence import process_state
from ds4_owner import report
from ds4_owner.arguments import Parser
from ds4_owner.progress import log

STOP_SECONDS = 30.0  # from the request to the end of the process
TERMINATE_SECONDS = 10.0  # from SIGTERM to the end


def main(arguments: Sequence[str]) -> int:
    """`arguments` begin with the subcommand. Returns the exit code; raises Ds4Error."""
    options = _parse(arguments)
    if options.command == "status":
        return _status(owners_meant(options.manifest), as_json=options.json)
    if options.command == "reexec":
        return _reexec(only_owner(options.manifest))
    return stop(only_owner(options.manifest), say=lambda text: print(text, file=sys.stderr))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="ds4-weight-server", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    about = {
        "status": "what an owner holds, and who uses it",
        "stop": "end an owner, and wait until its process is gone",
        "reexec": "let the program that is installed now take over an owner's process",
    }
    for name, text in about.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument(
            "--manifest",
            metavar="FILE",
            help=f"of which owner; without it ${paths.MANIFEST_VARIABLE}, else the private owners",
        )
        if name == "status":
            command.add_argument("--json", action="store_true", help="one JSON object per owner")
    return parser.parse_args(arguments)


def owners_meant(named: str | None) -> list[str]:
    """Manifest paths: the one named, the one in the environment, or all private ones."""
    chosen = named or os.environ.get(paths.MANIFEST_VARIABLE)
    if chosen:
        return [chosen]
    folder = paths.owners_folder()
    suffix = paths.control_socket_path("")
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        names = []
    found = [os.path.join(folder, n.removesuffix(suffix)) for n in names if n.endswith(suffix)]
    if not found:
        raise OwnerUnavailable(f"no private owner in {folder}; name another one with --manifest")
    return found


def only_owner(named: str | None) -> str:
    """The manifest that is meant: named, in the environment, or of the only private owner.

    Raises UsageError when there are several, OwnerUnavailable when there is none."""
    owners = owners_meant(named)
    if len(owners) > 1:
        listed = "".join(f"\n  {path}  {_first_file(path)}" for path in owners)
        raise UsageError(f"there are several owners; choose one with --manifest:{listed}")
    return owners[0]


def _first_file(path: str) -> str:
    """What the owner at a manifest serves, for a person who has to choose one."""
    try:
        models = report.gather(path).models
    except (OwnerUnavailable, ManifestError):
        return "(does not answer)"
    return " ".join(model.files[0].path for model in models if model.files)


def _status(owners: Sequence[str], *, as_json: bool) -> int:
    """0 when every owner answered. One that does not is reported among those that do."""
    silent: list[Ds4Error] = []
    told: list[str] = []
    for path in owners:
        try:
            found = report.gather(path)
        except (OwnerUnavailable, ManifestError) as error:
            silent.append(error)
            continue
        told.append(
            report.as_json(found) if as_json else report.as_text(found, sys.stdout.isatty())
        )
    if told:
        print(("\n" if as_json else "\n\n").join(told))
    for problem in silent:
        log(str(problem))
    return OwnerUnavailable.exit_code if silent else 0


def _reexec(path: str) -> int:
    """Raises HandoverError when the running program goes on."""
    with client.connect(path, "operator") as connection:
        seconds = connection.request_reexec()
        pid = connection.owner_pid
    print(f"owner pid {pid} runs the installed program; requests waited {1000 * seconds:.0f} ms")
    return 0


def stop(path: str, say: Callable[[str], None]) -> int:
    """Stops the owner of a manifest; returns 0 when its process is gone (or was already). Names the
    processes that still have its memory mapped then.

    Raises OwnerUnavailable when there is none, when it does not end, or when the process that the
    manifest names is not it."""
    try:
        connection = client.connect(path, "stop")
    except OwnerUnavailable as silence:
        return _stop_silent(path, silence, say)
    with connection:
        pid = connection.owner_pid
        pidfd = _open_pidfd(pid)
        if pidfd < 0:
            raise OwnerUnavailable(f"owner pid {pid} cannot be watched from here; stop it there")
        try:
            with _users(connection.status().leases) as users:
                connection.request_stop()
                _await_end(pidfd, pid, STOP_SECONDS)
                say(f"owner pid {pid} has ended")
                _say_who_stays(users, say)
        finally:
            os.close(pidfd)
    return 0


@contextmanager
def _users(leases: Sequence[LeaseRecord]) -> Iterator[dict[int, tuple[LeaseRecord, int]]]:
    """Who holds a lease, by pid, with a descriptor of each process for as long."""
    found: dict[int, tuple[LeaseRecord, int]] = {}
    try:
        for lease in leases:
            if lease.pid not in found and (fd := _open_pidfd(lease.pid)) >= 0:
                found[lease.pid] = lease, fd
        yield found
    finally:
        for _, fd in found.values():
            os.close(fd)


def _say_who_stays(
    users: Mapping[int, tuple[LeaseRecord, int]], say: Callable[[str], None]
) -> None:
    """Memory is given back when nobody maps it any more, whether the owner lives or not."""
    for pid, (lease, pidfd) in users.items():
        if not _ended(pidfd, 0.0):
            say(
                f"pid {pid} ({lease.role}) goes on and keeps the memory that it has mapped; "
                f"to have that back: kill {pid}"
            )


def _stop_silent(path: str, silence: OwnerUnavailable, say: Callable[[str], None]) -> int:
    """The owner does not answer: it is gone, or it hangs and gets a signal."""
    try:
        pid = manifest.read_manifest(path).owner.pid
    except ManifestError:
        raise silence from None
    pidfd = _open_pidfd(pid)
    if pidfd < 0 or process_state(pid) != "running":
        say(f"owner pid {pid} is gone already; its next start removes what it left")
        return 0
    try:
        # Asked after pidfd_open, so the answer is about that process.
        if doubt := _doubt(pid, path):
            raise OwnerUnavailable(f"{silence}; not signalled: {doubt}")
        say(f"owner pid {pid} does not answer; sending SIGTERM")
        _await_end(pidfd, pid, 0.0)
    finally:
        os.close(pidfd)
    say(f"owner pid {pid} has ended")
    return 0


def _await_end(pidfd: int, pid: int, seconds: float) -> None:
    """Waits for the process; after `seconds` it gets SIGTERM and some more time."""
    if seconds and _ended(pidfd, seconds):
        return
    signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    if not _ended(pidfd, TERMINATE_SECONDS):
        raise OwnerUnavailable(
            f"owner pid {pid} did not end within {TERMINATE_SECONDS:.0f} s of SIGTERM; "
            f"if it must go: kill -9 {pid}"
        )


def _ended(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _open_pidfd(pid: int) -> int:
    """A descriptor of the process, or -1 when there is none (pid 0: in another namespace)."""
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _doubt(pid: int, path: str) -> str:
    """Why the process may not be the owner that wrote the manifest; empty when it is."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        uid = os.stat(f"/proc/{pid}").st_uid
        started = _start_time(pid)
        written = os.stat(path).st_mtime
    except OSError as error:
        return f"pid {pid} cannot be inspected: {error.strerror}"
    if "ds4_owner" not in command and "ds4-weight-server" not in command.replace("_", "-"):
        return f"pid {pid} is now another program: {command[:120]}"
    if uid != os.geteuid() and os.geteuid() != 0:
        return f"pid {pid} belongs to uid {uid}"
    if started > written + 1:  # ticks and seconds are rounded
        return f"pid {pid} started after the manifest was written: the number was reused"
    return ""


def _start_time(pid: int) -> float:
    """When the process started, in seconds since the epoch."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")
