"""Claims about streams, events, launches and captured graphs."""

from __future__ import annotations

import ctypes

from ds4_common.cuda import driver
from ds4_common.cuda.memory import DeviceBuffer, PinnedBuffer
from ds4_common.cuda.module import Module, Parameters
from ds4_common.cuda.stream import Event, Stream
from ds4_common.errors import CudaContextLost, CudaError
from helpers.driver.bench import (
    add_parameters,
    bench,
    claim,
    fatal_claim,
    memory,
    strict_claim,
    zeroed_floats,
)
from helpers.driver.memory_claims import refused

ONE, BLOCK = (1, 1, 1), (32, 1, 1)


@claim
def a_stream_keeps_its_order() -> None:
    with bench() as it, DeviceBuffer(64, "buffer") as buffer, PinnedBuffer(64, "stage") as stage:
        stage.view[:] = bytes(range(64))
        it.stream.fill(buffer.address, 0xFF, 64)
        it.stream.upload(buffer.address, stage.address, 16)
        it.stream.copy(buffer.address + 32, buffer.address, 16)
        it.stream.fill(buffer.address, 7, 8)
        expected = b"\7" * 8 + bytes(range(8, 16)) + b"\xff" * 16 + bytes(range(16))
        assert it.get(buffer.address, 48) == expected


@claim
def a_wait_orders_two_streams() -> None:
    with bench() as it, Stream() as other, DeviceBuffer(1 << 20, "buffer") as buffer:
        ready = Event()
        with PinnedBuffer(1 << 20, "in") as source, PinnedBuffer(1 << 20, "out") as target:
            source.view[:] = bytes(range(256)) * 4096
            target.view[:] = bytes(1 << 20)
            it.stream.upload(buffer.address, source.address, 1 << 20)
            it.stream.record(ready)
            other.wait(ready)
            other.download(target.address, buffer.address, 1 << 20)
            other.synchronize()
            assert bytes(target.view) == bytes(source.view)
        ready.close()


@claim
def a_stage_may_be_reused_after_its_event() -> None:
    """How weights are uploaded: two stages in turn, each waited for before it is filled again."""
    chunk, chunks = 4096, 7
    with bench() as it, DeviceBuffer(chunk * chunks, "buffer") as buffer:
        stages = [PinnedBuffer(chunk, f"stage {i}") for i in range(2)]
        events = [Event(), Event()]
        for i in range(chunks):
            events[i % 2].synchronize()
            stages[i % 2].view[:] = bytes([i]) * chunk
            it.stream.upload(buffer.address + i * chunk, stages[i % 2].address, chunk)
            it.stream.record(events[i % 2])
        expected = b"".join(bytes([i]) * chunk for i in range(chunks))
        assert it.get(buffer.address, chunk * chunks) == expected
        for stage in stages:
            stage.close()


@claim
def an_event_that_was_never_recorded_is_done() -> None:
    with bench() as it:
        event = Event()
        assert event.done()
        event.synchronize()
        it.stream.wait(event)
        it.stream.synchronize()
        event.close()


@claim
def polling_an_event_comes_to_an_end() -> None:
    with bench() as it, DeviceBuffer(1 << 20, "buffer") as buffer:
        event = Event()
        for byte in range(8):
            it.stream.fill(buffer.address, byte, 1 << 20)
        it.stream.record(event)
        while not event.done():
            pass
        assert it.stream.done()
        event.close()


@claim
def two_timing_events_measure_the_time_between() -> None:
    with bench() as it, DeviceBuffer(1 << 20, "buffer") as buffer:
        start, end, untimed = Event(timing=True), Event(timing=True), Event()
        it.stream.record(start)
        it.stream.fill(buffer.address, 1, 1 << 20)
        it.stream.record(end)
        it.stream.record(untimed)
        untimed.synchronize()
        assert end.milliseconds_since(start) >= 0
        refused(CudaError, lambda: end.milliseconds_since(untimed))


@claim
def a_destroyed_stream_still_does_what_was_queued() -> None:
    with bench() as it, DeviceBuffer(64, "buffer") as buffer:
        stream = Stream()
        stream.fill(buffer.address, 9, 64)
        stream.close()
        it.context.synchronize()
        assert it.get(buffer.address, 64) == b"\x09" * 64


