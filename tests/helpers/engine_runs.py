"""Requests run to their end by an engine without threads."""

from __future__ import annotations

from ds4_worker.engine.api import Event, Generation
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.sequence import Sequence


def run(core: EngineCore, *items: Generation) -> list[list[Event]]:
    """The events of each request, all submitted before the first step."""
    sequences = [core.sequence(wanted) for wanted in items]
    events: dict[Sequence, list[Event]] = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        core.submit(sequence)
    while (batch := core.step()) is not None:
        for sequence, event in batch:
            events[sequence].append(event)
    return [events[sequence] for sequence in sequences]
