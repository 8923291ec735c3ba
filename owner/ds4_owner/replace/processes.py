"""Processes as the kernel shows them: identity, signals, listening sockets, shared memory.

Owns the reading of /proc and the only two ways in which a replacement touches a process: a signal
through a pidfd, and waiting for its end. A process is meant by pid, start time and boot, never by
name; a number that was given to another process since is "gone". Refuses nothing and decides
nothing: that is `decisions`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

LISTEN = "0A"  # net/tcp_states.h
LOOPBACK = ("127.0.0.1", "::1", "0.0.0.0", "::")  # what a program of this host reaches
# A line of /proc/net/unix: flags, type and number; the path of one that is bound to a file.
UNIX_LINE = re.compile(
    rb"^[0-9a-f]+: [0-9A-F]+ [0-9A-F]+ ([0-9A-F]+) ([0-9A-F]+) [0-9A-F]+ +(\d+) (/.*)$",
    re.MULTILINE,
)
ACCEPTS = 1 << 16  # __SO_ACCEPTCON, linux/net.h
# Host memory as the backends name it. Device memory has no name that /proc would show.
WEIGHTS_PREFIXES = ("/memfd:ds4-", "/dev/shm/ds4-")


class Identity(msgspec.Struct, frozen=True):
    """One process for ever. `start_ticks`: clock ticks after the boot `boot_id`."""

    pid: int
    start_ticks: int
    boot_id: str


class Listening(msgspec.Struct, frozen=True):
    """A listening socket: the kernel's number of it, and where it listens: at a host and a port,
    or at a path."""

    inode: int
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        """As `client` takes it, and `ds4-server --host`."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def place(self) -> tuple[str, int, str]:
        """Where it is, whichever socket is there."""
        return self.host, self.port, self.path

    @property
    def local(self) -> bool:
        """Whether asking it stays on this machine."""
        return bool(self.path) or self.host in LOOPBACK


class Shared(NamedTuple):
    """A piece of shared memory by what /proc says of it: the same in every process."""

    device: int
    inode: int


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Identity | None:
    """None when there is no such process here (any more)."""
    fields = _stat(pid)
    return None if fields is None else Identity(pid, int(fields[19]), boot_id())


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/<pid>/stat from the state on; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def state(process: Identity) -> str:
    """ "running", "stopped" (by a signal or a debugger) or "gone" (zombies are gone)."""
    fields = _stat(process.pid)
    if fields is None or process.boot_id != boot_id() or int(fields[19]) != process.start_ticks:
        return "gone"
    return {b"Z": "gone", b"X": "gone", b"T": "stopped", b"t": "stopped"}.get(fields[0], "running")


def command_line(pid: int) -> list[str]:
    """Arguments; empty for a process that is gone or may not be read."""
    return _strings(f"/proc/{pid}/cmdline")


def environment(pid: int) -> dict[str, str]:
    """The environment it was started with; empty when it may not be read."""
    pairs = (text.partition("=") for text in _strings(f"/proc/{pid}/environ"))
    return {name: value for name, separator, value in pairs if separator}


def _strings(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return []
    return [os.fsdecode(part) for part in data.removesuffix(b"\0").split(b"\0")] if data else []


def working_folder(pid: int) -> str:
    """Where its relative paths begin; "/" when that may not be read."""
    try:
        return os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)")
    except OSError:
        return "/"


def unit(pid: int) -> str | None:
    """The systemd service that runs a process, or None: it is not the leaf of a service."""
    for line in _cgroups(pid).splitlines():
        name = line.rpartition("/")[2]
        if name.endswith(".service") and line.split(":")[1] in ("", "name=systemd"):
            return name
    return None


def same_cgroups(pid: int) -> bool:
    """Whether its memory counts against the limits that count for this process."""
    theirs = _cgroups(pid)
    return theirs != "" and theirs == _cgroups(os.getpid())


