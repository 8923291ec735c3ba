"""Counters of the HTTP side, written by the event loop and read by `/metrics`.

Plain numbers under fixed words, so nothing that a client sent can become a label.
"""

from __future__ import annotations

# Why requests are refused, by the status that says so; other statuses count as "other".
REASONS = {
    400: "invalid",
    401: "unauthorized",
    404: "not_found",
    405: "method",
    408: "timeout",
    413: "too_large",
    414: "too_large",
    415: "encoding",
    417: "expectation",
    429: "queue_full",
    431: "too_large",
    500: "failure",
    501: "unsupported",
    503: "unavailable",
    505: "unsupported",
}
OTHER = "other"


class HttpCounters:
    """What happened to requests since this worker started, and who is connected now."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests = 0  # read to their end
        self.refusals = dict.fromkeys((*REASONS.values(), OTHER), 0)  # before an answer had begun
        self.responses: dict[int, int] = {}  # begun, by status
        self.disconnects = 0  # clients that went away before their answer was complete
        self.keepalives = 0  # sent into streams that had nothing else to send

    def responded(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1

    def refused(self, status: int) -> None:
        self.refusals[REASONS.get(status, OTHER)] += 1
