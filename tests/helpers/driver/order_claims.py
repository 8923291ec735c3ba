"""Claims about order, over generated programs: work on several streams, tied together by events.

Every cell of the buffer remembers the event of whatever touched it last, and who touches it next
waits for that. So a program has one meaning, the one of running its steps one after the other.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.cuda.memory import DeviceBuffer
from ds4_common.cuda.stream import Event, Stream
from helpers.driver.bench import Bench, bench, claim

CELLS, CELL_BYTES, STREAMS = 4, 64, 3


class Step(NamedTuple):
    """Fills a cell with a byte, or copies another cell into it."""

    stream: int
    cell: int
    source: int | None
    byte: int


STEPS = st.lists(
    st.builds(
        Step,
        stream=st.integers(0, STREAMS - 1),
        cell=st.integers(0, CELLS - 1),
        source=st.none() | st.integers(0, CELLS - 1),
        byte=st.integers(0, 255),
    ),
    max_size=24,
)


class Board:
    """The cells on the device, the streams, and the events between them."""

    def __init__(self, it: Bench, stack: ExitStack) -> None:
        self.it = it
        self.buffer = stack.enter_context(DeviceBuffer(CELLS * CELL_BYTES, "cells"))
        others = [stack.enter_context(Stream()) for _ in range(STREAMS - 1)]
        self.streams = [it.stream, *others]
        self.stack = stack
        self.last: dict[int, Event] = {}

    def clear(self) -> None:
        self.last.clear()
        self.it.stream.fill(self.buffer.address, 0, CELLS * CELL_BYTES)
        self.it.stream.synchronize()

    def event_on(self, stream: Stream) -> Event:
        event = Event()
        self.stack.callback(event.close)
        stream.record(event)
        return event

    def issue(self, steps: list[Step]) -> None:
        for step in steps:
            stream = self.streams[step.stream]
            touched = {step.cell} if step.source is None else {step.cell, step.source}
            for cell in touched & self.last.keys():
                stream.wait(self.last[cell])
            address = self.buffer.address + step.cell * CELL_BYTES
            if step.source is None:
                stream.fill(address, step.byte, CELL_BYTES)
            elif step.source != step.cell:
                source = self.buffer.address + step.source * CELL_BYTES
                stream.copy(address, source, CELL_BYTES)
            self.last.update(dict.fromkeys(touched, self.event_on(stream)))

    def join(self) -> None:
        """The first stream waits for all others."""
        for stream in self.streams[1:]:
            self.it.stream.wait(self.event_on(stream))

    def cells(self) -> list[int]:
        data = self.it.get(self.buffer.address, CELLS * CELL_BYTES)
        pieces = [data[i : i + CELL_BYTES] for i in range(0, len(data), CELL_BYTES)]
        assert all(len(set(piece)) == 1 for piece in pieces), "a cell was written by halves"
        return [piece[0] for piece in pieces]


def meaning(steps: list[Step]) -> list[int]:
    cells = [0] * CELLS
    for step in steps:
        cells[step.cell] = step.byte if step.source is None else cells[step.source]
    return cells


@claim
def events_give_work_on_many_streams_the_order_it_was_issued_in() -> None:
    with bench() as it:

        @settings(max_examples=60, deadline=None, database=None)
        @given(STEPS)
        def check(steps: list[Step]) -> None:
            with ExitStack() as stack:
                board = Board(it, stack)
                board.clear()
                board.issue(steps)
                board.join()
                assert board.cells() == meaning(steps)

        check()


@claim
def a_graph_captured_from_many_streams_means_what_its_steps_mean() -> None:
    with bench() as it:

        @settings(max_examples=60, deadline=None, database=None)
        @given(STEPS.filter(bool))
        def check(steps: list[Step]) -> None:
            with ExitStack() as stack:
                board = Board(it, stack)
                board.clear()
                it.stream.begin_capture()
                fork = board.event_on(it.stream)
                for stream in board.streams[1:]:
                    stream.wait(fork)
                board.issue(steps)
                board.join()
                graph = it.stream.end_capture()
                stack.callback(graph.close)
                program = graph.instantiate()
                stack.callback(program.close)
                for _ in range(2):
                    board.clear()
                    program.launch(it.stream)
                    assert board.cells() == meaning(steps)

        check()
