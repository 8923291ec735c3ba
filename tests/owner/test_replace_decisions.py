"""What a replacement concludes from what it saw, and the order of its steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.protocol import LeaseRecord
from ds4_owner.budget import Memory
from ds4_owner.replace import decisions
from ds4_owner.replace.machine import Machine
from ds4_owner.replace.processes import Identity, Listening
from ds4_owner.replace.run import STEPS, pending

NAMES = [step.name for step in STEPS]

GIB = 1 << 30


def a_machine(
    available: int, *, shared: int = 0, swap_free: int = 0, psi: float | None = 0.0
) -> Machine:
    return Machine(128 * GIB, available, GIB, shared, 8 * GIB, swap_free, psi)


# Verdicts


def test_workers_that_survive_are_named_with_the_way_to_end_them() -> None:
    assert decisions.workers_ended([], {}, 5) == ""
    said = decisions.workers_ended([Identity(7, 1, "b")], {7: "stopped"}, 5)
    assert "pid 7 is stopped" in said
    assert "kill -9 7" in said


HAD = Listening(100, "127.0.0.1", 8000)
HAD_PATH = Listening(100, path="/run/a b")


@pytest.mark.parametrize(
    ("had", "now", "owner", "expected"),
    [
        (HAD, [], set(), ""),
        (HAD, [HAD], {100}, ""),  # lent by the owner, which still lives
        (HAD, [HAD], set(), "another process of the worker lives. Find it with: ss -ltnp"),
        (HAD, [Listening(5, "127.0.0.1", 8000)], set(), "another program listens"),
        (HAD, [Listening(5, "127.0.0.1", 8001)], set(), ""),
        (HAD, [Listening(5, "10.0.0.1", 8000)], set(), ""),
        (HAD, [HAD_PATH], {100}, ""),
        (HAD_PATH, [], set(), ""),
        (HAD_PATH, [HAD_PATH], {100}, ""),
        (HAD_PATH, [HAD_PATH], set(), "worker lives. Find it with: ss -lxp | grep -F '/run/a b'"),
        (HAD_PATH, [Listening(5, path="/run/a b")], {100}, "another program listens on unix:/run/"),
        (HAD_PATH, [Listening(5, path="/run/a b")], {5}, ""),  # somebody had removed the first
        (HAD_PATH, [HAD_PATH, Listening(5, path="/run/a b")], {5}, "worker lives"),
        (HAD_PATH, [Listening(5, path="/run/a")], set(), ""),
        (HAD_PATH, [HAD], {5, 100}, ""),
    ],
)
def test_a_socket_is_released_when_at_most_the_owner_holds_it(
    had: Listening, now: list[Listening], owner: set[int], expected: str
) -> None:
    said = decisions.sockets_released([had], now, owner)
    assert expected in said
    assert bool(said) == bool(expected)


def test_new_users_of_the_owner_are_named() -> None:
    assert decisions.nobody_attached([]) == ""
    lease = LeaseRecord(9, 0, "worker", "", "ds4-server -m x", 1.0)
    assert "pid 9 (ds4-server -m x)" in decisions.nobody_attached([lease])


def test_a_stopped_owner_is_to_be_continued_and_a_running_one_is_not() -> None:
    owner = Identity(7, 1, "b")
    assert decisions.owner_ended([], "gone", 1) == ""
    assert "kill -CONT 7" in decisions.owner_ended([owner], "stopped", 1)
    assert "-CONT" not in decisions.owner_ended([owner], "running", 1)


@pytest.mark.parametrize(
    ("after", "back"),
    [
        (a_machine(90 * GIB), True),
        (a_machine(74 * GIB), True),  # 10 % may go to others meanwhile
        (a_machine(50 * GIB), False),
        (a_machine(50 * GIB, shared=0, swap_free=0), False),
        (a_machine(50 * GIB, swap_free=40 * GIB), True),  # it had been swapped out
    ],
)
def test_memory_is_back_when_available_and_swap_grew_by_what_the_owner_held(
    after: Machine, back: bool
) -> None:
    before = a_machine(10 * GIB)
    assert (decisions.memory_returned(70 * GIB, before, after) == "") == back


def test_memory_is_back_when_shared_memory_shrank_whatever_others_took() -> None:
    before, after = a_machine(10 * GIB, shared=75 * GIB), a_machine(12 * GIB, shared=5 * GIB)
    assert decisions.memory_returned(70 * GIB, before, after) == ""


def test_a_small_owner_is_not_lost_in_the_noise() -> None:
    assert decisions.memory_returned(8 << 20, a_machine(GIB), a_machine(GIB - (16 << 20))) == ""


@pytest.mark.parametrize(("psi", "fit"), [(None, True), (0.0, True), (19.9, True), (20.0, False)])
def test_pressure_at_which_the_guard_trips_stops_a_replacement(
    psi: float | None, fit: bool
) -> None:
    assert (decisions.calm(a_machine(GIB, psi=psi)) == "") == fit


def test_returned_memory_counts_only_against_limits_that_the_owner_counts_against() -> None:
    memory = Memory(100, 10, cgroup_left=20, tmpfs_left=30)
    given_back = decisions.with_returned(memory, 50, same_cgroups=False, tmpfs=False)
    assert (given_back.available, given_back.cgroup_left, given_back.tmpfs_left) == (60, 20, 30)
    given_back = decisions.with_returned(memory, 500, same_cgroups=True, tmpfs=True)
    assert (given_back.available, given_back.cgroup_left, given_back.tmpfs_left) == (100, 520, 530)


def test_memory_of_a_device_is_missing_until_its_driver_says_it_is_free() -> None:
    GB = 1 << 30
    assert decisions.device_missing(100 * GB, before=2 * GB, now=2 * GB) == 100 * GB
    assert decisions.device_missing(100 * GB, before=2 * GB, now=60 * GB) == 42 * GB
    assert decisions.device_missing(100 * GB, before=2 * GB, now=95 * GB) == 0  # within the slack
    assert decisions.device_missing(100 * GB, before=2 * GB, now=110 * GB) == 0
    assert decisions.device_missing(64 << 20, before=GB, now=GB) == 0  # less than others move


# The order of steps


def test_a_run_whose_next_owner_died_when_it_was_ready_looks_at_memory_again() -> None:
    done = set(NAMES) - {"ask"}
    left = pending(done, owner_begun=True, owner_died=True)
    assert [step.name for step in left] == NAMES[NAMES.index("recheck") :]


@given(st.sets(st.sampled_from(NAMES)), st.booleans())
def test_a_resumed_run_repeats_no_stop_that_is_done_and_skips_no_step_that_is_not(
    done: set[str], begun: bool
) -> None:
    left = [step.name for step in pending(done, owner_begun=begun)]
    assert left == NAMES[len(NAMES) - len(left) :]  # the end of the table, in order
    assert set(NAMES) - set(left) <= done
    assert set(NAMES) - done <= set(left)


@pytest.mark.parametrize(
    ("first", "begun", "begin"),
    [
        ("stop-owner", False, "stop-owner"),
        ("start-owner", False, "recheck"),  # the machine may have changed since
        ("start-owner", True, "start-owner"),  # the new weights may be there: they would not fit
        ("ask", True, "start-workers"),
    ],
)
def test_a_resumed_run_looks_again_before_it_loads(first: str, begun: bool, begin: str) -> None:
    done = set(NAMES[: NAMES.index(first)])
    assert pending(done, owner_begun=begun)[0].name == begin
