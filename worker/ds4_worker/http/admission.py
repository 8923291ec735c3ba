"""How many sequences the server holds at once, from parsing to the last byte read by the client.

One permit per sequence, taken before any work is done for it and kept while its reader reads: what
is retained in memory is bounded by permits, however slowly clients read.
"""

from __future__ import annotations

from ds4_common.errors import RequestError


class Admission:
    def __init__(self, active: int, queued: int) -> None:
        """Permits for `active` running and `queued` waiting sequences."""
        self.total = active + queued
        self.free = self.total
        self.admitted = 0  # so far
        self.rejected = {"queue_full": 0, "too_many": 0}

    def take(self, count: int) -> None:
        """Takes `count` permits. Raises RequestError: 429 when they are in use, 400 when there
        never are that many."""
        if count > self.total:
            self.rejected["too_many"] += count
            raise RequestError(
                f"the request asks for {count} sequences, the server holds at most {self.total}",
                code="too_many_sequences",
            )
        if count > self.free:
            self.rejected["queue_full"] += count
            raise RequestError(
                f"all {self.total} places are taken or promised; retry in a moment",
                status=429,
                code="queue_full",
            )
        self.free -= count
        self.admitted += count

    def give_back(self, count: int) -> None:
        self.free += count
