"""Seats: locks that die with their holder, memory that is filled once."""

from __future__ import annotations

import mmap
import os
import struct

import pytest

from ds4_common.errors import BackendError
from ds4_common.seat import CLAIM, SERVING, STANDBY, Seat, native
from helpers.descriptors import open_fds
from helpers.seats import open_seat, other, seat_fds


def test_a_lock_is_one_processs_until_it_is_killed() -> None:
    with seat_fds() as fds, other(fds, "hold", str(SERVING)) as holder:
        seat = open_seat(fds)
        assert seat.held(SERVING)
        assert not seat.held(CLAIM)
        assert seat.holder_pid == holder.process.pid
        assert not seat.lock(SERVING, 0.01)
        holder.process.kill()
        assert seat.lock(SERVING, None)
        seat.unlock(SERVING)
        assert not seat.held(SERVING)
        seat.close()


def test_a_death_is_seen_before_the_dead_process_is_reaped() -> None:
    with seat_fds() as fds, other(fds, "hold", str(SERVING), str(STANDBY)) as holder:
        seat = open_seat(fds)
        holder.process.kill()
        assert seat.lock(SERVING, None)
        assert seat.lock(STANDBY, None)
        holder.process.wait()
        seat.close()


def test_the_memory_is_filled_once_and_cannot_shrink() -> None:
    with seat_fds() as fds:
        first, second = open_seat(fds), open_seat(fds)
        assert first.next_connection(0) == 1
        assert second.next_connection(0) == 2
        assert second.next_connection(1) == 1
        with pytest.raises(PermissionError):
            os.ftruncate(fds[0], 0)
        first.close()
        second.close()


def test_a_worker_that_died_while_filling_leaves_work_for_the_next() -> None:
    with seat_fds() as fds:
        os.ftruncate(fds[0], mmap.PAGESIZE * 1 << 20)
        os.pwrite(fds[0], b"\xff" * 64, 64)  # where locks lie; the beginning is still empty
        seat = open_seat(fds)
        assert seat.lock(SERVING)
        seat.close()


def test_memory_of_another_build_is_refused_and_nothing_leaks() -> None:
    with seat_fds() as fds:
        open_seat(fds).close()
        os.pwrite(fds[0], struct.pack("Q", 99), 8)
        before = open_fds()
        with pytest.raises(BackendError, match="another seat"):
            open_seat(fds)
        assert open_fds() <= before


def test_rings_wake_and_are_taken_back() -> None:
    with seat_fds() as fds:
        seat = open_seat(fds)
        seat.ring()
        seat.ring()
        seat.hear()
        seat.hear()
        seat.close()


def test_spills_are_holes_until_they_are_written() -> None:
    with seat_fds() as fds:
        seat = open_seat(fds)
        before = os.fstat(fds[0]).st_blocks
        with seat.map_spill(3, 1023) as spill:
            spill[-1] = 1
            assert os.fstat(fds[0]).st_blocks > before
            spill.madvise(mmap.MADV_REMOVE)
            assert os.fstat(fds[0]).st_blocks == before
        seat.close()


def test_the_layout_is_the_same_on_both_sides() -> None:
    assert native().ds4_seat_fits
    with seat_fds() as fds:
        seat = open_seat(fds)
        layout = seat.layout
        assert layout.slots < layout.journals < layout.spills == layout.mapped < layout.total
        last = layout.slots_per_lane - 1
        end = layout.journals + layout.lanes * layout.slots_per_lane * layout.journal_bytes
        assert end == layout.mapped
        assert len(seat.journal(layout.lanes - 1, last)) == layout.journal_bytes
        seat.close()


def test_a_seat_needs_its_memory() -> None:
    with pytest.raises(BackendError, match="cannot map"):
        Seat([os.eventfd(0), os.eventfd(0)])
