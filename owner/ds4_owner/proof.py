"""What proves that a descriptor is the memory that an owner sealed.

Owns the proof of one piece. It consists of: the device and inode of the memory object (a memfd and
an unlinked shm object have one that nobody else has until the machine reboots), its size, its seals
(or, for shm, that no descriptor here can write), and an XXH3-128 of 16 samples of 4 KiB. Sealed
memory cannot have changed since the full 128-bit hash was taken at load, so the samples prove
nothing about single bits: they catch a record that was joined to the wrong memory. All bytes are
compared by `ds4-weight-server verify`.
"""

from __future__ import annotations

import fcntl
import os

from ds4_common import samples
from ds4_common.errors import HandoverError
from ds4_owner.backends import Memory
from ds4_owner.state import Key, Piece

_WRITE_SEALS = 0x8 | 0x10  # F_SEAL_WRITE, F_SEAL_FUTURE_WRITE
_FIXED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def capture(key: Key, memory: Memory) -> Piece:
    """The proof of sealed memory, from its exported descriptor; of device memory, from the samples
    that the loader took."""
    if memory.uuid:
        return Piece(
            key=key, label=memory.label, n_bytes=memory.n_bytes, device=0, inode=0, seals=-1,
            sample=memory.sample, fd=memory.export_fd, uuid=memory.uuid,
        )  # fmt: skip
    fd = memory.export_fd
    info = os.fstat(fd)
    return Piece(
        key=key, label=memory.label, n_bytes=info.st_size, device=info.st_dev, inode=info.st_ino,
        seals=_seals(fd), sample=_sample(fd, info.st_size), fd=fd,
    )  # fmt: skip


def check(piece: Piece, fd: int) -> Memory:
    """The memory of a descriptor that comes from the service manager. Raises HandoverError."""
    what = f"memory {piece.label}"
    info = os.fstat(fd)
    got, expected = (info.st_dev, info.st_ino), (piece.device, piece.inode)
    if got != expected:
        raise HandoverError(f"{what}: got object {got}, expected {expected}")
    if info.st_size != piece.n_bytes:
        raise HandoverError(f"{what}: got {info.st_size} bytes, expected {piece.n_bytes}")
    seals = _seals(fd)
    if seals != piece.seals:
        raise HandoverError(f"{what}: got seals {seals:#x}, expected {piece.seals:#x}")
    sealed = seals > 0 and seals & _WRITE_SEALS and seals & _FIXED_SEALS == _FIXED_SEALS
    if not sealed and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        raise HandoverError(f"{what}: not sealed, and open for writing: it could have changed")
    sample = _sample(fd, piece.n_bytes)
    if sample != piece.sample:
        raise HandoverError(f"{what}: got sample hash {sample}, expected {piece.sample}")
    return Memory(piece.label, piece.n_bytes, -1, fd)


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not memory that can be sealed
        return -1


def _sample(fd: int, n_bytes: int) -> str:
    return samples.digest([os.pread(fd, size, at) for at, size in samples.spans(n_bytes)])