@claim
def a_launch_takes_its_parameters_when_it_is_called() -> None:
    with bench() as it, zeroed_floats(it, 1000) as data:
        add = it.kernels().function("add")
        parameters = add_parameters(data.address, 1000, 1.5)
        add.launch(it.stream, (2, 1, 1), (128, 1, 1), parameters)
        parameters[2].value = 0.25
        add.launch(it.stream, (2, 1, 1), (128, 1, 1), parameters)
        parameters[0].value = 0
        assert it.floats(data.address, 1000) == [1.75] * 1000


@claim
def impossible_launches_are_refused() -> None:
    with bench() as it, zeroed_floats(it, 4) as data:
        add = it.kernels().function("add")
        parameters = add_parameters(data.address, 4, 1)
        for grid, block, shared in (
            (ONE, (2048, 1, 1), 0),
            (ONE, (1, 1, 65), 0),
            ((0, 1, 1), BLOCK, 0),
            ((1 << 31, 1, 1), BLOCK, 0),
            ((1, 65536, 1), BLOCK, 0),
            ((1, 1, 65536), BLOCK, 0),
            (ONE, BLOCK, 64 << 10),
            (ONE, BLOCK, it.device.shared_bytes_per_block + 1),
        ):

            def launch(grid=grid, block=block, shared=shared) -> None:  # type: ignore[no-untyped-def]
                add.launch(it.stream, grid, block, parameters, shared)

            refused(CudaError, launch)
        assert it.floats(data.address, 4) == [0.0] * 4


@claim
def more_shared_memory_is_given_to_a_kernel_that_asks() -> None:
    with bench() as it, zeroed_floats(it, 4) as data:
        add = it.kernels().function("add")
        add.allow_dynamic_shared(64 << 10)
        assert add.attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES") == 64 << 10
        add.launch(it.stream, ONE, BLOCK, add_parameters(data.address, 4, 1), 64 << 10)
        assert it.floats(data.address, 4) == [1.0] * 4
        too_much = it.device.shared_bytes_per_block + 4
        refused(CudaError, lambda: add.allow_dynamic_shared(too_much))


@claim
def a_kernel_tells_what_it_needs() -> None:
    with bench() as it:
        add = it.kernels().function("add")
        assert 32 <= add.attribute("MAX_THREADS_PER_BLOCK") <= 1024
        assert 0 < add.attribute("NUM_REGS") <= 255
        assert add.attribute("LOCAL_SIZE_BYTES") == 0
        major, minor = it.device.compute_capability
        assert add.attribute("BINARY_VERSION") == 10 * major + minor


@claim
def what_a_module_does_not_have_is_not_found() -> None:
    with bench() as it:
        module = it.kernels()
        error = refused(CudaError, lambda: module.function("substract"))
        assert "substract of contract kernels" in str(error)


@claim
def what_is_no_code_is_refused() -> None:
    with bench() as it:
        error = refused(CudaError, lambda: Module(b"\0" * 4096, "half a cubin"))
        assert "half a cubin" in str(error)
        it.stream.synchronize()


@claim
def a_captured_graph_runs_when_it_is_launched_on_what_is_there_then() -> None:
    with bench() as it, zeroed_floats(it, 8) as data, PinnedBuffer(4, "result") as result:
        module = it.kernels()
        add, total = module.function("add"), module.function("sum")
        with zeroed_floats(it, 1) as answer:
            it.stream.begin_capture()
            parameters = add_parameters(data.address, 8, 1)
            add.launch(it.stream, ONE, BLOCK, parameters)
            parameters[2].value = 100.0
            operands = [
                ctypes.c_uint64(data.address),
                ctypes.c_uint32(8),
                ctypes.c_uint64(answer.address),
            ]
            total.launch(it.stream, ONE, BLOCK, Parameters(operands))
            it.stream.download(result.address, answer.address, 4)
            graph = it.stream.end_capture()
            assert it.floats(data.address, 8) == [0.0] * 8
            program = graph.instantiate()
            graph.close()
            program.upload(it.stream)
            seen = []
            for start in (b"\0" * 32, bytes((ctypes.c_float * 8)(*range(8)))):
                it.put(data.address, start)
                for _ in range(2):
                    program.launch(it.stream)
                it.stream.synchronize()
                seen.append(ctypes.c_float.from_buffer_copy(result.view).value)
            assert seen == [16.0, 44.0]
            program.close()


