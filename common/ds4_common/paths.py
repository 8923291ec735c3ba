"""Where an owner's sockets and private manifests live.

Owns the naming rules only: `<manifest>.sock` speaks the published line protocol, `<manifest>.ctl`
the native one. Refuses socket paths that the kernel cannot bind, and an owners' folder that
somebody else could write to. Imported at worker start-up: keep it free of imports.
"""

from __future__ import annotations

import os
import stat

from ds4_common.errors import OwnerUnavailable, UsageError

SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes including the terminator
MANIFEST_VARIABLE = "DS4_CUDA_WEIGHT_IPC_MANIFEST"


def line_socket_path(manifest_path: str) -> str:
    return manifest_path + ".sock"


def control_socket_path(manifest_path: str) -> str:
    return manifest_path + ".ctl"


def log_path(manifest_path: str) -> str:
    """What an owner says, where a program of ours starts it."""
    return manifest_path + ".log"


def start_path(manifest_path: str) -> str:
    """The lock of a start: a private owner's, while a command waits for it to answer."""
    return manifest_path + ".start"


def check_socket_path(path: str, option: str) -> None:
    """Raises UsageError naming `option` when `path` is too long for a Unix socket."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES:
        raise UsageError(
            f"{option}: socket path {path} is {size} bytes, at most {SOCKET_PATH_BYTES} are "
            "possible; choose a shorter manifest path"
        )


def owners_folder() -> str:
    """The folder of private owners: $XDG_RUNTIME_DIR/ds4, else /tmp/ds4-<uid>. May not exist."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(runtime, "ds4") if runtime else f"/tmp/ds4-{os.getuid()}"


def make_owners_folder() -> str:
    """Creates `owners_folder()` 0700. Raises OwnerUnavailable when another user could write to it:
    in /tmp anybody may have made that name first."""
    folder = owners_folder()
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        info = os.lstat(folder)
    except OSError as error:
        raise OwnerUnavailable(
            f"owners' folder {folder}: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours"
        ) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise OwnerUnavailable(
            f"owners' folder {folder}: mode {info.st_mode:o}, owner uid {info.st_uid}; expected a "
            f"folder of uid {os.getuid()} that nobody else can write to; set XDG_RUNTIME_DIR"
        )
    return folder


def private_manifest(model: str, backend: str = "memfd") -> str:
    """The manifest of the private owner of a model file as it is now: a changed file gets another
    one, and so does other memory. Makes the owners' folder. Raises UsageError when there is no
    such file."""
    import hashlib

    try:
        info = os.stat(model)
    except OSError as error:
        raise UsageError(f"-m {model}: {error.strerror}") from error
    path = os.path.realpath(model)
    identity = (path, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
    key = hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
    name = key if backend == "memfd" else f"{key}-{backend}"
    return os.path.join(make_owners_folder(), name)


def is_private_manifest(path: str) -> bool:
    """Whether a manifest is one that `private_manifest` names. Where it lies does not say so alone:
    a manifest that somebody chose a name for may lie in the owners' folder too."""
    folder, name = os.path.split(os.path.abspath(path))
    if folder != os.path.abspath(owners_folder()):
        return False
    key, _, backend = name.partition("-")
    # Not re, which a worker that starts has no use for.
    return len(key) == 16 and set(key) <= set("0123456789abcdef") and "." not in backend
