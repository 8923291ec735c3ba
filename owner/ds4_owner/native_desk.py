"""The native protocol (docs/protocol.md): a hello, then requests; the open connection is the lease.

Owns the book of connections (rules: `leases`) and the workers' listening sockets, and who waits for
the end of a load or of a reexec. Replies are made in `answers`. Refuses other users, clients whose
model files changed, and what a role may not send.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ds4_common import fdpass, protocol
from ds4_common.errors import AddressError, IdentityError, ProtocolError, UsageError
from ds4_common.protocol import Error, ErrorCode
from ds4_owner import answers, desks
from ds4_owner.answers import Packet
from ds4_owner.desks import House, is_foreign
from ds4_owner.leases import ALLOWED, LEASE_ROLES, OPERATOR_ROLES, Book, Entry, Event, Phase
from ds4_owner.listeners import Listeners
from ds4_owner.state import Desk, Kept
from ds4_owner.transport import Client, Transport

MAX_CONNECTIONS = 256
MAX_LEASES = 128  # all fit one status packet; the rest stays free for operators and newcomers


class NativeDesk:
    """The native protocol: a hello, then requests; the open connection is the lease."""

    max_request_bytes = fdpass.MAX_PACKET_BYTES
    desk: Desk = "native"

    def __init__(self, house: House, transport: Transport) -> None:
        self._house, self._transport = house, transport
        self.book = Book(MAX_CONNECTIONS, MAX_LEASES)
        self.listeners = Listeners()
        self._numbers: dict[Client, int] = {}
        self._clients: dict[int, Client] = {}
        self.started = time.monotonic()
        self.requests = self.identity_refusals = 0
        self._asker: Client | None = None  # who waits for the end of a reexec,
        self._begun = False  # which has begun: the one that runs may be an earlier one

    def opened(self, client: Client) -> bool:
        if is_foreign(client.peer, self._house.log):
            self._say(client, "forbidden", f"uid {client.peer.uid} may not use this owner")
            return False
        if len(self.book) >= self.book.max_connections:
            # Room is made at the cost of whoever has been connected longest without a word.
            silent = self.book.oldest_greeting()
            if silent is None:
                self._say(client, "busy", f"{len(self.book)} connections are open")
                return False
            self._transport.drop(self._clients[silent])
        now = time.monotonic()
        number = self.book.open(client.peer, now)
        self._numbers[client], self._clients[number] = number, client
        client.deadline = now + desks.GREETING_SECONDS
        return True

    def received(self, client: Client, data: bytes, intact: bool) -> None:
        number = self._numbers[client]
        if not data:
            self._transport.drop(client)
            return
        self.requests += 1
        try:
            if not intact:
                raise ProtocolError("request is too large, or carries descriptors")
            request = protocol.decode_request(data)
            if self.book.phase(number) is Phase.GREETING:
                self._greet(client, number, request)
            else:
                self._answer(client, number, request)
        except ProtocolError as error:
            version = protocol.hello_version(data) or protocol.PROTOCOL_VERSION
            if version != protocol.PROTOCOL_VERSION:
                self._refuse_version(client, version)
            else:
                self._refuse(client, answers.error("malformed", str(error)))

    def _greet(self, client: Client, number: int, request: protocol.Request) -> None:
        if not isinstance(request, protocol.Hello):
            raise ProtocolError(f"got {type(request).__name__}, expected a hello first")
        if request.version != protocol.PROTOCOL_VERSION:
            self._refuse_version(client, request.version)
        elif request.role in LEASE_ROLES and not self.book.lease_room():
            taken = f"all {self.book.max_leases} leases are taken"
            self._refuse(client, answers.error("busy", taken))
        elif request.role not in OPERATOR_ROLES and (changes := self._changes()):
            self._refuse(client, answers.identity_error(changes))
        else:
            self.book.admit(number, request)
            client.deadline = None
            self._reply(client, answers.welcome(self._house.facts))

    def _answer(self, client: Client, number: int, request: protocol.Request) -> None:
        if isinstance(request, protocol.Hello):
            raise ProtocolError("a second hello")
        role = self.book.role(number)
        waits = isinstance(request, protocol.WaitReady)
        self.book.apply(number, Event.WAIT if waits else Event.REQUEST)
        facts = self._house.facts
        if role is None or type(request) not in ALLOWED[role]:
            self._say(client, "forbidden", f"role {role} may not send {type(request).__name__}")
            return
        match request:
            case protocol.GetAllocations():
                for packet in answers.allocations(facts, request):
                    self._reply(client, packet)
            case protocol.GetBlobs():
                self._reply(client, answers.blobs(facts, request))
            case protocol.GetListener():
                self._reply(client, self._listener(request))
            case protocol.WaitReady():
                client.deadline = time.monotonic() + request.seconds
                if facts.state != "loading":
                    self._end_wait(client)
            case protocol.GetStatus():
                self._reply(client, self._status())
            case protocol.Stop():
                self._stop(client, request)
            case protocol.Reexec():
                self._reexec(client)
            case protocol.AcceptFiles():
                self._accept(client, request)

    def _stop(self, client: Client, request: protocol.Stop) -> None:
        pid = client.peer.pid
        users = [lease for lease in self.book.leases(time.monotonic()) if lease.pid != pid]
        if request.unless_used and users:
            self._say(client, "busy", f"pid {users[0].pid} ({users[0].role}) uses this owner")
            return
        self._house.log(f"stop requested by pid {pid}")
        self._reply(client, Packet(protocol.Stopping()))
        self._house.on_stop()

    def _reexec(self, client: Client) -> None:
        if self._house.facts.state != "ready":
            self._say(client, "loading", "the owner is not ready; reexec it when it is")
        elif self._house.on_reexec is None or self._asker is not None:
            self._say(client, "busy", "another reexec is going on")
        else:
            self._house.log(f"reexec requested by pid {client.peer.pid}")
            self._asker, self._begun = client, False
            self._house.on_reexec()

    def begin_reexec(self) -> None:
        self._begun = self._asker is not None

    def answer_reexec(self, reply: protocol.Reexeced | Error) -> None:
        if self._asker is not None and self._begun:
            self._reply(self._asker, Packet(reply))
            self._asker = None

    def _accept(self, client: Client, request: protocol.AcceptFiles) -> None:
        facts = self._house.facts
        try:
            offer, count = answers.renewed(facts.offer, request.files)
        except IdentityError as error:
            self._say(client, "identity", str(error))
            return
        except OSError as error:
            self._say(client, "identity", f"{error.filename}: {error.strerror}")
            return
        self._house.facts = replace(facts, offer=offer)
        self._house.log(f"accepted {count} touched files as verified by pid {client.peer.pid}")
        self._house.on_change()
        self._reply(client, Packet(protocol.Accepted(count)))

    def _listener(self, request: protocol.GetListener) -> Packet:
        try:
            fd, record = self.listeners.get(request)
            seat = self.listeners.seat(record) if request.seat else ()
        except (AddressError, UsageError) as error:
            return answers.listener_error(error)
        if self.listeners.changed:
            self.listeners.changed = False
            self._house.on_change()
        return Packet(protocol.Listener(record), (fd, *seat))

    def _status(self) -> Packet:
        now = time.monotonic()
        return Packet(
            protocol.Status(
                state=self._house.facts.state,
                uptime_seconds=round(now - self.started, 3),
                line_requests=self._house.line_requests,
                connections=len(self.book),
                line_socket=self._house.line_path,
                leases=self.book.leases(now),
                listeners=self.listeners.records(),
            )
        )

    def loading_ended(self) -> None:
        for number in self.book.waiting():
            self._end_wait(self._clients[number])

    def _end_wait(self, client: Client) -> None:
        client.deadline = None
        if changes := self._changes():
            self._refuse(client, answers.identity_error(changes))
            return
        self.book.apply(self._numbers[client], Event.ANSWER)
        self._reply(client, answers.welcome(self._house.facts))

    def expired(self, client: Client) -> None:
        number = self._numbers[client]
        if self.book.phase(number) is Phase.WAITING:
            self._end_wait(client)
        else:
            self._transport.drop(client)

    def closed(self, client: Client) -> None:
        if client is self._asker:
            self._asker = None
        number = self._numbers.pop(client, None)
        if number is not None:
            del self._clients[number]
            self.book.apply(number, Event.HANGUP)

    def exhausted(self) -> bytes:
        message = "the owner has no file descriptors left; raise its limit of open files"
        return protocol.encode(answers.error("busy", message))

    def keep(self, client: Client) -> Kept:
        number = self._numbers.get(client)
        if number is None:  # turned away: it only has to take what was said
            return Kept()
        entry = self.book.entry(number)
        return Kept(b"", entry.phase, entry.since, entry.hello, client is self._asker)

    def take(self, client: Client, kept: Kept) -> None:
        if kept.phase:
            entry = Entry(client.peer, kept.since, Phase(kept.phase), kept.hello)
            number = self.book.restore(entry)
            self._numbers[client], self._clients[number] = number, client
        if kept.asks:
            self._asker, self._begun = client, True

    def _changes(self) -> list[str]:
        changes = answers.changed_files(self._house.facts.offer.models)
        self.identity_refusals += bool(changes)
        return changes

    def _refuse_version(self, client: Client, version: int) -> None:
        message = f"peer speaks version {version}, the owner {protocol.PROTOCOL_VERSION}"
        self._refuse(client, answers.error("version", message))

    def _refuse(self, client: Client, error: Error) -> None:
        """The last word to a client."""
        self.book.apply(self._numbers[client], Event.REFUSE)
        self._reply(client, Packet(error))
        self._transport.leave(client)

    def _say(self, client: Client, code: ErrorCode, message: str) -> None:
        self._reply(client, Packet(answers.error(code, message)))

    def _reply(self, client: Client, packet: Packet) -> None:
        self._transport.send(client, protocol.encode(packet.message), packet.borrowed_fds)