def _cgroups(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


# Ends


def stop(processes: Iterable[Identity], number: signal.Signals, seconds: float) -> list[Identity]:
    """Signals all of them and waits; those that still live after `seconds`.

    A pidfd is opened before the start time is compared, so the signal can hit nobody else."""
    watched: dict[int, Identity] = {}
    try:
        for process in processes:
            fd = _open(process)
            if fd is not None:
                watched[fd] = process
                signal.pidfd_send_signal(fd, number)
        return _await_ends(watched, seconds)
    finally:
        for fd in watched:
            os.close(fd)


def _open(process: Identity) -> int | None:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if state(process) == "gone":
        os.close(fd)
        return None
    return fd


def _await_ends(watched: Mapping[int, Identity], seconds: float) -> list[Identity]:
    give_up = time.monotonic() + seconds
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLIN)
    left = dict(watched)
    while left:
        wait = give_up - time.monotonic()
        ended = poll.poll(max(wait, 0) * 1000)
        for fd, _ in ended:
            poll.unregister(fd)
            del left[fd]
        if not ended and wait <= 0:
            break
    return list(left.values())


# What a process has open


def _links(pid: int) -> Iterator[tuple[str, str]]:
    """(path in /proc, target) of its descriptors. Raises PermissionError."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return
    for name in names:
        path = f"{folder}/{name}"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # closed meanwhile
            yield path, os.readlink(path)


def socket_inodes(pid: int) -> set[int]:
    """Raises PermissionError for another user's process."""
    return {
        int(target[len("socket:[") : -1]) for _, target in _links(pid) if target[:8] == "socket:["
    }


def listening() -> list[Listening]:
    """Every listening stream socket of this network namespace, on TCP or in the file system."""
    found = _listening_unix()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            words = line.split()
            if words[3] == LISTEN:
                address, _, port = words[1].partition(":")
                found.append(Listening(int(words[9]), _host(address), int(port, 16)))
    return found


def _listening_unix() -> list[Listening]:
    return [
        Listening(int(number), path=os.fsdecode(path))
        for flags, kind, number, path in UNIX_LINE.findall(Path("/proc/net/unix").read_bytes())
        if int(flags, 16) & ACCEPTS and int(kind, 16) == socket.SOCK_STREAM
    ]


def _host(digits: str) -> str:
    """/proc/net writes addresses as 32-bit words of the machine's byte order."""
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(w.to_bytes(4, sys.byteorder) for w in words)))


def listening_of(pid: int) -> list[Listening]:
    """Its own or shared listening sockets. Raises PermissionError."""
    inodes = socket_inodes(pid)
    return [entry for entry in listening() if entry.inode in inodes]


def shared_memory(pid: int) -> dict[Shared, int]:
    """Shared memory that its descriptors hold -> bytes allocated. Raises PermissionError."""
    held: dict[Shared, int] = {}
    for path, target in _links(pid):
        if target.startswith(WEIGHTS_PREFIXES):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                info = os.stat(path)
                held[Shared(info.st_dev, info.st_ino)] = info.st_blocks * 512
    return held


def holders(memory: set[Shared]) -> tuple[dict[int, int], int]:
    """(pid -> how many pieces of `memory` it has open or mapped, processes not looked into)."""
    found: dict[int, int] = {}
    hidden = 0
    if not memory:
        return found, hidden
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            held = (shared_memory(int(name)).keys() | _mapped(int(name))) & memory
        except PermissionError:
            hidden += 1
            continue
        if held:
            found[int(name)] = len(held)
    return found, hidden


def _mapped(pid: int) -> set[Shared]:
    """Shared memory in its address space. Raises PermissionError."""
    found = set()
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                words = line.split(maxsplit=5)
                if len(words) == 6 and words[5].startswith(WEIGHTS_PREFIXES):
                    major, _, minor = words[3].partition(":")
                    device = os.makedev(int(major, 16), int(minor, 16))
                    found.add(Shared(device, int(words[4])))
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return found


def uses_weights(pid: int) -> bool:
    """Whether it has memory of some weight owner open or mapped; for showing only, for it goes by
    the memory's name. False where that may not be seen."""
    try:
        return bool(shared_memory(pid) or _mapped(pid))
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    """A process and its children's children: a launcher may start the worker as one of them."""
    import psutil

    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return {pid}
