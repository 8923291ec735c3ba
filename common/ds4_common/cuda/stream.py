"""Streams, events, copies and captured graphs.

Owns: their handles until closed. The calls that wait (`synchronize`) release the GIL. Refuses:
the default stream, whose implicit waits hide a missing one; streams here never wait for it.
"""

from __future__ import annotations

from typing import Any

from ds4_common.cuda import driver

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class Event:
    """A point in a stream. With `timing`, two of them measure the time between."""

    def __init__(self, *, timing: bool = False) -> None:
        self.handle: Any = driver.call("cuEventCreate", 0 if timing else DISABLE_TIMING)

    def synchronize(self) -> None:
        driver.call("cuEventSynchronize", self.handle)

    def done(self) -> bool:
        return driver.poll("cuEventQuery", self.handle)

    def milliseconds_since(self, start: Event) -> float:
        return float(driver.call("cuEventElapsedTime", start.handle, self.handle))

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            driver.give_back("cuEventDestroy", handle)


class Stream:
    """An ordered queue of copies and kernels."""

    def __init__(self) -> None:
        self.handle: Any = driver.call("cuStreamCreate", NON_BLOCKING)

    def synchronize(self) -> None:
        driver.call("cuStreamSynchronize", self.handle)

    def done(self) -> bool:
        return driver.poll("cuStreamQuery", self.handle)

    def record(self, event: Event) -> None:
        driver.call("cuEventRecord", event.handle, self.handle)

    def wait(self, event: Event) -> None:
        """What is queued from now on starts after the event."""
        driver.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def upload(self, device_address: int, host_address: int, n_bytes: int) -> None:
        """Host to device. The host bytes must stay until the copy is done."""
        driver.call("cuMemcpyHtoDAsync", device_address, host_address, n_bytes, self.handle)

    def download(self, host_address: int, device_address: int, n_bytes: int) -> None:
        driver.call("cuMemcpyDtoHAsync", host_address, device_address, n_bytes, self.handle)

    def copy(self, to_address: int, from_address: int, n_bytes: int) -> None:
        driver.call("cuMemcpyDtoDAsync", to_address, from_address, n_bytes, self.handle)

    def fill(self, device_address: int, byte: int, n_bytes: int) -> None:
        driver.call("cuMemsetD8Async", device_address, byte, n_bytes, self.handle)

    def begin_capture(self) -> None:
        """From now on work is recorded instead of run; other threads' calls are not affected."""
        modes = driver.bindings().CUstreamCaptureMode
        driver.call("cuStreamBeginCapture", self.handle, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def end_capture(self) -> Graph:
        """What was recorded. Raises CudaError when a call in between broke the capture."""
        graph = driver.call("cuStreamEndCapture", self.handle)
        return Graph(graph)

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            driver.give_back("cuStreamDestroy", handle)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Graph:
    """A recording; `instantiate` makes it runnable."""

    def __init__(self, handle: Any) -> None:
        self._handle: Any = handle

    def instantiate(self) -> ExecutableGraph:
        return ExecutableGraph(driver.call("cuGraphInstantiate", self._handle, 0))

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            driver.give_back("cuGraphDestroy", handle)


class ExecutableGraph:
    """A captured program that one call launches."""

    def __init__(self, handle: Any) -> None:
        self._handle: Any = handle

    def upload(self, stream: Stream) -> None:
        """Prepares the first launch, so that it costs no more than the others."""
        driver.call("cuGraphUpload", self._handle, stream.handle)

    def launch(self, stream: Stream) -> None:
        driver.call("cuGraphLaunch", self._handle, stream.handle)

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            driver.give_back("cuGraphExecDestroy", handle)
