"""Who is connected, and what each may ask: the broker's rules, without any I/O.

Owns: the life of a native connection as a transition table, the requests each role may make, and
the book of leases, which is derived from open connections and nothing else. Time and identities
are passed in; nothing here reads a clock or a socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ds4_common import protocol
from ds4_common.errors import ProtocolError
from ds4_common.protocol import LeaseRecord, Role


class Phase(StrEnum):
    GREETING = "greeting"  # accepted; a hello is due
    ATTACHED = "attached"  # may ask; holds a lease if its role does
    WAITING = "waiting"  # asked to be told when loading ends
    LEAVING = "leaving"  # gets its last reply, then is closed
    CLOSED = "closed"


class Event(StrEnum):
    HELLO = "hello"
    REQUEST = "request"
    WAIT = "wait"
    ANSWER = "answer"  # loading ended, or the wait was long enough
    REFUSE = "refuse"  # an error that ends the connection
    HANGUP = "hangup"  # the peer is gone, its deadline passed, or its last reply is out


TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (Phase.GREETING, Event.HELLO): Phase.ATTACHED,
    (Phase.GREETING, Event.REFUSE): Phase.LEAVING,
    (Phase.GREETING, Event.HANGUP): Phase.CLOSED,
    (Phase.ATTACHED, Event.REQUEST): Phase.ATTACHED,
    (Phase.ATTACHED, Event.WAIT): Phase.WAITING,
    (Phase.ATTACHED, Event.REFUSE): Phase.LEAVING,
    (Phase.ATTACHED, Event.HANGUP): Phase.CLOSED,
    (Phase.WAITING, Event.ANSWER): Phase.ATTACHED,
    (Phase.WAITING, Event.REFUSE): Phase.LEAVING,
    (Phase.WAITING, Event.HANGUP): Phase.CLOSED,
    (Phase.LEAVING, Event.HANGUP): Phase.CLOSED,
}

_READ = frozenset({protocol.GetAllocations, protocol.GetBlobs, protocol.WaitReady})
ALLOWED: dict[Role, frozenset[type]] = {
    "worker": _READ | {protocol.GetListener, protocol.GetStatus},
    "standby": _READ | {protocol.GetListener, protocol.GetStatus},
    "reader": _READ | {protocol.GetStatus},
    "inspect": _READ | {protocol.GetStatus},
    "status": frozenset({protocol.GetAllocations, protocol.GetStatus}),
    "stop": frozenset({protocol.Stop, protocol.GetStatus}),
    "operator": frozenset(
        {
            protocol.GetAllocations, protocol.GetBlobs, protocol.GetStatus,
            protocol.Reexec, protocol.AcceptFiles,
        }
    ),
}  # fmt: skip
LEASE_ROLES: frozenset[Role] = frozenset({"worker", "standby", "reader"})
# Operators must get through, and memory does not depend on the files any more: these roles are
# welcome even when a model file changed.
OPERATOR_ROLES: frozenset[Role] = frozenset({"status", "stop", "operator"})


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel reports it."""

    pid: int
    uid: int


@dataclass(slots=True)
class Entry:
    """One native connection."""

    peer: Peer
    since: float
    phase: Phase = Phase.GREETING
    hello: protocol.Hello | None = None


class Book:
    """All native connections by number. Leases are the attached ones whose role holds memory."""

    def __init__(self, max_connections: int, max_leases: int) -> None:
        self._entries: dict[int, Entry] = {}
        self._next = 0
        self.max_connections = max_connections
        self.max_leases = max_leases

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, peer: Peer, now: float) -> int:
        """Enters a new connection and returns its number. The caller made room before."""
        if len(self._entries) >= self.max_connections:
            raise ProtocolError(f"{len(self._entries)} connections are open; no room for another")
        self._next += 1
        self._entries[self._next] = Entry(peer, now)
        return self._next

    def restore(self, entry: Entry) -> int:
        """Enters a connection as another program left it; returns its number."""
        self._next += 1
        self._entries[self._next] = entry
        return self._next

    def entry(self, number: int) -> Entry:
        return self._entries[number]

    def phase(self, number: int) -> Phase:
        entry = self._entries.get(number)
        return Phase.CLOSED if entry is None else entry.phase

    def role(self, number: int) -> Role | None:
        hello = self._entries[number].hello
        return None if hello is None else hello.role

    def apply(self, number: int, event: Event) -> Phase:
        """Moves a connection along. Raises ProtocolError for an event out of place."""
        entry = self._entries[number]
        phase = TRANSITIONS.get((entry.phase, event))
        if phase is None:
            raise ProtocolError(f"a {event} does not fit a connection that is {entry.phase}")
        entry.phase = phase
        if phase is Phase.CLOSED:
            del self._entries[number]
        return phase

    def admit(self, number: int, hello: protocol.Hello) -> None:
        """Takes a hello. Raises ProtocolError when it is out of place."""
        self.apply(number, Event.HELLO)
        self._entries[number].hello = protocol.Hello(
            hello.version,
            hello.role,
            _shown(hello.name, protocol.MAX_NAME_CHARS),
            _shown(hello.command, protocol.MAX_COMMAND_CHARS),
        )

    def lease_room(self) -> bool:
        return sum(1 for _ in self._holders()) < self.max_leases

    def oldest_greeting(self) -> int | None:
        """The connection to drop when there is no room: it has asked for nothing yet."""
        for number, entry in self._entries.items():  # insertion order is age
            if entry.phase is Phase.GREETING:
                return number
        return None

    def waiting(self) -> list[int]:
        return [n for n, entry in self._entries.items() if entry.phase is Phase.WAITING]

    def leases(self, now: float) -> list[LeaseRecord]:
        return [
            LeaseRecord(
                pid=entry.peer.pid,
                uid=entry.peer.uid,
                role=hello.role,
                name=hello.name,
                command=hello.command,
                age_seconds=round(now - entry.since, 3),
            )
            for entry, hello in self._holders()
        ]

    def _holders(self) -> Sequence[tuple[Entry, protocol.Hello]]:
        return [
            (entry, entry.hello)
            for entry in list(self._entries.values())
            if entry.hello is not None
            and entry.hello.role in LEASE_ROLES
            and entry.phase in (Phase.ATTACHED, Phase.WAITING)
        ]


def _shown(text: str, max_bytes: int) -> str:
    """What a client says of itself, fit for a terminal, and short: all leases fit a packet."""
    printable = "".join(c if c.isprintable() else "?" for c in text)
    return printable.encode()[:max_bytes].decode(errors="ignore")
