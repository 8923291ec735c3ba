"""A service manager for tests: what systemd does with sd_notify(3) and its descriptor store.

`ServiceManager` receives the datagrams with their credentials and descriptors, believes only the
main process (NotifyAccess=main), keeps what FDSTORE=1 brings under systemd's rules - valid names,
at most `max_descriptors`, nothing twice - and starts the service with everything it keeps as
LISTEN_FDS, LISTEN_FDNAMES and LISTEN_PID (sd_listen_fds(3)). Run as
`python -m helpers.service_manager FD... -- COMMAND...` it is the step between fork and exec.
"""

from __future__ import annotations

import array
import ctypes
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from helpers.stack import DEADLINE_SECONDS, Program, process_environment

TESTS = Path(__file__).resolve().parents[1]
FIRST_FD = 3


@dataclass
class Stored:
    name: str
    fd: int
    poll: bool


@dataclass
class ServiceManager:
    """One service. `messages` are the assignments of each datagram, in order."""

    socket: socket.socket
    path: str
    max_descriptors: int = 512
    messages: list[dict[str, str]] = field(default_factory=list)
    store: list[Stored] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    program: Program | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, *arguments: str, **environment: str) -> Program:
        """The service with all that is kept. Its own process is the main one."""
        with self._changed:
            kept = list(self.store)
        environment = {"NOTIFY_SOCKET": self.path} | environment
        if kept:
            environment["LISTEN_FDNAMES"] = ":".join(stored.name for stored in kept)
        if "WATCHDOG_USEC" in environment and "WATCHDOG_PID" not in environment:
            environment["WATCHDOG_PID"] = "self"
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(TESTS), *filter(None, [environment.get("PYTHONPATH", os.getenv("PYTHONPATH"))])]
        )
        fds = [stored.fd for stored in kept]
        command = [sys.executable, "-m", "helpers.service_manager", *map(str, fds), "--"]
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=process_environment(**environment), pass_fds=fds,
        )  # fmt: skip
        self.program = Program.following(process)
        return self.program

    def wait_for(self, found: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(found, DEADLINE_SECONDS), (
                f"no {what}; messages: {self.messages[-5:]}; the service said: "
                f"{self.program.text if self.program else ''}"
            )

    def wait_ready(self, times: int = 1) -> None:
        self.wait_for(lambda: self.count("READY", "1") >= times, f"READY=1 number {times}")

    def count(self, name: str, value: str) -> int:
        return sum(message.get(name) == value for message in self.messages)

    def names(self) -> set[str]:
        with self._changed:
            return {stored.name for stored in self.store}

    def receive(self) -> None:
        """Handles datagrams until the socket is shut down."""
        while True:
            data, ancillary, flags, _ = self.socket.recvmsg(
                65536, socket.CMSG_SPACE(4096), socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                return
            assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
            pid, fds = 0, array.array("i")
            for level, kind, payload in ancillary:
                assert level == socket.SOL_SOCKET
                if kind == socket.SCM_CREDENTIALS:
                    pid = struct.unpack("3i", payload)[0]
                elif kind == socket.SCM_RIGHTS:
                    fds.frombytes(payload)
            with self._changed:
                self._handle(data.decode(), pid, fds.tolist())
                self._changed.notify_all()

    def _handle(self, text: str, pid: int, fds: list[int]) -> None:
        message = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        if message.get("BARRIER") == "1":  # handled even when the sender is not the main process
            assert message == {"BARRIER": "1"}
            assert len(fds) == 1
        elif self.program is None or pid != self.program.process.pid:
            self.refused.append(f"from pid {pid}: {text}")
        else:
            self.messages.append(message)
            if message.get("FDSTOREREMOVE") == "1":
                self._remove(message["FDNAME"])
            elif message.get("FDSTORE") == "1":
                for fd in fds:
                    self._keep(message, fd)
                return
        for fd in fds:
            os.close(fd)

    def _keep(self, message: dict[str, str], fd: int) -> None:
        name = message.get("FDNAME", "stored")
        valid = name.isascii() and name.isprintable() and ":" not in name and len(name) <= 255
        twice = any(same_description(stored.fd, fd) for stored in self.store)
        if not valid or twice or len(self.store) >= self.max_descriptors:
            self.refused.append(f"descriptor {name}")
            os.close(fd)
            return
        self.store.append(Stored(name, fd, message.get("FDPOLL") != "0"))

    def _remove(self, name: str) -> None:
        for stored in [s for s in self.store if s.name == name]:
            self.store.remove(stored)
            os.close(stored.fd)


def same_description(one: int, other: int) -> bool:
    """Whether two descriptors are copies of each other: systemd asks kcmp(2), too, because all
    eventfds have one inode."""
    kcmp = {"x86_64": 312, "aarch64": 272}[os.uname().machine]
    pid = os.getpid()
    return bool(ctypes.CDLL(None).syscall(kcmp, pid, pid, 0, one, other) == 0)


@contextmanager
def service_manager(folder: Path, max_descriptors: int = 512) -> Iterator[ServiceManager]:
    """A manager with its socket in `folder`. Kills the service at the end."""
    path = str(folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.bind(path)
        manager = ServiceManager(sock, path, max_descriptors)
        thread = threading.Thread(target=manager.receive)
        thread.start()
        try:
            yield manager
        finally:
            if manager.program is not None and manager.program.process.poll() is None:
                manager.program.process.kill()
                manager.program.wait()
            sock.shutdown(socket.SHUT_RD)
            thread.join()
            for stored in manager.store:
                os.close(stored.fd)


def execute(fds: Sequence[int], command: Sequence[str]) -> None:
    """Puts the descriptors where sd_listen_fds(3) has them, and becomes the service."""
    high = [os.dup(fd) for fd in fds]  # 3 and up may be among them
    while high and min(high) < FIRST_FD + len(fds):
        high = [os.dup(fd) for fd in high]
    for fd in fds:
        os.close(fd)
    for index, fd in enumerate(high):
        os.dup2(fd, FIRST_FD + index, inheritable=True)
    if fds:
        os.environ["LISTEN_FDS"], os.environ["LISTEN_PID"] = str(len(fds)), str(os.getpid())
    if os.environ.get("WATCHDOG_PID") == "self":
        os.environ["WATCHDOG_PID"] = str(os.getpid())
    os.execv(sys.executable, [sys.executable, "-m", *command])


if __name__ == "__main__":
    split = sys.argv.index("--")
    execute([int(word) for word in sys.argv[1:split]], sys.argv[split + 1 :])
