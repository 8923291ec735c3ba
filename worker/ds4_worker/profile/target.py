"""The worker that a load goes to: the address it serves at, or the name it has with its owner.

Owns: finding that address, which the owner of a named worker knows, and connecting to it. Refuses
names that several listening sockets have.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeAlias

from ds4_common import client
from ds4_common.errors import OwnerUnavailable, UsageError
from ds4_worker.address import Address

# The address where there is one already, else why there is none yet.
Target: TypeAlias = Callable[[], Address | str]


def at(address: Address) -> Target:
    return lambda: address


def named(name: str, manifest: str) -> Target:
    """The listening socket that a worker asked the owner of `manifest` for under its name."""

    def find() -> Address | str:
        try:
            with client.connect(manifest, "status") as connection:
                records = [r for r in connection.status().listeners if r.name == name]
        except OwnerUnavailable as silence:
            return str(silence)
        if len(records) > 1:
            several = ", ".join(r.path or f"{r.host} port {r.port}" for r in records)
            raise UsageError(f"--name {name}: has several addresses; choose one: {several}")
        if not records:
            return f"no worker --name {name} has asked the owner of {manifest} for an address"
        return Address(records[0].host, records[0].port, records[0].path)

    return find


def connected(address: Address, seconds: float) -> socket.socket:
    """Raises OSError."""
    if not address.path:
        return socket.create_connection((address.host, address.port), timeout=seconds)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(seconds)
        sock.connect(address.path)
    except OSError:
        sock.close()
        raise
    return sock
