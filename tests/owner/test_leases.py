"""The book of connections and leases as a state machine: no order of events breaks it."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ds4_common import protocol
from ds4_common.errors import ProtocolError
from ds4_owner.leases import ALLOWED, LEASE_ROLES, TRANSITIONS, Book, Event, Peer, Phase

ROLES = list(get_args(protocol.Role))
MAX_CONNECTIONS, MAX_LEASES = 6, 3


def hello(role: protocol.Role) -> protocol.Hello:
    return protocol.Hello(protocol.PROTOCOL_VERSION, role, "name", "command")


class BookMachine(RuleBasedStateMachine):
    """Drives the book as the broker does, beside a model that is just two dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(MAX_CONNECTIONS, MAX_LEASES)
        self.phases: dict[int, Phase] = {}
        self.roles: dict[int, protocol.Role] = {}
        self.now = 0.0

    @rule()
    def connect(self) -> None:
        self.now += 1
        if len(self.phases) == MAX_CONNECTIONS:
            victim = self.book.oldest_greeting()
            silent = [n for n, phase in self.phases.items() if phase is Phase.GREETING]
            assert victim == (min(silent) if silent else None)
            if victim is None:
                with pytest.raises(ProtocolError, match="no room"):
                    self.book.open(Peer(1, 0), self.now)
                return
            self.book.apply(victim, Event.HANGUP)
            del self.phases[victim]
        number = self.book.open(Peer(100, 0), self.now)
        assert number not in self.phases
        self.phases[number] = Phase.GREETING

    @precondition(lambda self: self.phases)
    @rule(data=st.data(), role=st.sampled_from(ROLES))
    def greet(self, data: st.DataObject, role: protocol.Role) -> None:
        number = data.draw(st.sampled_from(sorted(self.phases)))
        if self.phases[number] is not Phase.GREETING:
            with pytest.raises(ProtocolError):
                self.book.admit(number, hello(role))
        elif role not in LEASE_ROLES or self.book.lease_room():
            self.book.admit(number, hello(role))
            self.phases[number], self.roles[number] = Phase.ATTACHED, role

    @precondition(lambda self: self.phases)
    @rule(data=st.data(), event=st.sampled_from([e for e in Event if e is not Event.HELLO]))
    def happen(self, data: st.DataObject, event: Event) -> None:
        number = data.draw(st.sampled_from(sorted(self.phases)))
        phase = self.phases[number]
        expected = TRANSITIONS.get((phase, event))
        if expected is None:
            with pytest.raises(ProtocolError, match=phase.value):
                self.book.apply(number, event)
            return
        assert self.book.apply(number, event) is expected
        self.phases[number] = expected
        if expected is Phase.CLOSED:
            del self.phases[number]
            self.roles.pop(number, None)

    @invariant()
    def every_connection_is_in_the_phase_that_the_table_says(self) -> None:
        assert {n: self.book.phase(n) for n in self.phases} == self.phases
        assert len(self.book) == len(self.phases) <= MAX_CONNECTIONS

    @invariant()
    def leases_are_the_attached_connections_of_lease_roles(self) -> None:
        held = [
            self.roles[n]
            for n, phase in self.phases.items()
            if phase in (Phase.ATTACHED, Phase.WAITING) and self.roles[n] in LEASE_ROLES
        ]
        leases = self.book.leases(self.now)
        assert [lease.role for lease in leases] == held
        assert len(leases) <= MAX_LEASES
        assert all(lease.age_seconds >= 0 for lease in leases)
        assert self.book.lease_room() is (len(held) < MAX_LEASES)

    @invariant()
    def those_who_wait_are_found(self) -> None:
        waiting = [n for n, phase in self.phases.items() if phase is Phase.WAITING]
        assert self.book.waiting() == waiting


TestBook = BookMachine.TestCase


def test_every_phase_can_be_left_by_a_hangup_and_none_leads_out_of_closed() -> None:
    alive = set(Phase) - {Phase.CLOSED}
    assert {phase for phase, event in TRANSITIONS if event is Event.HANGUP} == alive
    assert Phase.CLOSED not in {phase for phase, _ in TRANSITIONS}


def test_only_the_stop_role_may_stop_and_every_role_may_ask_for_the_status() -> None:
    assert set(ALLOWED) == set(ROLES)
    assert [r for r in ROLES if protocol.Stop in ALLOWED[r]] == ["stop"]
    assert all(protocol.GetStatus in ALLOWED[r] for r in ROLES)
