"""A claim about memory and its mappings in any order of making, sharing, mapping and closing.

The model: memory is one byte that all its mappings show; it lives while a handle, a descriptor or
a mapping of it does. Whatever the order, a mapping shows what was last written through any other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from ds4_common.cuda.memory import Allocation, Mapping, granularity
from ds4_common.errors import CudaError
from helpers.driver.bench import Bench, bench, claim
from helpers.driver.memory_claims import refused

PROBED_BYTES = 64
MOST = 6  # of each thing at a time


@dataclass
class Memory:
    """What is in one piece of device memory."""

    byte: int | None = None  # never written: anything


@dataclass
class Model:
    handles: list[tuple[Allocation, Memory]] = field(default_factory=list)
    descriptors: list[tuple[int, Memory]] = field(default_factory=list)
    mappings: list[tuple[Mapping, Memory]] = field(default_factory=list)


class Sharing(RuleBasedStateMachine):
    bench: Bench  # set by the claim

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    @precondition(lambda self: len(self.model.handles) < MOST)
    @rule()
    def make(self) -> None:
        self.model.handles.append((self.bench.shareable(), Memory()))

    @precondition(lambda self: self.model.handles and len(self.model.descriptors) < MOST)
    @rule(data=st.data())
    def export(self, data: st.DataObject) -> None:
        allocation, memory = data.draw(st.sampled_from(self.model.handles))
        self.model.descriptors.append((allocation.export_fd(), memory))

    @precondition(lambda self: self.model.descriptors and len(self.model.handles) < MOST)
    @rule(data=st.data())
    def import_again(self, data: st.DataObject) -> None:
        fd, memory = data.draw(st.sampled_from(self.model.descriptors))
        size = granularity(self.bench.device)
        self.model.handles.append((Allocation.import_fd(fd, size, "import"), memory))

    @precondition(lambda self: self.model.handles and len(self.model.mappings) < MOST)
    @rule(data=st.data(), writable=st.booleans())
    def map(self, data: st.DataObject, writable: bool) -> None:
        allocation, memory = data.draw(st.sampled_from(self.model.handles))
        mapping = Mapping(allocation, self.bench.device, writable=writable)
        self.model.mappings.append((mapping, memory))

    @precondition(lambda self: self.model.mappings)
    @rule(data=st.data(), byte=st.integers(0, 255))
    def write(self, data: st.DataObject, byte: int) -> None:
        mapping, memory = data.draw(st.sampled_from(self.model.mappings))

        def fill() -> None:
            self.bench.stream.fill(mapping.address, byte, PROBED_BYTES)
            self.bench.stream.synchronize()

        if mapping.writable:
            fill()
            memory.byte = byte
        elif self.bench.device.simulated:  # a device may lose its context over it
            refused(CudaError, fill)

    @precondition(lambda self: self.model.mappings)
    @rule()
    def read_everywhere(self) -> None:
        for mapping, memory in self.model.mappings:
            shown = self.bench.get(mapping.address, PROBED_BYTES)
            assert memory.byte is None or shown == bytes([memory.byte]) * PROBED_BYTES

    @precondition(lambda self: self.model.handles)
    @rule(data=st.data())
    def close_handle(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.model.handles) - 1))
        self.model.handles.pop(index)[0].close()

    @precondition(lambda self: self.model.descriptors)
    @rule(data=st.data())
    def close_descriptor(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.model.descriptors) - 1))
        os.close(self.model.descriptors.pop(index)[0])

    @precondition(lambda self: self.model.mappings)
    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.model.mappings) - 1))
        self.model.mappings.pop(index)[0].close()

    def teardown(self) -> None:
        self.read_everywhere()
        for mapping, _ in self.model.mappings:
            mapping.close()
        for fd, _ in self.model.descriptors:
            os.close(fd)
        for allocation, _ in self.model.handles:
            allocation.close()


@claim
def mappings_show_the_memory_they_share_in_any_order_of_making_and_closing() -> None:
    with bench() as it:
        Sharing.bench = it
        free_before, _ = it.context.memory_info()
        run_state_machine_as_test(
            Sharing,
            settings=settings(
                max_examples=40, stateful_step_count=30, deadline=None, database=None
            ),
        )
        free_after, _ = it.context.memory_info()
        if it.device.simulated and not it.device.integrated:
            assert free_after == free_before