@claim
def waiting_for_a_stream_that_captures_breaks_the_capture_and_nothing_else() -> None:
    with bench() as it, zeroed_floats(it, 4) as data:
        add = it.kernels().function("add")
        it.stream.begin_capture()
        add.launch(it.stream, ONE, BLOCK, add_parameters(data.address, 4, 1))
        refused(CudaError, it.stream.synchronize)
        refused(CudaError, it.stream.end_capture)
        add.launch(it.stream, ONE, BLOCK, add_parameters(data.address, 4, 2))
        assert it.floats(data.address, 4) == [2.0] * 4


@claim
def a_kernel_that_never_ran_can_be_captured() -> None:
    """Graphs are captured at load, before anything ran: no code may come to the device then."""
    with bench() as it, zeroed_floats(it, 4) as data:
        add = it.kernels().function("add")
        it.stream.begin_capture()
        add.launch(it.stream, ONE, BLOCK, add_parameters(data.address, 4, 1))
        it.stream.end_capture().instantiate().launch(it.stream)
        assert it.floats(data.address, 4) == [1.0] * 4


@strict_claim
def code_cannot_come_to_the_device_while_capturing() -> None:
    with bench() as it, zeroed_floats(it, 4) as data:
        module = it.kernels()
        it.stream.begin_capture()
        it.stream.fill(data.address, 1, 4)
        refused(CudaError, lambda: module.function("add"))
        refused(CudaError, it.stream.end_capture)


@strict_claim
def memory_cannot_be_allocated_while_capturing() -> None:
    with bench() as it, zeroed_floats(it, 4) as data:
        it.stream.begin_capture()
        it.stream.fill(data.address, 1, 4)
        refused(CudaError, lambda: DeviceBuffer(1 << 20, "late"))
        refused(CudaError, it.stream.end_capture)


@claim
def a_capture_follows_events_into_another_stream_and_back() -> None:
    with bench() as it, Stream() as side, zeroed_floats(it, 8) as data:
        add = it.kernels().function("add")
        fork, join = Event(), Event()
        it.stream.begin_capture()
        add.launch(it.stream, ONE, BLOCK, add_parameters(data.address, 8, 1))
        it.stream.record(fork)
        side.wait(fork)
        add.launch(side, ONE, BLOCK, add_parameters(data.address, 4, 10))
        side.record(join)
        add.launch(it.stream, ONE, BLOCK, add_parameters(data.address + 16, 4, 20))
        it.stream.wait(join)
        graph = it.stream.end_capture()
        graph.instantiate().launch(it.stream)
        assert it.floats(data.address, 8) == [11.0] * 4 + [21.0] * 4


@claim
def a_capture_that_is_not_joined_is_refused() -> None:
    with bench() as it, Stream() as side, zeroed_floats(it, 8) as data:
        fork = Event()
        it.stream.begin_capture()
        it.stream.record(fork)
        side.wait(fork)
        side.fill(data.address, 1, 4)
        refused(CudaError, it.stream.end_capture)
        side.fill(data.address, 0, 4)
        side.synchronize()


@fatal_claim
def a_kernel_that_writes_a_read_only_mapping_loses_the_context() -> None:
    with bench() as it:
        add = it.kernels().function("add")
        with memory(it, writable=False) as mapping:
            add.launch(it.stream, ONE, BLOCK, add_parameters(mapping.address, 4, 1))
            error = refused(CudaContextLost, it.stream.synchronize)
            assert error.exit_code == 49
            assert "restart this process" in str(error)
            refused(CudaContextLost, it.stream.synchronize)
            refused(CudaContextLost, lambda: DeviceBuffer(1 << 20, "after"))


@fatal_claim
def a_kernel_that_reads_where_nothing_is_loses_the_context() -> None:
    with bench() as it, zeroed_floats(it, 1) as answer:
        operands = [ctypes.c_uint64(64), ctypes.c_uint32(8), ctypes.c_uint64(answer.address)]
        it.kernels().function("sum").launch(it.stream, ONE, BLOCK, Parameters(operands))
        refused(CudaContextLost, it.context.synchronize)


@fatal_claim
def a_graph_that_faults_loses_the_context() -> None:
    with bench() as it, memory(it, writable=False) as mapping:
        add = it.kernels().function("add")
        it.stream.begin_capture()
        add.launch(it.stream, ONE, BLOCK, add_parameters(mapping.address, 4, 1))
        program = it.stream.end_capture().instantiate()

        def run() -> None:
            program.launch(it.stream)
            it.stream.synchronize()

        refused(CudaContextLost, run)
        refused(CudaContextLost, lambda: driver.call("cuCtxSynchronize"))
