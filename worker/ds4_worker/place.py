"""Who serves: taking the place of another worker, waiting for it, and making room.

Owns: the use of a seat's locks (ds4_common/seat.py). The holder of SERVING accepts connections. A
worker that wants its place is ready first, then holds CLAIM and rings; the one that serves stops
accepting and lets go of SERVING. A standby holds STANDBY, waits for SERVING, and lets whoever has
a CLAIM go first; further standbys wait for STANDBY. All of it is for the main thread, which blocks:
nothing is served meanwhile.
"""

from __future__ import annotations

from ds4_common.errors import AddressInUse
from ds4_common.seat import CLAIM, SERVING, STANDBY, Seat

# For the other worker to notice and stop accepting: a turn of its event loop.
TAKEOVER_SECONDS = 5.0


def take(seat: Seat, address: str, *, takeover: bool) -> None:
    """Returns when this process serves `address`. Raises AddressInUse: another worker does, and
    may not be replaced or does not react."""
    if seat.lock(SERVING):
        seat.sit()
        return
    if not takeover:
        raise AddressInUse(
            f"{address}: worker pid {seat.holder_pid} serves there; leave out --no-takeover to "
            "replace it, or choose another --port"
        )
    if not seat.lock(CLAIM, TAKEOVER_SECONDS):
        raise AddressInUse(f"{address}: another worker is taking over, and does not get ready")
    try:
        seat.ring()
        if not seat.lock(SERVING, TAKEOVER_SECONDS):
            seat.hear()
            raise AddressInUse(
                f"{address}: worker pid {seat.holder_pid} does not make room within "
                f"{TAKEOVER_SECONDS:g} s; stop it"
            )
        seat.sit()
    finally:
        seat.unlock(CLAIM)


def wait(seat: Seat) -> None:
    """Returns when this process serves because the one before died or left. No signal handler of
    Python's runs meanwhile."""
    seat.lock(STANDBY, None)
    while True:
        seat.lock(SERVING, None)
        if not seat.held(CLAIM):
            break
        seat.unlock(SERVING)
        seat.lock(CLAIM, None)  # until the one that goes first serves, or gave up
        seat.unlock(CLAIM)
    seat.sit()
    seat.unlock(STANDBY)


def succession(seat: Seat) -> bool:
    """Whether somebody takes the place the moment it is free. For the one that serves."""
    return seat.held(CLAIM) or seat.held(STANDBY)
