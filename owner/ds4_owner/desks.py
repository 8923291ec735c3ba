"""What the desks of a broker share: the house they are in, and whom it admits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from ds4_owner.answers import OwnerFacts
from ds4_owner.leases import Peer

GREETING_SECONDS = 5.0  # for a hello, or for a whole line


class House(Protocol):
    """The broker, as its desks see it."""

    facts: OwnerFacts
    log: Callable[[str], None]
    on_stop: Callable[[], None]
    on_reexec: Callable[[], None] | None
    on_change: Callable[[], None]

    @property
    def line_path(self) -> str: ...

    @property
    def line_requests(self) -> int: ...


def is_foreign(peer: Peer, log: Callable[[str], None]) -> bool:
    """Whether a peer is another user, which the log then says. Root may do anything anyway."""
    if peer.uid in (0, os.geteuid()):
        return False
    log(f"broker refused pid {peer.pid} of uid {peer.uid}: not uid {os.geteuid()} nor root")
    return True
