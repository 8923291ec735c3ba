"""Claims about several processes and threads: shared memory, death, forks, contexts of threads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from ds4_common.cuda.device import probe
from ds4_common.cuda.memory import Allocation, DeviceBuffer, Mapping, granularity
from ds4_common.errors import CudaError, WrongCudaDevice
from helpers import cuda_stand_in
from helpers.driver.bench import bench, claim
from helpers.driver.memory_claims import refused

READER = """
import sys
from helpers import cuda_stand_in
from helpers.driver.bench import bench
from ds4_common.cuda.memory import Allocation, DeviceBuffer, Mapping, granularity
with bench() as it:
    size = int(sys.argv[2])
    with Allocation.import_fd(int(sys.argv[1]), size, "import") as imported:
        with Mapping(imported, it.device, writable=False) as mapping:
            for line in sys.stdin:
                print(it.get(mapping.address + size - 8, 8).decode(), flush=True)
"""
FILLER = """
import sys
from helpers import cuda_stand_in
from helpers.driver.bench import bench
from ds4_common.cuda.memory import Allocation, Mapping
with bench() as it:
    size = int(sys.argv[2])
    with Allocation.import_fd(int(sys.argv[1]), size, "import") as imported:
        with Mapping(imported, it.device, writable=True) as mapping:
            it.put(mapping.address + size - 8, b"uploaded")
"""
WRITER = """
import array, socket, sys
from helpers import cuda_stand_in
from helpers.driver.bench import bench
from ds4_common.cuda.memory import Mapping
peer = socket.socket(fileno=int(sys.argv[1]))
with bench() as it:
    allocation = it.shareable()
    with Mapping(allocation, it.device, writable=True) as mapping:
        it.put(mapping.address, b"survivor")
        fds = array.array("i", [allocation.export_fd()])
        peer.sendmsg([b"here"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        sys.stdin.read()
"""


def start(program: str, *arguments: object, fd: int) -> subprocess.Popen[str]:
    """Another process on the same device."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if probe().simulated:
        environment = cuda_stand_in.environment(environment)
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(fd,),
        env=environment,
    )


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@claim
def another_process_reads_what_this_one_writes() -> None:
    with bench() as it, it.shareable() as allocation:
        fd = allocation.export_fd()
        with Mapping(allocation, it.device, writable=True) as mapping:
            end = mapping.address + allocation.n_bytes - 8
            it.put(end, b"tensor-1")
            reader = start(READER, fd, allocation.n_bytes, fd=fd)
            with reader:
                assert ask(reader) == "tensor-1"
                it.put(end, b"tensor-2")
                assert ask(reader) == "tensor-2"
        os.close(fd)


@claim
def imported_memory_outlives_the_process_that_made_it() -> None:
    with bench() as it:
        ours, theirs = socket.socketpair()
        with ours, theirs, start(WRITER, theirs.fileno(), fd=theirs.fileno()) as writer:
            _, fds, _, _ = socket.recv_fds(ours, 16, 1)
            imported = Allocation.import_fd(fds[0], granularity(it.device), "import")
            os.close(fds[0])
            with Mapping(imported, it.device, writable=False) as mapping:
                imported.close()
                writer.kill()
                writer.wait()
                assert it.get(mapping.address, 8) == b"survivor"


@claim
def a_descriptor_alone_keeps_memory_whose_maker_died() -> None:
    """What an owner's successor has: no handle, no mapping, only what was handed over."""
    with bench() as it:
        ours, theirs = socket.socketpair()
        with ours, theirs, start(WRITER, theirs.fileno(), fd=theirs.fileno()) as writer:
            _, fds, _, _ = socket.recv_fds(ours, 16, 1)
            writer.kill()
            writer.wait()
        with Allocation.import_fd(fds[0], granularity(it.device), "import") as imported:
            with Mapping(imported, it.device, writable=False) as mapping:
                assert it.get(mapping.address, 8) == b"survivor"
        os.close(fds[0])


@claim
def memory_made_without_a_context_is_filled_by_one_process_and_read_by_another() -> None:
    """An owner, its loader and a worker: the loader is gone before the worker maps."""
    device = probe()
    with Allocation.create(device, granularity(device), "weights") as allocation:
        for program, expected in ((FILLER, ""), (READER, "uploaded")):
            fd = allocation.export_fd()
            with start(program, fd, allocation.n_bytes, fd=fd) as process:
                os.close(fd)
                assert process.communicate("\n")[0].strip() == expected
                assert process.returncode == 0


@claim
def a_forked_child_is_refused() -> None:
    with bench():
        child = os.fork()
        if not child:
            code = 1
            try:
                probe()
            except CudaError as error:
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def in_thread(work: Callable[[], None]) -> list[BaseException]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except CudaError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


@claim
def a_thread_needs_the_context_made_current() -> None:
    with bench() as it:

        def use() -> None:
            DeviceBuffer(64, "buffer").close()

        def enter_and_use() -> None:
            it.context.enter()
            use()

        (error,) = in_thread(use)
        assert isinstance(error, CudaError)
        assert error.code == 201
        assert not in_thread(enter_and_use)


@claim
def a_device_is_told_by_its_uuid() -> None:
    device = probe()
    assert probe(device.ordinal, uuid=device.uuid) == device
    other = "GPU-00000000-0000-0000-0000-000000000000"
    error = refused(WrongCudaDevice, lambda: probe(device.ordinal, uuid=other))
    assert device.uuid in str(error)
    refused(WrongCudaDevice, lambda: probe(99))


@claim
def a_device_describes_itself() -> None:
    device = probe()
    assert device.name == device.name.strip() != ""
    assert "\0" not in device.name
    assert device.compute_capability >= (7, 0)
    assert device.total_bytes > 1 << 30
    assert device.shared_bytes_per_block >= 48 << 10
    assert device.uuid.startswith("GPU-")
    assert len(device.uuid) == 40
