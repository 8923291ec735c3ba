"""Names in the file system that only one owner may have: its sockets and its manifest.

Owns: binding Unix sockets, and telling what a dead owner left from what a living one uses: nothing
is unlinked before it was asked, and the folder is locked meanwhile. Refuses everything that
somebody answers at, and files that are not an owner's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ds4_common.errors import AddressError, AddressInUse, ManifestError, UsageError
from ds4_common.paths import check_socket_path
from ds4_owner.state import Node

_CLAIM_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class BoundSocket:
    """A listening Unix socket and the node that is ours: only that one is unlinked at the end."""

    sock: socket.socket
    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, node: Node) -> BoundSocket:
        """As the program before left it."""
        sock = socket.socket(fileno=node.fd)
        sock.setblocking(False)
        return cls(sock, node.path, node.device, node.inode)

    def node(self) -> Node:
        return Node(self.sock.fileno(), self.path, self.device, self.inode)

    @property
    def in_place(self) -> bool:
        """Whether our node is still where clients look for it."""
        try:
            node = os.lstat(self.path)
        except OSError:
            return False
        return (node.st_dev, node.st_ino) == (self.device, self.inode)

    def close(self) -> None:
        if self.in_place:
            os.unlink(self.path)
        self.sock.close()


def bind_unix(path: str, kind: socket.SocketKind, backlog: int) -> BoundSocket:
    """A non-blocking listening Unix socket at `path`, mode 0600. A dead one there is replaced; a
    live one, or any other file, is AddressInUse."""
    check_socket_path(path, "socket")
    with claiming(path):
        remove_dead_socket(path, kind)
        sock = socket.socket(socket.AF_UNIX, kind)
        try:
            sock.setblocking(False)
            os.fchmod(sock.fileno(), 0o600)  # before bind: the node never exists with a wider mode
            sock.bind(path)
            sock.listen(backlog)
            node = os.lstat(path)
        except OSError as error:
            sock.close()
            raise refusal(f"socket {path}", error) from error
    return BoundSocket(sock, path, node.st_dev, node.st_ino)


@contextmanager
def claiming(path: str) -> Iterator[None]:
    """Serializes probe, unlink, bind and listen among programs that want sockets in this folder.
    Without it, one would take the other's socket, bound but not listening yet, for a dead one."""
    folder = os.path.dirname(path) or "."
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise refusal(f"socket {path}", error) from error
    try:
        give_up = time.monotonic() + _CLAIM_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise AddressInUse(
                        f"socket {path}: folder {folder} stays locked by another program"
                    ) from None
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def listens(path: str, kind: socket.SocketKind) -> bool:
    """Whether somebody accepts connections at a Unix socket. Raises AddressError when that cannot
    be found out."""
    probe = socket.socket(socket.AF_UNIX, kind)
    probe.setblocking(False)
    try:
        probe.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except BlockingIOError:  # its backlog is full
        return True
    except OSError as error:
        if error.errno == errno.EPROTOTYPE:  # alive, but of another kind than we look for
            return True
        raise refusal(f"socket {path}", error) from error
    finally:
        probe.close()
    return True


def remove_dead_socket(path: str, kind: socket.SocketKind) -> None:
    """Unlinks a socket that nobody answers at. Raises AddressInUse when somebody does, or when
    `path` is not a socket."""
    try:
        node = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise refusal(f"socket {path}", error) from error
    if not stat.S_ISSOCK(node.st_mode):
        raise AddressInUse(f"socket {path}: there is a file that is not a socket; move it away")
    if listens(path, kind):
        raise AddressInUse(
            f"socket {path}: somebody answers there; stop that process, or choose another path"
        )
    os.unlink(path)


def remove_stale_manifest(path: str, log: Callable[[str], None]) -> None:
    """After a crash the manifest is still there. The control socket is ours now, so it is stale,
    unless it names a broker elsewhere that answers. Another file there is a slip of the user's."""
    from ds4_common import manifest  # only here: the next program of a reexec is in a hurry

    try:
        if not manifest.is_manifest(path):
            raise UsageError(f"--manifest {path}: this file is not a manifest; choose another path")
        try:
            stale = manifest.read_manifest(path)
        except ManifestError as error:
            log(f"removing damaged manifest: {error}")
        else:
            if stale.broker and listens(stale.broker, socket.SOCK_STREAM):
                raise AddressInUse(
                    f"--manifest {path}: its owner, pid {stale.owner.pid}, still answers at "
                    f"{stale.broker}; stop it first"
                )
            log(f"removing stale manifest {path} of owner pid {stale.owner.pid}")
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise AddressError(f"--manifest {path}: {error.strerror}") from error


def refusal(where: str, error: OSError) -> AddressError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"{where}: already in use by another program, perhaps a worker of an owner that has "
            "ended; stop it, or choose another address"
        )
    return AddressError(f"{where}: {error.strerror}")
